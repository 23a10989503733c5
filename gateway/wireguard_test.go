package gateway

import (
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	wgtun "golang.zx2c4.com/wireguard/tun"

	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
)

func key(n byte) (k [32]byte) { k[0], k[31] = n, 64; return k }

func hexKey(n byte) string { k := key(n); return hex.EncodeToString(k[:]) }

func peer(n byte, endpoint string, pods, external string) wgPeer {
	p := wgPeer{key: key(n), allowedIPs: [2]netip.Prefix{netip.MustParsePrefix(pods), netip.MustParsePrefix(external)}}
	if endpoint != "" {
		p.endpoint = netip.MustParseAddrPort(endpoint)
	}
	return p
}

func TestWireGuardIsToldTheDifferenceOnly(t *testing.T) {
	a := peer(1, "192.0.2.1:5871", "10.1.0.0/16", "10.2.0.0/16")
	b := peer(2, "[2001:db8::2]:5871", "10.3.0.0/16", "10.4.0.0/16")
	moved := a
	moved.endpoint = netip.MustParseAddrPort("192.0.2.9:5871")
	renumbered := a
	renumbered.allowedIPs[0] = netip.MustParsePrefix("10.9.0.0/16")
	rekeyed := a
	rekeyed.key = key(3)
	unresolved := a
	unresolved.endpoint = netip.AddrPort{}
	config := func(peers ...wgPeer) wgConfig { return wgConfig{key(9), 5871, peers} }
	for _, tc := range []struct {
		name       string
		have, want wgConfig
		text       string
	}{
		{"nothing", config(a, b), config(b, a), ""},
		{"start", wgConfig{}, config(), "private_key=" + hexKey(9) + "\nlisten_port=5871\n"},
		{"new peer", config(a), config(a, b),
			"public_key=" + hexKey(2) + "\nendpoint=[2001:db8::2]:5871\nallowed_ip=10.3.0.0/16\nallowed_ip=10.4.0.0/16\n"},
		{"new peer without an address yet", config(), config(unresolved),
			"public_key=" + hexKey(1) + "\nallowed_ip=10.1.0.0/16\nallowed_ip=10.2.0.0/16\n"},
		{"endpoint", config(a, b), config(moved, b), "public_key=" + hexKey(1) + "\nupdate_only=true\nendpoint=192.0.2.9:5871\n"},
		{"name not resolved for the moment", config(a, b), config(unresolved, b), ""},
		{"allowed IP, added before the other goes", config(a), config(renumbered),
			"public_key=" + hexKey(1) + "\nupdate_only=true\nallowed_ip=10.9.0.0/16\nallowed_ip=-10.1.0.0/16\n"},
		{"key, the old peer goes last", config(a, b), config(rekeyed, b),
			"public_key=" + hexKey(3) + "\nendpoint=192.0.2.1:5871\nallowed_ip=10.1.0.0/16\nallowed_ip=10.2.0.0/16\npublic_key=" + hexKey(1) + "\nremove=true\n"},
		{"removed", config(a, b), config(b), "public_key=" + hexKey(1) + "\nremove=true\n"},
		{"own key", config(a), wgConfig{key(8), 5871, []wgPeer{a}}, "private_key=" + hexKey(8) + "\n"},
	} {
		if got := wgDiff(tc.have, tc.want); got != tc.text {
			t.Errorf("%s: got\n%s\nwant\n%s", tc.name, got, tc.text)
		}
	}
}

// idle is a tun.Device on which nothing happens.
type idle struct{ events chan wgtun.Event }

func newIdle() *idle           { return &idle{make(chan wgtun.Event)} }
func (d *idle) File() *os.File { return nil }
func (d *idle) Read([][]byte, []int, int) (int, error) {
	for range d.events {
	}
	return 0, os.ErrClosed
}
func (d *idle) Write(bufs [][]byte, _ int) (int, error) { return len(bufs), nil }
func (d *idle) MTU() (int, error)                       { return 1440, nil }
func (d *idle) Name() (string, error)                   { return "idle", nil }
func (d *idle) Events() <-chan wgtun.Event              { return d.events }
func (d *idle) Close() error                            { close(d.events); return nil }
func (d *idle) BatchSize() int                          { return 1 }

var quiet = slog.New(slog.DiscardHandler)

// The real device ends up with what was wanted, whatever came before.
func TestWireGuardDeviceFollowsAnySequenceOfConfigurations(t *testing.T) {
	tun := newTunnel(newIdle(), conn.NewDefaultBind(), quiet)
	defer tun.close()
	if err := tun.start(key(9), 0); err != nil {
		t.Fatal(err)
	}
	a := peer(1, "192.0.2.1:5871", "10.1.0.0/16", "10.2.0.0/16")
	b := peer(2, "192.0.2.2:5871", "10.3.0.0/16", "10.4.0.0/16")
	swapA, swapB := a, b
	swapA.allowedIPs, swapB.allowedIPs = b.allowedIPs, a.allowedIPs
	half := a
	half.allowedIPs[1] = b.allowedIPs[0]
	rekeyed := a
	rekeyed.key = key(3)
	for i, peers := range [][]wgPeer{{a}, {a, b}, {swapA, swapB}, {a, b}, {rekeyed, b}, {b}, {}, {a, b}, {swapB}, {half}, {a, b}, {a, b}} {
		want := wgConfig{privateKey: key(9), peers: peers}
		if err := tun.apply(want); err != nil {
			t.Fatal(err)
		}
		stats, err := tun.stats()
		if err != nil {
			t.Fatal(err)
		}
		if len(stats) != len(peers) {
			t.Errorf("step %d: %d peers, want %d", i, len(stats), len(peers))
		}
		for _, p := range peers {
			if s := stats[p.key]; s.endpoint != p.endpoint || wgPeerFor(p.key, p.endpoint, s.allowedIPs) != wgPeerFor(p.key, p.endpoint, p.allowedIPs) {
				t.Errorf("step %d: peer %d has %+v, want %+v", i, p.key[0], s, p)
			}
		}
	}
}

// A peer that roamed stays where it was heard, until its configuration changes.
func TestARoamedPeerIsLeftWhereItIs(t *testing.T) {
	tun := newTunnel(newIdle(), conn.NewDefaultBind(), quiet)
	defer tun.close()
	if err := tun.start(key(9), 0); err != nil {
		t.Fatal(err)
	}
	a := peer(1, "192.0.2.1:5871", "10.1.0.0/16", "10.2.0.0/16")
	want := wgConfig{privateKey: key(9), peers: []wgPeer{a}}
	at := func() string {
		stats, err := tun.stats()
		if err != nil {
			t.Fatal(err)
		}
		return stats[a.key].endpoint.String()
	}
	apply := func() {
		t.Helper()
		if err := tun.apply(want); err != nil {
			t.Fatal(err)
		}
	}
	apply()
	tun.dev.IpcSet("public_key=" + hexKey(1) + "\nupdate_only=true\nendpoint=198.51.100.7:1234\n") // as a packet from there does
	apply()
	if got := at(); got != "198.51.100.7:1234" {
		t.Errorf("after the same configuration: %s", got)
	}
	tun.forget(a.key)
	apply()
	if got := at(); got != "192.0.2.1:5871" {
		t.Errorf("after it was given up there: %s", got)
	}
	tun.dev.IpcSet("public_key=" + hexKey(1) + "\nupdate_only=true\nendpoint=198.51.100.7:1234\n")
	want.peers[0].endpoint = netip.MustParseAddrPort("192.0.2.3:5871")
	apply()
	if got := at(); got != "192.0.2.3:5871" {
		t.Errorf("after another configuration: %s", got)
	}
}

// TestAHandshakeThatIsGivenUpIsNotTriedAgain: after rest the device is silent about a peer, until the next handshake is asked
// for, which works as any.
func TestAHandshakeThatIsGivenUpIsNotTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the device tries again by timers
		const port = 5871
		var network memlink.Network
		here, there := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
		socket := network.Bind(there)
		receive, _, err := socket.Open(port)
		if err != nil {
			t.Fatal(err)
		}
		var heard atomic.Int64
		go func() {
			for {
				n, err := receive[0]([][]byte{make([]byte, 2048)}, make([]int, 1), make([]conn.Endpoint, 1))
				if err != nil {
					return
				}
				heard.Add(int64(n))
			}
		}()
		initiations := func(within time.Duration) int64 {
			time.Sleep(within)
			synctest.Wait()
			return heard.Swap(0)
		}
		ours, theirs := key(16), key(24) // different ones, after the lowest bits are cleared
		us := newTunnel(newIdle(), network.Bind(here), quiet)
		defer us.close()
		if err := us.start(ours, port); err != nil {
			t.Fatal(err)
		}
		them := peer(0, fmt.Sprintf("%v:%d", there, port), "10.1.0.0/16", "10.2.0.0/16")
		them.key = [32]byte(publicKey(theirs))
		if err := us.apply(wgConfig{privateKey: ours, listenPort: port, peers: []wgPeer{them}}); err != nil {
			t.Fatal(err)
		}
		list := []device.NoisePublicKey{them.key, key(77)} // the second is gone meanwhile
		done := make(chan struct{})
		us.reach(list, nil, done)
		if n := initiations(100 * time.Millisecond); n != 1 {
			t.Fatalf("%d messages for one handshake", n)
		}
		us.reach(nil, list, done)
		if n := initiations(device.RekeyTimeout + time.Second/2); n != 0 {
			t.Errorf("%d messages after it was given up", n)
		}

		socket.Close()
		other := newTunnel(newIdle(), network.Bind(there), quiet)
		defer other.close()
		if err := other.start(theirs, port); err != nil {
			t.Fatal(err)
		}
		back := peer(0, "", "10.3.0.0/16", "10.4.0.0/16")
		back.key = [32]byte(publicKey(ours))
		if err := other.apply(wgConfig{privateKey: theirs, listenPort: port, peers: []wgPeer{back}}); err != nil {
			t.Fatal(err)
		}
		us.reach(list, nil, done)
		synctest.Wait()
		stats, err := us.stats()
		if err != nil {
			t.Fatal(err)
		}
		if stats[them.key].handshake.IsZero() {
			t.Fatal("no session when the peer is there")
		}
	})
}

func TestAListenPortInUseIsNamedAndTheOldOneStays(t *testing.T) {
	taken, err := net.ListenPacket("udp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := netip.MustParseAddrPort(taken.LocalAddr().String()).Port()
	tun := newTunnel(newIdle(), conn.NewDefaultBind(), quiet)
	defer tun.close()
	if err := tun.start(key(9), port); err == nil || !strings.Contains(err.Error(), "/udp is in use by another process") {
		t.Errorf("start: %v", err)
	}
	tun = newTunnel(newIdle(), conn.NewDefaultBind(), quiet)
	defer tun.close()
	free := port + 1
	for ; free < port+50; free++ { // somebody else may have that one
		if err = tun.start(key(9), free); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // it is tried again
		if err := tun.apply(wgConfig{privateKey: key(9), listenPort: port}); err == nil || !strings.Contains(err.Error(), "is in use") {
			t.Errorf("change: %v", err)
		}
	}
	if text, _ := tun.dev.IpcGet(); !strings.Contains(text, "listen_port="+hostPort("", free)[1:]+"\n") {
		t.Errorf("listens elsewhere than on %d:\n%s", free, strings.SplitN(text, "\n", 2)[1])
	}
	taken.Close()
	if err := tun.apply(wgConfig{privateKey: key(9), listenPort: port}); err != nil {
		t.Errorf("once it is free: %v", err)
	}
	if err := portFree(port); err == nil {
		t.Error("nothing listens on the new port")
	}
	if err := portFree(free); err != nil {
		t.Errorf("the old port: %v", err)
	}
}

func TestStatsAreReadFromTheDevicesAnswer(t *testing.T) {
	stats, err := parseStats("private_key=00\nlisten_port=5871\npublic_key=" + hexKey(1) + `
preshared_key=00
protocol_version=1
endpoint=[::ffff:192.0.2.1]:5871
last_handshake_time_sec=1700000000
last_handshake_time_nsec=5
tx_bytes=10
rx_bytes=20
persistent_keepalive_interval=0
allowed_ip=10.2.0.0/16
allowed_ip=10.1.0.0/16
public_key=` + hexKey(2) + "\nlast_handshake_time_sec=0\nlast_handshake_time_nsec=0\n")
	if err != nil {
		t.Fatal(err)
	}
	want := wgStats{netip.MustParseAddrPort("192.0.2.1:5871"), time.Unix(1700000000, 5), 20, 10,
		[2]netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("10.2.0.0/16")}}
	if len(stats) != 2 || stats[key(1)] != want || stats[key(2)] != (wgStats{}) {
		t.Errorf("%+v", stats)
	}
	if _, err := parseStats("public_key=xyz\n"); err == nil || strings.Contains(err.Error(), "xyz") && strings.Contains(err.Error(), "private") {
		t.Errorf("%v", err)
	}
}
