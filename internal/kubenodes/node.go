package kubenodes

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/testbin"
)

// TestImage is the name of an image on all nodes. It contains the program testpod, which sends
// and answers probes.
const TestImage = "isthmus.test/testpod:1"

var serviceCIDR = netip.MustParsePrefix("10.96.0.0/16")

// patience is the timeout for a node to become ready on a busy machine.
const patience = 3 * time.Minute

//go:embed node.sh
var nodeScript []byte

// A Node is a machine with containerd, kubelet and kube-proxy.
type Node struct {
	*lab.Node

	cluster *Cluster
	dir     string // state of the node, on disk
	cmd     *lab.Cmd
	done    chan struct{}
}

func (n *Node) group() string { return groupPrefix + n.cluster.set.Lab.Name + "." + n.Name }

// testImage builds testpod and writes its image.
func (s *Set) testImage() (path string, err error) {
	if err := testbin.BuildPackage(s.dir, "internal/kubenodes/testpod"); err != nil {
		return "", err
	}
	path = filepath.Join(s.dir, "testpod.tar")
	return path, writeImage(path, TestImage, "", filepath.Join(s.dir, "testpod"))
}

// begin creates the Node object, boots the node and waits until it is ready.
func (n *Node) begin(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := os.MkdirAll(n.dir, 0o755); err != nil {
		return err
	}
	if err := n.register(ctx); err != nil {
		return err
	}
	if err := n.configure(); err != nil {
		return err
	}
	return n.Start(ctx)
}

// register creates the Node object. The underlay already has routes to each node's part of the
// PodCIDR, so the object specifies that part.
func (n *Node) register(ctx context.Context) error {
	object := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name},
		Spec:       corev1.NodeSpec{PodCIDR: n.PodCIDR.String(), PodCIDRs: []string{n.PodCIDR.String()}},
	}
	return client.IgnoreAlreadyExists(n.cluster.Client.Create(ctx, object))
}

// Replace replaces this node by a new one with the same name and an empty disk.
func (n *Node) Replace(ctx context.Context) error {
	if err := n.Crash(); err != nil { // discards the disk, which is in memory
		return err
	}
	if err := n.cluster.Client.Delete(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}); err != nil {
		return err
	}
	if err := n.register(ctx); err != nil {
		return err
	}
	return n.Start(ctx)
}

// Start boots a stopped node and waits until it is ready.
func (n *Node) Start(ctx context.Context) error {
	groups, err := makeGroups(n.group())
	if err != nil {
		return err
	}
	loaded := filepath.Join(n.dir, "images-loaded")
	if err := os.RemoveAll(loaded); err != nil {
		return err
	}
	if err := n.masquerade(); err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(n.dir, "node.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	n.cmd = n.Command(context.Background(), "sh", filepath.Join(n.dir, "node.sh"), "node")
	n.cmd.Env = append(os.Environ(), "NODE="+n.Name, "DIR="+n.dir, "BIN="+n.cluster.set.options.Kube, "ADDRESS="+n.Addr.String(),
		"CGROUPS="+strings.Join(groups, " "))
	n.cmd.Stdout, n.cmd.Stderr = log, log
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	started := time.Now()
	if err := n.cmd.Start(); err != nil {
		return err
	}
	n.done = make(chan struct{})
	go func() {
		_ = n.cmd.Wait() // the log contains the error
		close(n.done)
	}()
	if err := n.loadImages(ctx); err != nil {
		return fmt.Errorf("%w\n%s", err, n.Logs(20))
	}
	if err := os.WriteFile(loaded, nil, 0o644); err != nil {
		return err
	}
	return n.waitReady(ctx, started)
}

// waitReady waits until the kubelet reports that the node is ready, in a report that is not older
// than since.
func (n *Node) waitReady(ctx context.Context, since time.Time) error {
	var last error
	err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		select {
		case <-n.done:
			return false, errors.New("its process ended")
		default:
		}
		var node corev1.Node
		if last = n.cluster.Client.Get(ctx, client.ObjectKey{Name: n.Name}, &node); last != nil {
			return false, nil //nolint:nilerr // continue to wait; a timeout reports this error
		}
		for _, c := range node.Status.Conditions {
			// The API server stores times in whole seconds.
			if c.Type == corev1.NodeReady && !c.LastHeartbeatTime.Add(time.Second).Before(since) && isReady(&node) {
				return true, nil
			}
		}
		last = fmt.Errorf("not ready: %v", node.Status.Conditions)
		return false, nil
	})
	if err != nil {
		return fmt.Errorf("%w: %w\n%s", err, last, n.Logs(20))
	}
	return nil
}

// Crash ends the node as a power failure does. It kills all processes at once and removes the state
// in the node's kernel, except for the link and the routes to other nodes.
func (n *Node) Crash() error {
	if err := n.kill(); err != nil {
		return err
	}
	if err := n.Forget(); err != nil {
		return err
	}
	return n.run("nft", "flush", "ruleset")
}

// kill kills all processes of the node and waits until they have ended.
func (n *Node) kill() error {
	if n.cmd == nil || n.done == nil {
		return nil
	}
	if err := n.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-n.done
	n.cmd, n.done = nil, nil
	return removeGroups(n.group()) // succeeds once the last process has ended
}

// run runs a program in the node's namespaces, with this machine's file system.
func (n *Node) run(name string, args ...string) error {
	if out, err := n.Command(context.Background(), name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("node %s: %s %s: %w\n%s", n.Name, name, strings.Join(args, " "), err, out)
	}
	return nil
}

// masquerade adds rules that masquerade packets from all pods of the cluster. Without them, the
// node masquerades only packets of its own pods, by rules of the bridge plugin.
func (n *Node) masquerade() error {
	pods := n.cluster.PodCIDR.String()
	if n.cluster.options.Masquerade == MasqueradePublic {
		if err := n.run("iptables", "-w", "-t", "nat", "-A", "POSTROUTING", "-s", pods, "-d", "10.0.0.0/8", "-j", "RETURN"); err != nil {
			return err
		}
	}
	return n.run("iptables", "-w", "-t", "nat", "-A", "POSTROUTING", "-s", pods, "!", "-d", pods, "-j", "MASQUERADE")
}

// loadImages loads the images into the node's containerd as soon as containerd responds.
func (n *Node) loadImages(ctx context.Context) error {
	for _, image := range n.cluster.set.options.Images {
		var last error
		err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			socket := filepath.Join(n.root(), "run/containerd/containerd.sock")
			if _, last = os.Stat(socket); last != nil {
				return false, nil //nolint:nilerr // continue to wait; a timeout reports this error
			}
			out, err := n.Command(ctx, "ctr", "--address", socket, "--namespace", "k8s.io", "images", "import", image).CombinedOutput()
			if err != nil {
				last = fmt.Errorf("%w: %s", err, out)
			}
			return err == nil, nil
		})
		if err != nil {
			return fmt.Errorf("load image %s: %w: %w", image, err, last)
		}
	}
	return nil
}

// root returns the path of the node's root directory on this machine.
func (n *Node) root() string {
	if n.cmd == nil {
		return "/nonexistent"
	}
	// The node's init process is the only child of unshare(1).
	pid := n.cmd.Process.Pid
	init, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return "/nonexistent"
	}
	return filepath.Join("/proc", strings.TrimSpace(string(init)), "root")
}

// configure writes the configuration files of the node's programs.
func (n *Node) configure() error {
	c := n.cluster
	limit := syscall.Rlimit{}
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	kubelet, err := n.kubeconfig("system:node:"+n.Name, "system:nodes")
	if err != nil {
		return err
	}
	proxy, err := n.kubeconfig("system:kube-proxy")
	if err != nil {
		return err
	}
	pods := fmt.Sprintf(`"subnet": %q`, n.PodCIDR)
	if c.options.UpperHalf {
		pods += fmt.Sprintf(`, "rangeStart": %q`, middle(n.PodCIDR))
	}
	dns := ""
	if c.set.options.DNS != "" {
		dns = fmt.Sprintf("clusterDNS: [%v]\nclusterDomain: cluster.local\n", dnsAddress)
	}
	for name, content := range map[string]string{
		"node.sh": string(nodeScript),
		"ca.crt":  string(c.Server.CA()),
		"containerd.toml": fmt.Sprintf(`version = 2
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  # Without CAP_SYS_RESOURCE nobody lowers an OOM score.
  restrict_oom_score_adj = true
  # The node's own /run goes away with the node, /var/run/netns of the machine would not.
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = %q
    conf_dir = "/etc/cni/net.d"
`, TestImage, pluginsDir),
		"10-bridge.conflist": fmt.Sprintf(`{"cniVersion": "0.4.0", "name": "bridge", "plugins": [
{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "ipam": {"type": "host-local", "dataDir": "/run/cni",
 "ranges": [[{%s}]], "routes": [{"dst": "0.0.0.0/0"}]}},
{"type": "portmap", "capabilities": {"portMappings": true}}]}
`, pods),
		"kubelet.yaml": fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: %s}}
authorization: {mode: Webhook}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
resolvConf: ""
maxOpenFiles: %d
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: "0%%", nodefs.available: "0%%", nodefs.inodesFree: "0%%", imagefs.available: "0%%"}
`, filepath.Join(n.dir, "ca.crt"), limit.Max) + dns,
		"kubelet.kubeconfig": kubelet,
		"kube-proxy.yaml": fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
clientConnection: {kubeconfig: %s}
clusterCIDR: %s
detectLocalMode: ClusterCIDR
hostnameOverride: %s
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`, c.options.Proxy, filepath.Join(n.dir, "kube-proxy.kubeconfig"), c.PodCIDR, n.Name),
		"kube-proxy.kubeconfig": proxy,
	} {
		if err := os.WriteFile(filepath.Join(n.dir, name), []byte(content), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// middle returns the first address of the upper half of an IPv4 network.
func middle(p netip.Prefix) netip.Addr {
	a := p.Masked().Addr().As4()
	a[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	return netip.AddrFrom4(a)
}

func (n *Node) kubeconfig(user string, groups ...string) (string, error) {
	s := n.cluster.Server
	cert, key, err := s.ClientCert(user, groups...)
	if err != nil {
		return "", err
	}
	config := clientcmdapi.NewConfig()
	config.Clusters["c"] = &clientcmdapi.Cluster{Server: s.URL(), CertificateAuthorityData: s.CA()}
	config.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}
	config.Contexts["c"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	config.CurrentContext = "c"
	b, err := clientcmd.Write(*config)
	return string(b), err
}

// Logs returns the last lines from the log of each of the node's programs.
func (n *Node) Logs(lines int) string {
	var b strings.Builder
	for _, name := range []string{"node", "containerd", "kubelet", "kube-proxy"} {
		if text := tail(filepath.Join(n.dir, name+".log"), lines); text != "" {
			fmt.Fprintf(&b, "=== %s on %s\n%s\n", name, n.Name, text)
		}
	}
	return b.String()
}

// tail returns the last lines of a file, or nothing if there is no file.
func tail(path string, lines int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	all := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
