package cni

import (
	"context"
	be "encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// lasting is the time for which TestChaosLeaksNoPacketAndChangesNoForeignObject repeats each fault.
const lasting = 60 * time.Second

// While pods of both clusters exchange datagrams, the test repeats one fault for a minute. No
// packet for a peer may leave in the clear, no foreign object may change, and all traffic must work
// afterwards. The test logs the number of packets that each fault costs, but does not limit it.
func TestChaosLeaksNoPacketAndChangesNoForeignObject(t *testing.T) {
	if !*long {
		t.Skip("it takes five minutes for each pair: -long")
	}
	for _, plans := range chaosPairs {
		t.Run(plans[0].shape.name+" and "+plans[1].shape.name, func(t *testing.T) {
			w := up(t, plans, 3)
			for _, c := range w.faults() {
				t.Run(c.what, func(t *testing.T) { w.suffer(t, c) })
			}
			w.checkUnchanged(t, "after all", false)
			w.end(t)
			w.checkUnchanged(t, "after --cleanup", true)
		})
	}
}

// chaosPairs differ in the way in which nodes reach pods of other nodes, in the origin of the pods'
// addresses, and in the packet filter.
var chaosPairs = [][2]plan{
	{{shape: flannelVXLAN, podCIDR: "10.244.0.0/16", filter: legacy, drop: true, strict: true},
		{shape: flannelHostGW, podCIDR: "10.244.64.0/18", filter: nft, drop: true, strict: true}},
	{{shape: calicoVXLAN, podCIDR: "10.244.0.0/16", filter: nftables, drop: true, strict: true},
		{shape: awsVPC, filter: legacy, strict: true}},
	{{shape: weave, podCIDR: "10.32.0.0/12", filter: nft, drop: true},
		{shape: cilium, podCIDR: "10.42.0.0/16", filter: legacy, drop: true}},
}

// faults returns the faults that TestChaosLeaksNoPacketAndChangesNoForeignObject repeats.
func (w *world) faults() []chaos {
	rng := rand.New(rand.NewPCG(15, 2))
	return []chaos{
		{"nothing, for comparison", 3 * time.Second, func(t *testing.T, _ int) { t.Helper() }},
		{"an object of Isthmus in a kernel is deleted or changed", 500 * time.Millisecond, func(t *testing.T, _ int) {
			t.Helper()
			c := w.sides[rng.IntN(2)]
			w.damage(t, rng, c.Nodes[rng.IntN(len(c.Nodes))])
		}},
		{"a route agent is killed", 3 * time.Second, func(t *testing.T, i int) {
			t.Helper()
			c := w.sides[i%2]
			name := fleet.Agent(rng.IntN(len(c.Nodes)))
			must(t, c.Kill(name))
			must(t, c.Launch(name))
		}},
		{"the gateway moves", 5 * time.Second, func(t *testing.T, i int) {
			t.Helper()
			c := w.sides[i%2]
			at, err := c.ActiveGateway(t.Context())
			must(t, err)
			must(t, c.Stop(fleet.Gateway(at)))
			must(t, c.Launch(fleet.Gateway(at)))
		}},
		{"a node goes, comes, has another address", 4 * time.Second, func(t *testing.T, i int) {
			t.Helper()
			w.change(t, w.sides[i/3%2], i%3)
		}},
	}
}

// A chaos is a fault that is repeated.
type chaos struct {
	what  string
	every time.Duration
	once  func(t *testing.T, i int)
}

func (w *world) suffer(t *testing.T, c chaos) {
	t.Helper()
	leaked := w.Sniffer.Report().Leaked
	var foreignBefore []string
	for _, s := range w.sides {
		for _, n := range s.Nodes {
			state, err := stateOf(t.Context(), n)
			must(t, err)
			foreignBefore = append(foreignBefore, foreign(state))
		}
	}
	var streams []*datagrams
	for i := range w.sides {
		from, to := w.sides[i].Pods[2], w.sides[1-i].Pods[2] // on the second node of each cluster
		var at netip.Addr
		eventually(t, "networks agreed upon", func() (err error) {
			at, err = w.sides[i].Seen(t.Context(), w.sides[1-i], to.Addr)
			return err
		})
		streams = append(streams, newDatagrams(t, from, to, at))
	}
	var events []time.Time
	for begin, i := time.Now(), 0; time.Since(begin) < lasting; i++ {
		events = append(events, time.Now())
		c.once(t, i)
		if rest := c.every - time.Since(events[i]); rest > 0 {
			time.Sleep(rest)
		}
	}
	// Pods on all nodes must reach the peer again.
	for i := range w.sides {
		for _, p := range w.sides[i].Pods {
			to := w.sides[1-i].Pods[2]
			at, err := w.sides[i].Seen(t.Context(), w.sides[1-i], to.Addr)
			must(t, err)
			if _, err := patiently(t.Context(), p.Host, netip.Addr{}, at, talks[1], w.listeners[to.Host], patience); err != nil {
				t.Errorf("%s to %s afterwards: %v", p, to, err)
			}
		}
	}
	for _, s := range streams {
		t.Log(s.end(events))
	}
	if n := w.Sniffer.Report().Leaked - leaked; n > 0 {
		t.Errorf("%d packets in the clear", n)
	}
	i := 0
	for _, s := range w.sides {
		for _, n := range s.Nodes {
			state, err := stateOf(t.Context(), n)
			must(t, err)
			if now := foreign(state); now != foreignBefore[i] {
				t.Errorf("%s: not Isthmus's, and changed:\n%s", n, difference(foreignBefore[i], now))
			}
			i++
		}
	}
}

// datagrams sends a datagram from one pod to another every 10 ms, and counts the answers.
type datagrams struct {
	name         string
	conn, far    net.PacketConn
	stop         context.CancelFunc
	group        sync.WaitGroup
	mu           sync.Mutex
	sent         []time.Time
	answered     map[int]bool
	pause        time.Duration
	lastAnswered time.Time
}

func newDatagrams(t *testing.T, from, to *lab.Pod, at netip.Addr) *datagrams {
	t.Helper()
	far, err := to.ListenPacket("udp4", ":0")
	must(t, err)
	conn, err := from.ListenPacket("udp4", ":0")
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	s := &datagrams{name: fmt.Sprintf("%s -> %s", from, to), conn: conn, far: far, stop: stop, answered: map[int]bool{}}
	t.Cleanup(func() { stop(); conn.Close(); far.Close(); s.group.Wait() })
	dst := net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, uint16(far.LocalAddr().(*net.UDPAddr).Port)))
	s.group.Go(func() {
		buf := make([]byte, 2000)
		for {
			n, from, err := far.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = far.WriteTo(buf[:n], from)
		}
	})
	s.group.Go(func() {
		buf := make([]byte, 2000)
		for {
			_, _, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			s.mu.Lock()
			if now := time.Now(); s.lastAnswered.IsZero() {
				s.lastAnswered = now
			} else {
				s.pause = max(s.pause, now.Sub(s.lastAnswered))
				s.lastAnswered = now
			}
			s.answered[int(be.BigEndian.Uint32(buf))] = true
			s.mu.Unlock()
		}
	})
	s.group.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for i := uint32(0); ; i++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			packet := make([]byte, 200)
			be.BigEndian.PutUint32(packet, i)
			s.mu.Lock()
			s.sent = append(s.sent, time.Now())
			s.mu.Unlock()
			_, _ = conn.WriteTo(packet, dst) // a refused datagram counts as lost
		}
	})
	return s
}

// end stops the datagrams and reports the losses: in total, and between each event and the next
// one.
func (s *datagrams) end(events []time.Time) string {
	s.stop()
	time.Sleep(500 * time.Millisecond) // for answers that are still on the way
	s.mu.Lock()
	defer s.mu.Unlock()
	lost, after := 0, make([]int, len(events))
	for i, at := range s.sent {
		if s.answered[i] {
			continue
		}
		lost++
		if e, _ := slices.BinarySearchFunc(events, at, time.Time.Compare); e > 0 {
			after[e-1]++
		}
	}
	slices.Sort(after)
	return fmt.Sprintf("%s: %d of %d packets lost in %d events: %.1f an event, median %d, at most %d; longest pause %.2f s",
		s.name, lost, len(s.sent), len(events), float64(lost)/float64(len(events)), after[len(after)/2], after[len(after)-1], s.pause.Seconds())
}

// damage deletes or changes one object of Isthmus on a node.
func (w *world) damage(t *testing.T, rng *rand.Rand, n *lab.Node) {
	t.Helper()
	const objects = `
ip rule | grep 'proto 7[12]' | sed 's/^\([0-9]*\):.*/ip rule del priority \1/'
ip route show table all | grep 'proto 7[12]' | sed 's/ onlink//; s/^/ip route del /'
bridge fdb show dev isthmus.vxlan | grep permanent | sed 's/ self permanent//; s/^/bridge fdb del /; s/$/ dev isthmus.vxlan/'
ip neigh show dev isthmus.vxlan | sed 's/ lladdr.*//; s/^/ip neigh del /; s/$/ dev isthmus.vxlan/'
nft list tables | grep isthmus | grep -v route_agent | grep -v gateway | sed 's/^/nft delete /'
iptables-legacy-save | grep isthmus-route-agent | sed 's/^-A/iptables-legacy -w -D/'
iptables-nft-save | grep isthmus-route-agent | sed 's/^-A/iptables-nft -D/'
echo ip link del isthmus.vxlan
echo ip link set isthmus.vxlan down
echo ip link set isthmus.vxlan mtu 1000
echo ip link set isthmus.vxlan address 02:00:00:00:00:07
echo 'echo 1 > /proc/sys/net/ipv4/conf/isthmus.vxlan/rp_filter'
echo 'echo 0 > /proc/sys/net/ipv4/conf/isthmus.vxlan/forwarding'`
	out, err := n.Command(t.Context(), "sh", "-c", objects).Output()
	must(t, err)
	all := strings.Split(strings.TrimSpace(string(out)), "\n")
	// The command fails if the object is already gone, or is being made again.
	_, _ = n.Command(t.Context(), "sh", "-c", all[rng.IntN(len(all))]).CombinedOutput()
}

// change removes the last node of a cluster, adds it again, or changes its address.
func (w *world) change(t *testing.T, c *fleet.Cluster, what int) {
	t.Helper()
	n := c.Nodes[len(c.Nodes)-1]
	agent := fleet.Agent(len(c.Nodes) - 1)
	ctx := t.Context()
	var node corev1.Node
	switch what {
	case 0:
		must(t, c.Kill(agent))
		must(t, c.Client.Delete(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}))
	case 1:
		node = corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}
		if n.PodCIDR.IsValid() {
			node.Spec = corev1.NodeSpec{PodCIDR: n.PodCIDR.String(), PodCIDRs: []string{n.PodCIDR.String()}}
		}
		must(t, c.Client.Create(ctx, &node))
		w.address(t, c, n.Name, n.Addr)
		must(t, c.Launch(agent))
	case 2: // change the address, and then change it back
		other := plus(n.Addr, 100)
		must(t, batch(ctx, n.Host, "ip", []string{fmt.Sprintf("addr add %v/24 dev eth0", other)}))
		w.address(t, c, n.Name, other)
		time.Sleep(2 * time.Second)
		w.address(t, c, n.Name, n.Addr)
		must(t, batch(ctx, n.Host, "ip", []string{fmt.Sprintf("addr del %v/24 dev eth0", other)}))
	}
}

// address sets the InternalIP of a Node.
func (w *world) address(t *testing.T, c *fleet.Cluster, name string, addr netip.Addr) {
	t.Helper()
	eventually(t, "the address of "+name, func() error {
		var node corev1.Node
		if err := c.Client.Get(t.Context(), client.ObjectKey{Name: name}, &node); err != nil {
			return err
		}
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: addr.String()}}
		return c.Client.Status().Update(t.Context(), &node)
	})
}
