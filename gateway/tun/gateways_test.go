package tun

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/crypto/curve25519"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/internal/cputime"
	"github.com/isthmus-net/isthmus/natengine"
)

// These tests run two gateways with real TUNs. Each TUN is in a network namespace that
// represents a whole cluster. TCP connections are between the kernels of these namespaces, and
// the gateways are joined by a network in memory. Both clusters use 10.244.0.0/16 and see the
// other as 10.71.0.0/16.

var (
	kernelPod = netip.MustParseAddr("10.244.1.2")
	remotePod = netip.MustParseAddr("10.71.1.2")
	selfAddr  = netip.MustParseAddr("169.254.0.1")
)

func startClusters(t testing.TB, offload bool) [2]*namespace {
	t.Helper()
	var clusters [2]*namespace
	network := &memlink.Network{}
	wan := [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	var private, public [2][32]byte
	for i := range 2 {
		k := bytes.Repeat([]byte{byte(8 * (i + 1))}, 32)
		k[31] = k[31]&127 | 64
		p, err := curve25519.X25519(k, curve25519.Basepoint)
		if err != nil {
			t.Fatal(err)
		}
		private[i], public[i] = [32]byte(k), [32]byte(p)
	}
	for i := range 2 {
		ns := newNamespace(t)
		clusters[i] = ns
		d := ns.open(t, "isthmus0", mtu, Options{})
		if !offload {
			switchOffloadsOff(t, d)
		}
		ns.do(t, func() error {
			if err := setUp("isthmus0"); err != nil {
				return err
			}
			if err := setUp("lo", kernelPod.String()+"/32"); err != nil {
				return err
			}
			link, err := netlink.LinkByName("isthmus0")
			if err != nil {
				return err
			}
			_, dst, _ := net.ParseCIDR("10.71.0.0/16")
			return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst, Src: kernelPod.AsSlice()})
		})
		engine := natengine.New(natengine.Config{Self4: selfAddr})
		external := netip.MustParsePrefix("10.90.0.0/24")
		if err := engine.SetPeers([]natengine.Peer{{
			ID:             "peer",
			RemotePods:     []netip.Prefix{netip.MustParsePrefix("10.71.0.0/16")},
			RemoteExternal: []netip.Prefix{external},
			Pods:           []natengine.Remap{{From: netip.MustParsePrefix("10.244.0.0/16"), To: netip.MustParsePrefix("10.71.0.0/16")}},
			External:       []netip.Prefix{external},
			Endpoints:      []natengine.Endpoint{{Real: selfAddr, Seen: external.Addr().Next()}},
			MSS:            mtu - 40,
		}}); err != nil {
			t.Fatal(err)
		}
		local, err := datapath.NewLocal(selfAddr, netip.Addr{}, mtu)
		if err != nil {
			t.Fatal(err)
		}
		tunnel := datapath.New(d, network.Bind(wan[i]), engine, local, datapath.Options{})
		t.Cleanup(func() { _ = tunnel.Close() })
		if err := tunnel.Up(private[i], 5871); err != nil {
			t.Fatal(err)
		}
		peer := datapath.Peer{State: engine.Peers()[0], Key: public[1-i], Endpoint: netip.AddrPortFrom(wan[1-i], 5871)}
		if err := tunnel.SetPeers([]datapath.Peer{peer}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("cluster %d: %+v", i, engine.Stats())
			}
		})
	}
	return clusters
}

// connectKernels returns both ends of a TCP connection from cluster 0 to cluster 1.
func connectKernels(t testing.TB, clusters [2]*namespace) (client, server net.Conn) {
	t.Helper()
	var l net.Listener
	clusters[1].do(t, func() (err error) { l, err = net.Listen("tcp", kernelPod.String()+":80"); return err })
	defer l.Close()
	clusters[0].do(t, func() (err error) {
		client, err = net.DialTimeout("tcp", remotePod.String()+":80", time.Minute)
		return err
	})
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close(); server.Close() })
	return client, server
}

func TestKernelsConnectThroughTwoGateways(t *testing.T) {
	for _, offload := range []bool{true, false} {
		t.Run(fmt.Sprintf("offload=%v", offload), func(t *testing.T) {
			client, server := connectKernels(t, startClusters(t, offload))
			if got := server.RemoteAddr().(*net.TCPAddr).IP.String(); got != remotePod.String() {
				t.Errorf("the server sees %s: want %s", got, remotePod)
			}
			const size = 16 << 20
			deadline := time.Now().Add(3 * time.Minute)
			results := make(chan error, 4)
			for i, c := range []net.Conn{client, server} {
				c.SetDeadline(deadline)
				streams := [2][]byte{make([]byte, size), make([]byte, size)}
				for j := range streams {
					rand.NewChaCha8([32]byte{byte(j)}).Read(streams[j])
				}
				go func() { _, err := c.Write(streams[i]); results <- err }()
				go func() {
					h := sha256.New()
					_, err := io.CopyN(h, c, size)
					if err == nil && [32]byte(h.Sum(nil)) != sha256.Sum256(streams[1-i]) {
						err = fmt.Errorf("end %d: the received data differs", i)
					}
					results <- err
				}()
			}
			for range 4 {
				if err := <-results; err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func BenchmarkKernelsThroughTwoGateways(b *testing.B) {
	client, server := connectKernels(b, startClusters(b, true))
	go func() {
		p := make([]byte, 1<<20)
		for {
			if _, err := server.Read(p); err != nil {
				return
			}
		}
	}()
	buf := make([]byte, 1<<20)
	b.SetBytes(int64(len(buf)))
	before := cputime.Used(b)
	for b.Loop() {
		if _, err := client.Write(buf); err != nil {
			b.Fatal(err)
		}
	}
	// Report the CPU time of both gateways and both ends of TCP, because it depends less on other
	// programs than the throughput does.
	b.ReportMetric((cputime.Used(b)-before).Seconds()*1e9/float64(b.N*len(buf)*8), "cpu-s/Gbit")
}
