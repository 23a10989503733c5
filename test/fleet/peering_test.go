package fleet

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	api "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// There are three clusters. The networks of a and b overlap with different prefix lengths, and the
// gateways of a and b are ordinary Pods. The underlay has the MTU of a cloud network.
func TestThreeClustersPeerAndUnpeer(t *testing.T) {
	f := up(t, lab.Spec{MTU: 1450, Clusters: []lab.ClusterSpec{
		inPods(clusterSpec("10.244.0.0/16", 3)), inPods(clusterSpec("10.244.128.0/18", 2)), clusterSpec("172.20.0.0/22", 2),
	}})
	a, b, c := f.Clusters[0], f.Clusters[1], f.Clusters[2]
	had := map[*fleet.Cluster][]string{}
	for _, x := range f.Clusters {
		had[x] = firstInventory(t, x)
	}

	t.Run("FirstPingBetweenNodesWithoutGatewayWithinSeconds", func(t *testing.T) { firstPingAfterPeer(t, f, a, b) })
	if t.Failed() {
		return
	}
	peer(t, f, a, c)
	peer(t, f, b, c)
	t.Run("PodsReachPodsOnAllNodes", func(t *testing.T) {
		for _, at := range f.Clusters {
			for _, of := range f.Clusters {
				if at != of {
					podsToPods(t, at, of)
				}
			}
		}
	})
	t.Run("NodesReachPods", func(t *testing.T) { nodesToPods(t, a, b); nodesToPods(t, c, a) })
	t.Run("MappedEndpointIsReached", func(t *testing.T) { mappedEndpoint(t, a, b) })
	t.Run("GatewayPodAcceptsOverlayOnlyFromNodesAndNothingFromPeers", func(t *testing.T) { gatewaysPodIsClosed(t, a, b) })
	t.Run("LargePacketsAndStreamsArriveComplete", func(t *testing.T) { largePackets(t, a, b); largePackets(t, c, b) })
	t.Run("NoObjectIsWrittenWhenIdle", func(t *testing.T) { checkAtRest(t, f) })
	t.Run("NothingIsLeftAfterUnpeer", func(t *testing.T) {
		during := startTraffic(t, a, c)
		isthmus(t, f, "unpeer", "--context", "a", "--remote-context", "b")
		podsToPods(t, a, c)
		podsToPods(t, c, b)
		during.endWithoutLoss(t) // the other peers are not affected
		var others sync.WaitGroup
		for _, x := range []*fleet.Cluster{a, b} {
			others.Go(func() {
				if out, err := f.Isthmus(t.Context(), "unpeer", "--context", x.Name, "--remote-context", "c"); err != nil {
					t.Errorf("isthmus unpeer %s c: %v\n%s", x, err, out)
				}
			})
		}
		others.Wait()
		for _, x := range f.Clusters {
			endHolds(t, x)
			waitInventory(t, x, had[x])
		}
	})
	t.Run("PeeringAgainWorks", func(t *testing.T) {
		firstPingAfterPeer(t, f, b, a)
		podsToPods(t, a, b)
	})
}

// firstPingAfterPeer runs `isthmus peer` and measures the time until a pod gets a reply from a
// pod of the other cluster. Both are on nodes without the active gateway.
func firstPingAfterPeer(t *testing.T, f *fleet.Fleet, a, b *fleet.Cluster) {
	from, to := remotePod(t, a), remotePod(t, b)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	begin := time.Now()
	failed := make(chan error, 1)
	var out string
	var command time.Duration
	go func() {
		var err error
		out, err = f.Isthmus(ctx, "peer", "--context", a.Name, "--remote-context", b.Name)
		command = time.Since(begin)
		failed <- err
	}()
	took, err := firstPing(ctx, from.Host, func() (netip.Addr, error) { return a.Seen(ctx, b, to.Addr) })
	if err := <-failed; err != nil {
		t.Fatalf("isthmus peer: %v\n%s", err, out)
	}
	must(t, err)
	t.Logf("%s -> %s: first ping answered %.2f s after `isthmus peer` was started, which took %.2f s", from, to, took.Seconds(), command.Seconds())
	if *long && took > 15*time.Second {
		t.Errorf("the first ping was answered after %v; want 5 s on a machine of its own, 15 s anywhere", took)
	}
	waitReady(t, a, b)
}

// podsToPods connects pods on every node of a cluster to pods on every node of another cluster.
// Each answer must come from the right pod and contain the right source address.
func podsToPods(t *testing.T, at, of *fleet.Cluster) {
	t.Helper()
	for i := range at.Nodes {
		for j := range of.Nodes {
			from, to := podOn(t, at, i), podOn(t, of, j)
			visit(t, from.Host, to.Host, seen(t, at, of, to.Addr), seen(t, of, at, from.Addr))
		}
	}
}

// visit pings a host and fetches a page from it. The page contains the caller's address as the
// host sees it.
func visit(t *testing.T, from, to *lab.Host, addr, caller netip.Addr) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	// The first attempts may fail, because each node adds its routes independently.
	if _, err := firstPing(ctx, from, func() (netip.Addr, error) { return addr, nil }); err != nil {
		t.Errorf("%s -> %s: %v", from, to, err)
		return
	}
	got, err := from.Get(ctx, fmt.Sprintf("http://%v/", addr))
	if want := fmt.Sprintf("%s sees %v\n", to, caller); err != nil || got != want {
		t.Errorf("%s -> %s: %q, %v; want %q", from, to, got, err, want)
	}
}

func nodesToPods(t *testing.T, at, of *fleet.Cluster) {
	t.Helper()
	network := seen(t, of, at, at.PodCIDR.Addr()) // all nodes use the same NAPT address
	for _, n := range at.Nodes {
		for j := range of.Nodes {
			to := podOn(t, of, j)
			visit(t, n.Host, to.Host, seen(t, at, of, to.Addr), network)
		}
	}
}

func mappedEndpoint(t *testing.T, at, of *fleet.Cluster) {
	server := of.OnPrem
	var addr netip.Addr
	eventually(t, "an address of "+server.Name, func() (err error) {
		addr, err = of.MapEndpoint(t.Context(), server.Addr, at)
		return err
	})
	for i := range at.Nodes {
		from := podOn(t, at, i)
		eventually(t, fmt.Sprintf("%s -> %s at %v", from, server, addr), func() error {
			_, err := from.PingWith(t.Context(), addr, lab.PingOptions{Wait: time.Second})
			return err
		})
		visit(t, from.Host, server.Host, addr, seen(t, of, at, from.Addr))
	}
}

// largePackets sends pings that must be fragmented, and a stream at full speed, between pods on
// nodes without the active gateway.
func largePackets(t *testing.T, at, of *fleet.Cluster) {
	from, to := remotePod(t, at), remotePod(t, of)
	addr := seen(t, at, of, to.Addr)
	for _, size := range []int{1000, 1300, 1350, 1372, 1400, 1422, 1472, 3000, 8000, 30000} {
		if _, err := from.PingWith(t.Context(), addr, lab.PingOptions{Size: size, Wait: 20 * time.Second}); err != nil {
			// The first packet may be lost, because path MTU discovery may need it. The second
			// packet must arrive.
			if _, err := from.PingWith(t.Context(), addr, lab.PingOptions{Size: size, Wait: 20 * time.Second}); err != nil {
				t.Errorf("%d octets: %v", size, err)
			}
		}
	}
	const octets = 64 << 20
	listener, err := to.Listen("tcp4", to.Addr.String()+":0")
	must(t, err)
	defer listener.Close()
	var received [sha256.Size]byte
	done := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			done <- err
			return
		}
		defer conn.Close()
		sum := sha256.New()
		_, err = io.Copy(sum, conn)
		received = [sha256.Size]byte(sum.Sum(nil))
		done <- err
	}()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, port, _ := strings.Cut(listener.Addr().String(), ":")
	conn, err := from.Dial(ctx, "tcp4", addr.String()+":"+port)
	must(t, err)
	defer conn.Close()
	must(t, conn.SetDeadline(time.Now().Add(patience)))
	data := make([]byte, octets)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(data)
	begin := time.Now()
	_, err = io.Copy(conn, bytes.NewReader(data))
	must(t, err)
	conn.Close()
	must(t, <-done)
	t.Logf("%s -> %s: %.2f Gbit/s", from, to, octets*8/time.Since(begin).Seconds()/1e9)
	if received != sha256.Sum256(data) {
		t.Errorf("%s -> %s: other octets arrived", from, to)
	}
}

// checkAtRest checks for twenty seconds that nothing is written to the API servers. The only
// exception is the latency, which a gateway refreshes at most every 30 s for each peer. That causes
// one write to a TunnelEndpoint and one to the Peering, or more if the check takes longer.
func checkAtRest(t *testing.T, f *fleet.Fleet) {
	const quiet = 20 * time.Second
	waitSettled(t, f)
	before, began := map[*fleet.Cluster]glance{}, time.Now()
	for _, c := range f.Clusters {
		before[c] = readGlance(t, c)
	}
	time.Sleep(quiet)
	for _, c := range f.Clusters {
		was, is, refreshed := before[c], readGlance(t, c), map[string]int{}
		for name, version := range is.versions {
			kind, _, _ := strings.Cut(name, " ")
			switch {
			case was.versions[name] == version:
			case was.latencies[name] != is.latencies[name] && was.others[name] == is.others[name]:
				refreshed[kind]++
			default:
				t.Errorf("cluster %s: %s was written:\n%s\n%s", c, name, was.others[name], is.others[name])
			}
		}
		for labels, n := range is.writes {
			allowed := 0
			switch {
			case strings.Contains(labels, `resource="tunnelendpoints"`):
				allowed = refreshed["TunnelEndpoint"]
			case strings.Contains(labels, `resource="peerings"`):
				allowed = refreshed["Peering"]
			}
			allowed *= 1 + int(time.Since(began)/(30*time.Second))
			if more := n - was.writes[labels]; more > float64(allowed) {
				t.Errorf("cluster %s: %v requests to write: %s", c, more, labels)
			}
		}
		t.Logf("cluster %s: of %d objects only latencies were written in %v: %v", c, len(is.versions), quiet, refreshed)
	}
}

// A glance holds the state of a cluster's objects at one time.
type glance struct {
	versions  map[string]string // resource versions
	writes    map[string]float64
	latencies map[string]string // latencies in the status of TunnelEndpoints and Peerings
	others    map[string]string // the rest of their status
}

// readGlance returns a consistent glance: it repeats the reads until no object changed during them.
func readGlance(t *testing.T, c *fleet.Cluster) glance {
	t.Helper()
	for {
		g := lookOnce(t, c)
		now, err := objects(t.Context(), c)
		must(t, err)
		if maps.Equal(g.versions, now) {
			return g
		}
	}
}

func lookOnce(t *testing.T, c *fleet.Cluster) (g glance) {
	t.Helper()
	var err error
	g.versions, err = objects(t.Context(), c)
	must(t, err)
	g.writes, err = writes(t.Context(), c)
	must(t, err)
	g.latencies, g.others = map[string]string{}, map[string]string{}
	var endpoints v1alpha1.TunnelEndpointList
	must(t, c.Client.List(t.Context(), &endpoints))
	for _, te := range endpoints.Items {
		name := "TunnelEndpoint " + te.Namespace + "/" + te.Name
		g.latencies[name] = fmt.Sprint(te.Status.Connection.Latency)
		te.Status.Connection.Latency = v1alpha1.ConnectionLatency{}
		g.others[name] = fmt.Sprintf("%+v", te.Status)
	}
	var peerings api.PeeringList
	must(t, c.Client.List(t.Context(), &peerings))
	for _, p := range peerings.Items {
		name := "Peering /" + p.Name
		g.latencies[name] = p.Status.Latency
		p.Status.Latency = ""
		g.others[name] = fmt.Sprintf("%+v", p.Status)
	}
	return g
}

// waitSettled waits until no object has changed for two seconds.
func waitSettled(t *testing.T, f *fleet.Fleet) {
	t.Helper()
	for _, c := range f.Clusters {
		var last map[string]string
		eventually(t, fmt.Sprintf("rest of cluster %s", c), func() error {
			now, err := objects(t.Context(), c)
			if err != nil {
				return err
			}
			var busy []string
			for name, version := range now {
				if last[name] != version {
					busy = append(busy, name)
				}
			}
			if last = maps.Clone(now); len(busy) == 0 {
				return nil
			}
			slices.Sort(busy)
			time.Sleep(2 * time.Second)
			return fmt.Errorf("written within two seconds: %v", busy)
		})
	}
}
