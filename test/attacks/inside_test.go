package attacks

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// asUnprivileged is an environment variable whose value is an abstract Unix address. With it, this
// program listens on that address until standard input ends.
const asUnprivileged = "ATTACKS_HOLD"

// hold is the program with asUnprivileged: it listens on address.
func hold(address string) int {
	l, err := net.Listen("unix", address)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer l.Close()
	fmt.Println("holds")
	_, _ = os.Stdin.Read(make([]byte, 1))
	return 0
}

const unprivilegedLock = "refused: the lock is an nftables table, which needs CAP_NET_ADMIN"

func lockOfTheAgent(t *testing.T, s *site) {
	i := s.victimNode()
	n := s.a.Nodes[i]
	must(t, s.a.Stop(fleet.Agent(i)))
	self := filepath.Join(t.TempDir(), "hold") // a path that another user may read
	program, err := os.Executable()
	must(t, err)
	text, err := os.ReadFile(program)
	must(t, err)
	must(t, os.WriteFile(self, text, 0o755))
	for dir := filepath.Dir(self); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		must(t, os.Chmod(dir, 0o755))
	}
	cmd := n.Command(t.Context(), self)
	cmd.Env = append(os.Environ(), asUnprivileged+"=@"+kernel.RouteAgent.Lock)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	in, err := cmd.StdinPipe()
	must(t, err)
	out := &quiet{}
	cmd.Stdout, cmd.Stderr = out, out
	must(t, cmd.Start())
	defer func() {
		in.Close()
		_ = cmd.Wait()
		if !s.a.Running(fleet.Agent(i)) {
			must(t, s.a.Start(t.Context(), fleet.Agent(i)))
		}
	}()
	eventually(t, "a held lock", func() error {
		if !strings.Contains(out.String(), "holds") {
			return fmt.Errorf("%w: %s", errNotYet, out)
		}
		return nil
	})
	if err := s.a.Start(t.Context(), fleet.Agent(i)); err != nil {
		t.Errorf("the agent does not start: %v", err)
	}
}

func twoManagers(t *testing.T, s *site) {
	holder := func() string {
		var lease coordinationv1.Lease
		must(t, s.a.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: "isthmus-manager"}, &lease))
		return *lease.Spec.HolderIdentity
	}
	before := holder()
	cmd := s.a.Control.Command(t.Context(), isthmus, "manager", "--kubeconfig", filepath.Join(s.Lab.Dir, "kube-a", "isthmus-manager.kubeconfig"),
		"--namespace", fleet.Namespace, "--pod-cidr", s.a.PodCIDR.String(),
		"--metrics-address", "", "--health-address", "127.0.0.1:5899")
	cmd.Env = append(os.Environ(), "POD_NAME=manager-1", "POD_UID=another")
	out := &quiet{}
	cmd.Stdout, cmd.Stderr = out, out
	must(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-ended
	}()
	eventually(t, "the second manager", func() error {
		_, err := s.a.Control.Get(t.Context(), "http://127.0.0.1:5899/healthz")
		return err
	})
	time.Sleep(5 * grace)
	if after := holder(); after != before || strings.Contains(out.String(), "networks and endpoint of this cluster") {
		t.Errorf("%s led, and now %s does:\n%s", before, after, out)
	}
}

func nodeInAPeersNetwork(t *testing.T, s *site) {
	addr := s.seen(t, s.a, s.b, s.podOfB().Addr)
	k := newTap(t, s.Lab.Underlay, inNetworks(netip.MustParsePrefix(addr.String()+"/32")))
	name := s.a.Nodes[s.victimNode()].Name
	patch := func(addrs ...string) {
		t.Helper()
		var all []string
		for _, a := range addrs {
			all = append(all, fmt.Sprintf(`{"type":"InternalIP","address":%q}`, a))
		}
		node := &corev1.Node{}
		node.Name = name
		body := `{"status":{"addresses":[` + strings.Join(all, ",") + `]}}`
		must(t, s.a.Client.Status().Patch(t.Context(), node, client.RawPatch(types.MergePatchType, []byte(body))))
	}
	own := s.a.Nodes[s.victimNode()].Addr.String()
	patch(own, addr.String())
	defer patch(own)
	eventually(t, "a problem that names the Node", func() error {
		text, err := s.deliveryStatus(t, s.other)
		if err == nil && (!strings.Contains(text, addr.String()) || !strings.Contains(text, name)) {
			err = fmt.Errorf("%s", text)
		}
		return err
	})
	for range 5 {
		if _, err := s.podOfA(s.other).PingWith(t.Context(), addr, lab.PingOptions{Wait: patience}); err != nil {
			t.Error(err)
		}
	}
	if n := len(k.packets()); n > 0 {
		t.Errorf("%d packets in the clear", n)
	}
}

// deliveryStatus returns the status of the component that chooses the node to which packets of
// peers go: the gateway if it is a Pod, otherwise the route agent of the given node.
func (s *site) deliveryStatus(t *testing.T, node int) (string, error) {
	t.Helper()
	if s.inPod() {
		return s.host().Get(t.Context(), "http://127.0.0.1:5873/status")
	}
	return s.a.Nodes[node].Get(t.Context(), "http://127.0.0.1:5875/status")
}

func podOfAnother(t *testing.T, s *site) {
	victim := s.podOfA(s.victimNode())
	thief := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "thief"},
		Spec: corev1.PodSpec{NodeName: s.a.Nodes[s.other].Name, AutomountServiceAccountToken: new(bool),
			Containers: []corev1.Container{{Name: "main", Image: "none"}}},
	}
	must(t, s.a.Client.Create(t.Context(), thief))
	defer func() { must(t, s.a.Client.Delete(t.Context(), thief, client.GracePeriodSeconds(0))) }()
	thief.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: victim.Addr.String(), PodIPs: []corev1.PodIP{{IP: victim.Addr.String()}}}
	must(t, s.a.Client.Status().Update(t.Context(), thief))
	b := s.seen(t, s.a, s.b, s.podOfB().Addr)
	k := newTap(t, s.a.Nodes[s.other].Host, func(ip []byte) bool {
		return netip.AddrFrom4([4]byte(ip[12:16])) == b && netip.AddrFrom4([4]byte(ip[16:20])) == victim.Addr
	})
	addr := s.seen(t, s.b, s.a, victim.Addr)
	eventually(t, "who delivers names it", func() error {
		text, err := s.deliveryStatus(t, s.gateway)
		if err == nil && !strings.Contains(text, "Pod default/thief: status.podIPs: is "+victim.Addr.String()) {
			err = errors.New(text)
		}
		return err
	})
	for range tries {
		_, _ = s.podOfB().PingWith(t.Context(), addr, lab.PingOptions{Wait: grace}) // ignore an error, because the thief may receive the packet
	}
	if n := len(k.packets()); n > 0 {
		t.Errorf("%d packets for %s come to %s", n, victim, s.a.Nodes[s.other])
	}
}

func filterDeleted(t *testing.T, s *site) {
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("needs the command nft: 'make deps' installs it")
	}
	hosts := []*lab.Host{s.a.Nodes[s.victimNode()].Host}
	if s.inPod() {
		hosts = append(hosts, s.host())
	}
	for _, n := range hosts {
		list := func() (string, error) {
			out, err := n.Command(context.Background(), "nft", "-s", "list", "table", "inet", kernel.FilterTable).CombinedOutput()
			return string(out), err
		}
		before, err := list()
		must(t, err)
		for _, command := range []string{"delete table inet " + kernel.FilterTable, "flush chain inet " + kernel.FilterTable + " input",
			"insert rule inet " + kernel.FilterTable + " forward accept"} {
			if out, err := n.Command(t.Context(), "nft", command).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v %s", command, err, out)
			}
			eventually(t, "the filter as it was", func() error {
				now, err := list()
				if err == nil && !slices.Equal(sorted(now), sorted(before)) {
					err = fmt.Errorf("%s", now)
				}
				return err
			})
		}
	}
}

// closingChapter contains the attacks after which the gateway carries no traffic.
func closingChapter() chapter {
	return chapter{title: "Attacks that stop the gateway", closes: true, attacks: []attack{
		{attacker: "somebody with root in the network of the gateway's Pod", attempt: "makes a process of its own the owner of the packet filter's table",
			now: "the agent removes the overlay, nothing leaves in the clear, and /readyz reports it", run: filterTaken},
	}}
}

// filterTaken makes an attacker's process the owner of the gateway's nftables table
// (NFT_TABLE_F_OWNER), so that no other process can change the table.
func filterTaken(t *testing.T, s *site) {
	if !s.inPod() {
		return // for an agent, package routeagent has this test
	}
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("needs the command nft: 'make deps' installs it")
	}
	_, closed := s.gatewayReady(t)
	if closed != nil {
		t.Fatal(closed)
	}
	owner := s.host().Command(t.Context(), "nft", "-i")
	in, err := owner.StdinPipe()
	must(t, err)
	must(t, owner.Start())
	defer func() {
		in.Close()
		_ = owner.Wait()
		eventually(t, "a gateway that is ready again", func() error { _, err := s.gatewayReady(t); return err })
	}()
	eventually(t, "a gateway that is not ready", func() error {
		// The attacker must try this several times. The gateway recreates a deleted table at once,
		// and the process that creates the table first owns it.
		if _, err := fmt.Fprintf(in, "delete table inet %[1]s; add table inet %[1]s { flags owner; }\n", kernel.FilterTable); err != nil {
			t.Fatal(err)
		}
		time.Sleep(grace)
		text, err := s.gatewayReady(t)
		if err == nil {
			return fmt.Errorf("it says %s", text)
		}
		return nil
	})
	i := s.asPod(t, s.a.Nodes[s.victimNode()].Host, s.addr())
	i.run(t) // even a legitimate node's packet does not arrive, because without the filter there is no overlay
}

// gatewayReady returns the response of the gateway's /readyz.
func (s *site) gatewayReady(t *testing.T) (string, error) {
	t.Helper()
	return s.host().Get(t.Context(), "http://127.0.0.1:5872/readyz")
}

func sorted(text string) []string { return slices.Sorted(strings.SplitSeq(text, "\n")) }
