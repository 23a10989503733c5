package inline

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/crypto/curve25519"
	"golang.zx2c4.com/wireguard/conn/bindtest"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/isthmus-net/isthmus/natengine"
)

// trialTimeout is for a machine that is very busy; a trial takes milliseconds.
const trialTimeout = 10 * time.Second

// Try sets up a session between two devices in memory and sends packets both ways, through the devices and inline. It is
// the last check before this package is trusted: with fields that have kept name and type and have changed their meaning,
// no packet would arrive.
func Try() error {
	addrs := [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	binds := bindtest.NewChannelBinds()
	var keys [2][32]byte
	var public [2][32]byte
	for i := range keys {
		_, _ = rand.Read(keys[i][:]) // never fails
		p, err := curve25519.X25519(keys[i][:], curve25519.Basepoint)
		if err != nil {
			return fmt.Errorf("trial session: %w", err)
		}
		copy(public[i][:], p)
	}
	var paths [2]*trialPath
	for i := range paths {
		paths[i] = newTrialPath()
		t, err := New(paths[i], binds[i], func(*natengine.PeerState, natengine.Direction, natengine.Drop) {})
		if err != nil {
			return err
		}
		d := device.NewDevice(t.TUN(), t.Bind(), device.NewLogger(device.LogLevelSilent, ""))
		defer d.Close()
		t.Attach(d)
		err = d.IpcSet(fmt.Sprintf("private_key=%s\npublic_key=%s\nendpoint=127.0.0.1:%d\nallowed_ip=%v/32\n",
			hex.EncodeToString(keys[i][:]), hex.EncodeToString(public[1-i][:]), i+1, addrs[1-i]))
		if err == nil {
			err = d.Up()
		}
		if err != nil {
			return fmt.Errorf("trial session: %w", err)
		}
		t.SetPeers([]Peer{{paths[i].peer, public[1-i]}})
	}
	timeout := time.After(trialTimeout)
	var marker byte
	var inline [2]bool
	for !inline[0] || !inline[1] { // the first packets of each direction go through the devices
		for from := range paths {
			marker++
			paths[from].out <- trialPacket(addrs[from], addrs[1-from], marker)
			select {
			case got := <-paths[1-from].in:
				if want := trialPacket(addrs[from], addrs[1-from], marker); !bytes.Equal(got.packet, want) {
					return fmt.Errorf("trial session: %x arrived as %x", want, got.packet)
				}
				inline[from] = inline[from] || got.inline
			case <-timeout:
				return errors.New("trial session: a packet did not arrive")
			}
		}
		if marker > 32 {
			return errors.New("trial session: all packets went through the devices")
		}
	}
	return nil
}

// trialPacket is a whole IPv4 packet of 21 octets.
func trialPacket(src, dst netip.Addr, marker byte) []byte {
	p := make([]byte, 21)
	p[0], p[3], p[8], p[9], p[20] = 0x45, 21, 64, 253, marker // protocol 253: for experiments (RFC 3692)
	copy(p[12:], src.AsSlice())
	copy(p[16:], dst.AsSlice())
	return p
}

// trialPath is one end of a trial session.
type trialPath struct {
	peer   *natengine.PeerState
	out    chan []byte
	in     chan trialArrival
	closed chan struct{}
	events chan tun.Event
}

type trialArrival struct {
	packet []byte
	inline bool
}

var _ Path = (*trialPath)(nil)

func newTrialPath() *trialPath {
	return &trialPath{
		peer: new(natengine.PeerState), out: make(chan []byte), in: make(chan trialArrival, 1024),
		closed: make(chan struct{}), events: make(chan tun.Event),
	}
}

func (p *trialPath) ReadFor(bufs [][]byte, sizes []int, peers []*natengine.PeerState, offset int) (int, error) {
	select {
	case b := <-p.out:
		sizes[0], peers[0] = copy(bufs[0][offset:], b), p.peer
		return 1, nil
	case <-p.closed:
		return 0, os.ErrClosed
	}
}

func (p *trialPath) Read([][]byte, []int, int) (int, error) { return 0, errors.ErrUnsupported }

func (p *trialPath) WriteFrom(_ *natengine.PeerState, bufs [][]byte, offset int) (int, error) {
	return p.arrive(bufs, offset, true)
}

func (p *trialPath) Write(bufs [][]byte, offset int) (int, error) {
	return p.arrive(bufs, offset, false)
}

func (p *trialPath) arrive(bufs [][]byte, offset int, inline bool) (int, error) {
	for _, b := range bufs {
		p.in <- trialArrival{bytes.Clone(b[offset:]), inline}
	}
	return len(bufs), nil
}

func (p *trialPath) MTU() (int, error)        { return 1420, nil }
func (p *trialPath) Name() (string, error)    { return "trial", nil }
func (p *trialPath) File() *os.File           { return nil }
func (p *trialPath) Events() <-chan tun.Event { return p.events }
func (p *trialPath) BatchSize() int           { return 1 }

func (p *trialPath) Close() error {
	close(p.closed)
	close(p.events)
	return nil
}
