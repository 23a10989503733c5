// Command blackhole measures how long a TCP stream between two pods stalls when the path between
// the gateways starts to drop large datagrams silently. It changes the underlay's MTU from 1500 to
// 1280, with ICMP filtered, and back. For comparison it also measures wireguard-go with the same
// MTU and without NAT.
//
//	go run ./benchmarks/blackhole -isthmus bin/isthmus -rounds 3
//
// The command needs root, and prints a line for each round.
package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/crypto/curve25519"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/isthmus-net/isthmus/benchmarks/internal/load"
	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/source/file"
)

const (
	wide, narrow = 1500, 1280
	tunnelMTU    = wide - 60
	wgPort       = 51820

	tick = 50 * time.Millisecond
	// stuckAfter is the longest stall after which a stream still counts as recovered.
	stuckAfter = 20 * time.Second
	// observation is the time for which the stream is observed after the path has recovered.
	observation = 45 * time.Second
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == "wireguard-go" {
		if err := wireguardGo(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	binary := flag.String("isthmus", "bin/isthmus", "path of isthmus")
	rounds := flag.Int("rounds", 3, "rounds; each measures Isthmus and wireguard-go once")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	for range *rounds {
		for _, name := range []string{"wireguard-go", "isthmus"} {
			r, err := measure(ctx, name, *binary)
			if err != nil {
				fmt.Fprintln(os.Stderr, name+":", err)
				os.Exit(1)
			}
			fmt.Printf("%-13s %s\n", name, r)
		}
	}
}

// A result holds the measurements of one round.
type result struct {
	before, during, after float64       // Mbit/s
	still                 time.Duration // stall of the stream after the path MTU fell
	stuck                 bool          // the stream did not recover within stuckAfter
	healed                time.Duration // from the recovery of the path until the stream runs again; 0: it was running already
	mtu                   time.Duration // from the recovery of the path until the gateway uses the larger MTU towards the peer again
	gap                   time.Duration // longest pause of the stream after the path recovered
}

func (r result) String() string {
	still := seconds(r.still)
	if r.stuck {
		still = "more than " + still
	}
	return fmt.Sprintf("%4.0f Mbit/s; 1280: still for %s, then %4.0f Mbit/s; 1500 again: flows after %s, longest pause %s, MTU back after %s, then %4.0f Mbit/s",
		r.before, still, r.during, seconds(r.healed), seconds(r.gap), seconds(r.mtu), r.after)
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

// measure builds a lab with Isthmus or wireguard-go and shrinks the path MTU between its
// clusters.
func measure(ctx context.Context, name, binary string) (r result, err error) {
	cluster := func(name string, n int) lab.ClusterSpec {
		return lab.ClusterSpec{Name: name, PodCIDR: netip.MustParsePrefix(fmt.Sprintf("10.%d.0.0/16", 200+n)), Nodes: 1, PodsPerNode: 1}
	}
	l, err := lab.Up(ctx, lab.Spec{Name: "hole" + strconv.Itoa(os.Getpid()), MTU: wide, Clusters: []lab.ClusterSpec{cluster("a", 1), cluster("b", 2)}})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, l.Down()) }()
	a, b := l.Clusters[0], l.Clusters[1]
	for _, c := range l.Clusters { // segment superpackets here, because a veth pair would pass them regardless of the MTU
		if err := c.Nodes[0].Do(func() error {
			return withLink("eth0", func(l netlink.Link) error { return netlink.LinkSetGSOMaxSegs(l, 1) })
		}); err != nil {
			return r, err
		}
	}
	target, mtu := b.Pods[0].Addr, func() int { return 0 }
	if name == "isthmus" {
		if err := l.JoinAll(); err != nil {
			return r, err
		}
		if err := l.StartGateways(ctx, binary); err != nil {
			return r, err
		}
		if target, err = l.Seen(a, b, target); err != nil {
			return r, err
		}
		mtu = func() int { return mtuTowards(ctx, a) }
	} else {
		stop, err := startWireGuardGo(ctx, a, b)
		if err != nil {
			return r, err
		}
		defer stop()
	}
	path := func(mtu int) error {
		return l.Underlay.Do(func() error {
			if err := withLink(b.Nodes[0].Name, func(l netlink.Link) error { return netlink.LinkSetMTU(l, mtu) }); err != nil {
				return err
			}
			// A bridge takes the smallest MTU of its ports unless its own is set. With a smaller
			// MTU, the router would send ICMP errors.
			return withLink("br-b", func(l netlink.Link) error { return netlink.LinkSetMTU(l, wide) })
		})
	}

	received, end, err := stream(ctx, a.Pods[0].Host, b.Pods[0].Host, target)
	if err != nil {
		return r, err
	}
	defer end()
	time.Sleep(5 * time.Second)
	r.before = rate(received, 3*time.Second)

	if err := path(narrow); err != nil {
		return r, err
	}
	flows := r.before * 1e6 / 8 * tick.Seconds() / 20 // a stream runs if each tick has these octets: a twentieth of the earlier rate
	begin := time.Now()
	r.still, r.stuck = flowing(received, begin.Add(tick), flows, stuckAfter)
	time.Sleep(2 * time.Second)
	r.during = rate(received, 3*time.Second)

	if err := path(wide); err != nil {
		return r, err
	}
	begin = time.Now()
	if r.stuck {
		r.healed, _ = flowing(received, begin, flows, observation)
	}
	quiet, was := time.Now(), received()
	for time.Since(begin) < observation {
		time.Sleep(tick)
		if now := received(); now != was {
			was, quiet = now, time.Now()
		}
		r.gap = max(r.gap, time.Since(quiet))
		if r.mtu == 0 && name == "isthmus" && mtu() == tunnelMTU {
			r.mtu = time.Since(begin)
			break
		}
		if name != "isthmus" && time.Since(begin) > r.healed+3*time.Second {
			break
		}
	}
	time.Sleep(2 * time.Second)
	r.after = rate(received, 3*time.Second)
	return r, nil
}

// stream sends from one pod to the other at full speed. received returns the octets that have
// arrived so far.
func stream(ctx context.Context, from, to *lab.Host, target netip.Addr) (received func() uint64, end func(), err error) {
	listener, err := to.Listen("tcp", ":7000")
	if err != nil {
		return nil, nil, err
	}
	var octets atomic.Uint64
	go func() {
		c, err := listener.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		b := make([]byte, 256<<10)
		for {
			n, err := c.Read(b)
			octets.Add(uint64(n))
			if err != nil {
				return
			}
		}
	}()
	var c net.Conn
	for try := 0; ; try++ {
		dial, cancel := context.WithTimeout(ctx, time.Second)
		c, err = from.Dial(dial, "tcp", netip.AddrPortFrom(target, 7000).String())
		cancel()
		if err == nil {
			break
		}
		if try == 20 || ctx.Err() != nil {
			return nil, nil, errors.Join(err, listener.Close())
		}
	}
	go func() { _, _ = io.Copy(c, zeros{}) }()
	return octets.Load, func() { c.Close(); listener.Close() }, nil
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// rate measures the receive rate over d, in Mbit/s.
func rate(received func() uint64, d time.Duration) float64 {
	begin, was := time.Now(), received()
	time.Sleep(d)
	return float64(received()-was) * 8 / 1e6 / time.Since(begin).Seconds()
}

// flowing waits until at least the given number of octets arrives in each of four ticks in a row.
// It returns the time from begin to the first of these ticks.
func flowing(received func() uint64, begin time.Time, octets float64, timeout time.Duration) (after time.Duration, stuck bool) {
	was, row := received(), 0
	for {
		time.Sleep(tick)
		now := received()
		if row++; float64(now-was) < octets {
			row = 0
		}
		was = now
		if row == 4 {
			return max(0, time.Since(begin)-4*tick), false
		}
		if time.Since(begin) > timeout {
			return timeout, true
		}
	}
}

// mtuTowards returns the MTU towards the only peer, as the gateway of a cluster reports it.
func mtuTowards(ctx context.Context, c *lab.Cluster) int {
	text, err := c.Nodes[0].Get(ctx, "http://"+file.DefaultStatusAddress+"/status")
	var s gateway.Status
	if err != nil || json.Unmarshal([]byte(text), &s) != nil || len(s.Peers) != 1 {
		return 0
	}
	return s.Peers[0].MTU
}

func withLink(name string, f func(netlink.Link) error) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return f(link)
}

// startWireGuardGo joins the two clusters without NAT. Their PodCIDRs must differ.
func startWireGuardGo(ctx context.Context, a, b *lab.Cluster) (stop func(), err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var procs []*os.Process
	stop = func() {
		for _, p := range procs {
			_ = p.Kill()
			_, _ = p.Wait()
		}
	}
	var keys [2][32]byte
	for i := range keys {
		_, _ = rand.Read(keys[i][:]) // never fails, see crypto/rand
	}
	clusters := []*lab.Cluster{a, b}
	for i, own := range clusters {
		other := clusters[1-i]
		public, err := curve25519.X25519(keys[1-i][:], curve25519.Basepoint)
		if err != nil {
			return stop, err
		}
		uapi := fmt.Sprintf("private_key=%s\nlisten_port=%d\npublic_key=%s\nendpoint=%s\nallowed_ip=%s\n",
			hex.EncodeToString(keys[i][:]), wgPort, hex.EncodeToString(public), netip.AddrPortFrom(other.Nodes[0].Addr, wgPort), other.PodCIDR)
		p, err := load.Start(ctx, own.Nodes[0].Host, nil, self, "wireguard-go", uapi)
		if err != nil {
			return stop, err
		}
		procs = append(procs, p)
		err = own.Nodes[0].Do(func() error {
			return withLink("wg0", func(l netlink.Link) error {
				to := &net.IPNet{IP: other.PodCIDR.Addr().AsSlice(), Mask: net.CIDRMask(other.PodCIDR.Bits(), 32)}
				return errors.Join(netlink.LinkSetUp(l), netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: to, Scope: netlink.SCOPE_LINK}))
			})
		})
		if err != nil {
			return stop, err
		}
	}
	return stop, nil
}

// wireguardGo runs the gateway process for comparison: a WireGuard device of the wireguard-go in
// our go.mod, and nothing else.
func wireguardGo(uapi string) error {
	t, err := tun.CreateTUN("wg0", tunnelMTU)
	if err != nil {
		return err
	}
	d := device.NewDevice(t, conn.NewDefaultBind(), device.NewLogger(device.LogLevelError, ""))
	defer d.Close()
	if err := errors.Join(d.IpcSet(uapi), d.Up()); err != nil {
		return err
	}
	fmt.Println("ready")
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, os.Interrupt)
	<-stop
	return nil
}
