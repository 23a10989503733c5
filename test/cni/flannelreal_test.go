package cni

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// flannelReal runs flannel itself, built from its own packages (test/flannel). A process on each
// node reads the podCIDR of its Node from the API server, makes flannel.1 with its routes,
// neighbours and FDB entries, and writes its rules with the node's iptables. The shape itself makes
// the bridge cni0, which the bridge plugin makes in a real cluster.
var flannelReal = &shape{
	name:   "flannel, VXLAN: the real program",
	source: "github.com/flannel-io/flannel, run by test/flannel",
	form:   "**real:** flannel's packages vxlan, subnet/kube and trafficmngr/iptables make flannel.1, routes and rules; imitation: the bridge cni0",
	node:   func(c *lab.Cluster, i int) nodeSetup { return bridgedNode(c, i, "cni0", 1450) },
	run: func(ctx context.Context, c *fleet.Cluster, f filter) error {
		program, err := flannelProgram()
		if err != nil {
			return err
		}
		dir := filepath.Join(filepath.Dir(c.Log("flannel")), "flannel") // removed with the lab
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		files := map[string]string{
			"net-conf.json": fmt.Sprintf(`{"Network": %q, "EnableNFTables": false, "Backend": {"Type": "vxlan"}}`, c.PodCIDR),
			"kubeconfig":    string(c.Server.Kubeconfig()),
		}
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				return err
			}
		}
		for _, n := range c.Nodes {
			var node corev1.Node // flannel relies on an annotation, which every kubelet adds
			if err := c.Client.Get(ctx, client.ObjectKey{Name: n.Name}, &node); err != nil {
				return err
			}
			node.Annotations = map[string]string{"volumes.kubernetes.io/controller-managed-attach-detach": "true"}
			if err := c.Client.Update(ctx, &node); err != nil {
				return err
			}
			ready := filepath.Join(dir, n.Name+".env")
			log, err := os.Create(ready + ".log")
			if err != nil {
				return err
			}
			// The process ends with the lab.
			cmd := n.Command(context.Background(), program, "-kubeconfig", filepath.Join(dir, "kubeconfig"), "-net-config-path", filepath.Join(dir, "net-conf.json"), "-subnet-file", ready)
			cmd.Env = append(os.Environ(), "NODE_NAME="+n.Name, "PATH="+flannelPath(dir, f)+":"+os.Getenv("PATH"))
			cmd.Stdout, cmd.Stderr = log, log
			err = cmd.Start()
			log.Close()
			if err != nil {
				return err
			}
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			for begin := time.Now(); ; {
				if _, err := os.Stat(ready); err == nil {
					break
				}
				select {
				case err := <-ended:
					text, _ := os.ReadFile(ready + ".log")
					return fmt.Errorf("flannel on %s ended: %w\n%s", n, err, text)
				case <-time.After(50 * time.Millisecond):
				}
				if time.Since(begin) > patience {
					text, _ := os.ReadFile(ready + ".log")
					return fmt.Errorf("flannel on %s is not ready after %v\n%s", n, patience, text)
				}
			}
		}
		return nil
	},
}

// flannelPath returns a directory with an iptables of the variant that the cluster has. flannel
// uses the iptables that it finds in PATH.
func flannelPath(dir string, flavour filter) string {
	bin := filepath.Join(dir, string(flavour))
	_ = os.Mkdir(bin, 0o755) // it exists already for the second node
	for _, suffix := range []string{"", "-save", "-restore"} {
		path, err := exec.LookPath(string(flavour) + suffix)
		if err == nil {
			_ = os.Symlink(path, filepath.Join(bin, "iptables"+suffix))
		}
	}
	return bin
}

var flannelProgram = sync.OnceValues(func() (string, error) {
	program := filepath.Join(filepath.Dir(binary), "flanneld")
	cmd := exec.Command("go", "build", "-C", "../flannel", "-trimpath", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build flannel: %w\n%s", err, out)
	}
	return program, nil
})
