package nodes

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/internal/kubenodes"
	"github.com/isthmus-net/isthmus/internal/kubenodes/probe"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// The gateway of a hostile peer sends incomplete datagrams to a pod for longer than the 30 s for
// which a node's kernel keeps their fragments. The same kernel reassembles fragmented datagrams of
// another peer and of local pods. These must arrive as without the attack.
//
//	c's gateway ─ incomplete datagrams ─┐
//	pod of b ──── 4,000 octets ─────────┴─ a's gateway (a Pod) ═ VXLAN ═ node of a: nf_defrag ─ pod
//	pod of a on another node ── 4,000 octets ──────────────────────────┘
func TestIncompleteDatagramsOfOnePeerDoNotBlockReassembly(t *testing.T) {
	if fixture.skip != "" {
		t.Skip(fixture.skip)
	}
	if !*all {
		t.Skip("clusters of their own take minutes: -all (make test-nodes) runs it")
	}
	w := newFragmentWorld(t)
	quiet := w.measure(t, "nothing", 20*time.Second, nil)
	for _, attack := range []struct {
		name  string
		rate  int // datagrams a second
		parts [][]int
	}{
		{"only first fragments", 120, [][]int{{0}}},
		{"only last fragments", 120, [][]int{{2}}},
		{"no middle fragments", 120, [][]int{{0, 2}}},
		{"all three", 5000, [][]int{{0}, {2}, {0, 2}}},
	} {
		t.Run(attack.name, func(t *testing.T) {
			r := w.measure(t, attack.name, 40*time.Second, func(ctx context.Context) (int, error) { return w.flood(ctx, attack.rate, attack.parts) })
			for i, f := range r.flows {
				if lost := f.lost(); lost > quiet.flows[i].lost()+0.05 {
					t.Errorf("%s: %.1f %% of fragmented datagrams were lost, %.1f %% before", flowNames[i], 100*lost, 100*quiet.flows[i].lost())
				}
			}
			if r.failed > r.flooded/100 {
				t.Errorf("the node gave up %d fragments or datagrams, of %d that were flooded", r.failed, r.flooded)
			}
			if r.counted < r.flooded*9/10 {
				t.Errorf("the gateway counted %d drops, of %d datagrams that were flooded", r.counted, r.flooded)
			}
		})
	}
	t.Log("\n" + w.page.String())
}

// flowNames are the names of the honest flows in a fragmentWorld.
var flowNames = [2]string{"another peer", "local pods"}

// fragmentWorld is three clusters. Cluster a is a peer of b and of the hostile c.
type fragmentWorld struct {
	set     *kubenodes.Set
	a, b, c *kubenodes.Cluster
	gateway *corev1.Pod     // gateway of c
	node    *kubenodes.Node // node of cluster a with the flooded pod
	flooded netip.AddrPort  // address of the flooded pod, as c sees it
	sources netip.Prefix    // PodCIDR of c
	flows   [2]fragmentFlow // the flows of flowNames
	id      uint32          // number of the next incomplete datagram
	page    strings.Builder
}

// fragmentFlow is the source and the destination of a Flow to the flooded pod's node.
type fragmentFlow struct {
	at   *kubenodes.Node
	from netip.Addr
	to   netip.AddrPort
}

func newFragmentWorld(t *testing.T) *fragmentWorld {
	t.Helper()
	spec := lab.Spec{Name: lab.UniqueName("nodes"), RPFilter: lab.RPFilterStrict, Clusters: []lab.ClusterSpec{
		{Name: "a", PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), Nodes: 2},
		{Name: "b", PodCIDR: netip.MustParsePrefix("10.245.0.0/16"), Nodes: 1},
		{Name: "c", PodCIDR: netip.MustParsePrefix("10.246.0.0/16"), Nodes: 1},
	}}
	ctx := t.Context()
	set, err := kubenodes.Up(ctx, kubenodes.Options{Spec: spec, Kube: fixture.kube, Images: []string{fixture.image}})
	must(t, err)
	t.Cleanup(func() { must(t, set.Down()) })
	w := &fragmentWorld{set: set, a: set.Clusters[0], b: set.Clusters[1], c: set.Clusters[2], sources: spec.Clusters[2].PodCIDR}
	must(t, set.Install(ctx, fixture.program, "--set", "gateway.replicas=1"))
	must(t, errors.Join(set.Peer(ctx, fixture.program, w.a, w.b), set.Peer(ctx, fixture.program, w.a, w.c)))
	must(t, errors.Join(startPods(ctx, w.a), startPods(ctx, w.b)))
	w.gateway, err = w.c.ActiveGateway(ctx)
	must(t, err)
	node, other := byGateway(t, w.a)[1].Node, byGateway(t, w.a)[0].Node
	target, err := address(ctx, w.a, podName(pod, node))
	must(t, err)
	local, err := address(ctx, w.a, podName(pod, other))
	must(t, err)
	far, err := address(ctx, w.b, podName(pod, w.b.Nodes[0]))
	must(t, err)
	seenByC, err := w.c.Seen(ctx, w.a, target)
	must(t, err)
	seenByB, err := w.b.Seen(ctx, w.a, target)
	must(t, err)
	w.node, w.flooded = node, netip.AddrPortFrom(seenByC, port)
	w.flows = [2]fragmentFlow{{w.b.Nodes[0], far, netip.AddrPortFrom(seenByB, port)}, {other, local, netip.AddrPortFrom(target, port)}}
	load := loadNow(t)
	fmt.Fprintf(&w.page, "load %s\n\n| flood | datagrams | lost: another peer | local pods | ReasmFails | octets held | counted |\n|---|---|---|---|---|---|---|\n", load)
	return w
}

// fragmentReport is the result of one measurement.
type fragmentReport struct {
	flows   [2]flowLoss
	flooded int // incomplete datagrams sent
	failed  int // increase of ReasmFails on the node
	counted int // increase of inbound drops in the gateway of cluster a
}

// flowLoss is the numbers of sent and answered datagrams of a flow.
type flowLoss struct{ sent, answered int }

func (f flowLoss) lost() float64 { return 1 - float64(f.answered)/float64(max(1, f.sent)) }

// measure runs the honest flows for d. If flood is not nil, it runs at the same time.
func (w *fragmentWorld) measure(t *testing.T, name string, d time.Duration, flood func(context.Context) (int, error)) (r fragmentReport) {
	t.Helper()
	failed, counted := w.reassemblyFailures(t), w.fragmentDrops(t)
	for _, f := range w.flows {
		query := url.Values{"to": {f.to.String()}, "size": {"4000"}}
		must(t, ask(t.Context(), f.at, f.from, http.MethodPost, "/flow", query, nil))
	}
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	if flood != nil {
		var err error
		r.flooded, err = flood(ctx)
		must(t, err)
	}
	<-ctx.Done()
	held := w.held(t)
	for i, f := range w.flows {
		var report probe.FlowReport
		must(t, ask(t.Context(), f.at, f.from, http.MethodGet, "/flow", nil, &report))
		r.flows[i] = flowLoss{report.Sent, report.Answered}
	}
	time.Sleep(6 * time.Second) // the gateway holds an incomplete datagram for five seconds
	r.failed, r.counted = w.reassemblyFailures(t)-failed, w.fragmentDrops(t)-counted
	line := fmt.Sprintf("| %s | %d | %d of %d | %d of %d | %d | %d | %d |\n", name, r.flooded, r.flows[0].sent-r.flows[0].answered, r.flows[0].sent,
		r.flows[1].sent-r.flows[1].answered, r.flows[1].sent, r.failed, held, r.counted)
	t.Log(line)
	w.page.WriteString(line)
	return r
}

// flood sends incomplete datagrams of three fragments each, as a hostile gateway of c could.
// parts are the fragments to send of each datagram. flood writes the fragments to c's TUN device,
// because the kernel of c's node would not forward incomplete datagrams.
func (w *fragmentWorld) flood(ctx context.Context, rate int, parts [][]int) (sent int, err error) {
	return sent, w.inGateway(w.c, w.gateway, func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		device, err := net.InterfaceByName("isthmus0")
		if err != nil {
			return err
		}
		to := &unix.SockaddrLinklayer{Protocol: uint16(unix.ETH_P_IP>>8 | unix.ETH_P_IP<<8&0xffff), Ifindex: device.Index}
		for begin := time.Now(); ctx.Err() == nil; time.Sleep(time.Millisecond) {
			for ; sent < int(time.Since(begin).Seconds()*float64(rate)); sent++ {
				for _, part := range parts[sent%len(parts)] {
					err := unix.Sendto(fd, w.fragment(part), 0, to)
					if err != nil && !errors.Is(err, unix.ENOBUFS) {
						return fmt.Errorf("fragment %d: %w", part, err)
					}
				}
				w.id++
			}
		}
		return nil
	})
}

// fragment returns one of the three fragments of a datagram to the flooded pod. Any two datagrams
// differ in the identification, or in the source, which is a pod of c.
func (w *fragmentWorld) fragment(part int) []byte {
	const size, more = 1200, 0x2000
	be, b := binary.BigEndian, make([]byte, 20+size)
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_UDP
	be.PutUint16(b[2:], uint16(len(b)))
	be.PutUint16(b[4:], uint16(w.id))
	be.PutUint16(b[6:], uint16(part*size/8))
	if part < 2 {
		b[6] |= more >> 8
	}
	src := w.sources.Addr().As4()
	src[3] = byte(2 + w.id%200)
	copy(b[12:], src[:])
	copy(b[16:], w.flooded.Addr().AsSlice())
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(be.Uint16(b[i:]))
	}
	sum = sum>>16 + sum&0xffff
	be.PutUint16(b[10:], ^uint16(sum+sum>>16))
	if part == 0 {
		be.PutUint16(b[20:], 9)
		be.PutUint16(b[22:], w.flooded.Port())
		be.PutUint16(b[24:], 3*size)
	}
	return b
}

// inGateway runs f in the network namespace of a gateway's Pod; see lab.Host.Do.
func (w *fragmentWorld) inGateway(c *kubenodes.Cluster, p *corev1.Pod, f func() error) error {
	pids, err := processes(p, "gateway")
	if err != nil {
		return err
	}
	return c.Nodes[0].Do(func() error {
		fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/net", pids[0]), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// fragmentDrops returns the number of inbound packets that a's gateway has dropped. These packets
// are fragments of incomplete datagrams and, on a busy machine, also tunnel messages of the flood.
func (w *fragmentWorld) fragmentDrops(t *testing.T) (n int) {
	t.Helper()
	p, err := w.a.ActiveGateway(t.Context())
	must(t, err)
	var page []byte
	must(t, w.inGateway(w.a, p, func() error {
		c, err := net.Dial("tcp4", "127.0.0.1:5873")
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := io.WriteString(c, "GET /metrics HTTP/1.0\r\n\r\n"); err != nil {
			return err
		}
		page, err = io.ReadAll(c)
		return err
	}))
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, "isthmus_drops_total{") && strings.Contains(line, `direction="inbound"`) && !strings.Contains(line, `reason="local_`) {
			fields := strings.Fields(line)
			value, err := strconv.ParseFloat(fields[len(fields)-1], 64)
			must(t, err)
			n += int(value)
		}
	}
	return n
}

// onNode reads a file in the network namespace of the flooded pod's node.
func (w *fragmentWorld) onNode(t *testing.T, name string) (text string) {
	t.Helper()
	must(t, w.node.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/" + name)
		text = string(b)
		return err
	}))
	return text
}

// reassemblyFailures returns the counter ReasmFails of the flooded pod's node.
func (w *fragmentWorld) reassemblyFailures(t *testing.T) int {
	t.Helper()
	var names []string
	for line := range strings.Lines(w.onNode(t, "snmp")) {
		fields := strings.Fields(line)
		if fields[0] != "Ip:" {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		for i, name := range names {
			if name == "ReasmFails" {
				n, err := strconv.Atoi(fields[i])
				must(t, err)
				return n
			}
		}
	}
	t.Fatal("no ReasmFails")
	return 0
}

// held returns the octets of incomplete datagrams that the kernel of the flooded pod's node
// holds.
func (w *fragmentWorld) held(t *testing.T) (octets int) {
	t.Helper()
	_, line, _ := strings.Cut(w.onNode(t, "sockstat"), "FRAG: ")
	var inuse int
	if _, err := fmt.Sscanf(line, "inuse %d memory %d", &inuse, &octets); err != nil {
		t.Fatal(err)
	}
	return octets
}
