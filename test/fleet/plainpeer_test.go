package fleet

import (
	"bufio"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/test/internal/hosts"
)

// movedLoss is the number of datagrams, of 1,000 a second, that a planned takeover may lose with
// a plain WireGuard peer on a busy machine. It is half of the loss when an active gateway dies.
const movedLoss = 450

// A planned takeover must not interrupt traffic with a peer that does not run Isthmus: Debian's
// wireguard-go in place of b's gateway. That peer does not notice the takeover. It sends in the
// session with the previous gateway until the next gateway starts a handshake.
func TestPlannedTakeoverKeepsTrafficWithPlainWireGuardPeer(t *testing.T) {
	hosts.Need(t, "wireguard-go", "nft")
	f := upWith(t, fleet.Options{Votes: true, Spec: lab.Spec{Clusters: []lab.ClusterSpec{
		inPods(clusterSpec("10.244.0.0/16", 3)), clusterSpec("10.244.0.0/16", 2),
	}}})
	a, b := f.Clusters[0], f.Clusters[1]
	withoutPresharedKeys(t, b)
	peer(t, f, a, b)
	eventually(t, "votes", func() error { return checkVoting(t, a, 3) })
	from, plain := podOn(t, a, 2), plainPeer(t, a, b)
	_, err := firstPing(t.Context(), from.Host, func() (netip.Addr, error) { return plain.Addr, nil })
	must(t, err)
	const length = 4 * time.Second
	calm := echoes(t, from, plain, plain.Addr, 1, length, length, nil)
	was := active(t, a)
	moved := echoes(t, from, plain, plain.Addr, 1, length, length, func() { must(t, a.Stop(fleet.Gateway(was))) })
	t.Logf("without a move: %v; with one: %v", calm, moved)
	if moved.lost > calm.lost+movedLoss {
		t.Errorf("a planned move costs %d datagrams, and nothing %d", moved.lost, calm.lost)
	}
	if now := active(t, a); now == was {
		t.Errorf("%s is active, as before", a.Nodes[now])
	}
}

// plainPeer replaces all components on b's nodes by wireguard-go, which runs with b's key on the
// node of the active gateway. It uses an address of b's pods as a sees them, so it needs no
// translation.
func plainPeer(t *testing.T, a, b *fleet.Cluster) *lab.Pod {
	t.Helper()
	last := active(t, b)
	for i := range b.Nodes {
		if i != last { // first, because a standby would take over from a gateway that stops
			must(t, b.Stop(fleet.Gateway(i)))
		}
	}
	node := b.Nodes[last]
	eventually(t, "a sends to the last gateway of b", func() error {
		if now, to := active(t, b), endpointOf(t, a, b).Spec.EndpointIP; now != last || to != node.Addr.String() {
			return fmt.Errorf("a sends to %s, and the gateway on %s is active", to, b.Nodes[now])
		}
		return nil
	})
	pod := lab.Pod{Host: node.Host, Addr: seen(t, a, b, podOn(t, b, 1).Addr), Node: node}
	te := endpointOf(t, b, a)
	var secret corev1.Secret
	must(t, b.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: keyring.SecretName}, &secret))
	for _, name := range b.Components() {
		if name != fleet.Manager && b.Running(name) {
			must(t, b.Stop(name))
		}
	}
	ipCommand(t, node.Host, "rule", "flush") // removes the agents' rules, but not the rule for table local
	ipCommand(t, node.Host, "rule", "add", "lookup", "main", "pref", "32766")
	// Without this rule, probes of a's gateway, which nobody answers here, would leave in the
	// clear.
	nft(t, node.Host, "flush ruleset; add table ip plain; add chain ip plain forward { type filter hook forward priority 0; policy drop; }")

	device := fmt.Sprintf("ist%d", os.Getpid())
	socket := filepath.Join("/var/run/wireguard", device+".sock")
	cmd := node.Command(t.Context(), "wireguard-go", "--foreground", device)
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = os.Remove(socket)
	})
	var conn net.Conn
	eventually(t, "the socket of wireguard-go", func() (err error) {
		conn, err = net.Dial("unix", socket)
		return err
	})
	defer conn.Close()
	_, err := fmt.Fprintf(conn, "set=1\nprivate_key=%s\nlisten_port=5871\npublic_key=%s\nendpoint=%s:%s\nallowed_ip=0.0.0.0/0\n\n",
		hexKey(t, string(secret.Data[keyring.FieldPrivate])), hexKey(t, te.Spec.BackendConfig[v1alpha1.ConfigPublicKey]), te.Spec.EndpointIP, te.Spec.BackendConfig[v1alpha1.ConfigPort])
	must(t, err)
	if answer, err := bufio.NewReader(conn).ReadString('\n'); err != nil || answer != "errno=0\n" {
		t.Fatalf("wireguard-go: %q, %v", answer, err)
	}
	ipCommand(t, node.Host, "addr", "add", netip.PrefixFrom(pod.Addr, 32).String(), "dev", device)
	ipCommand(t, node.Host, "link", "set", device, "up", "mtu", "1380")
	pods, err := netip.ParsePrefix(te.Spec.RemoteNATPodCIDR) // both clusters have the same PodCIDR
	must(t, err)
	ipCommand(t, node.Host, "route", "replace", pods.String(), "dev", device, "src", pod.Addr.String())
	return &pod
}

// hexKey converts a base64 key to the notation of wireguard-go's configuration protocol.
func hexKey(t *testing.T, text string) string {
	t.Helper()
	key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(text))
	must(t, err)
	return hex.EncodeToString(key)
}
