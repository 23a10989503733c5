// Package datapath moves packets between the hosts of this cluster and the
// tunnel, through the NAT engine.
//
//	        ┌───────────────────────── Device ─────────────────────────┐
//	        │ Read:  parse → engine.Outbound → segment ──────────────► │
//	Link ⇄  │            ▲ packets of Local                            │ ⇄ wireguard-go
//	(TUN)   │ Write: ◄── link, or Local ◄── engine.Inbound ◄── coalesce│
//	        └──────────────────────────────────────────────────────────┘
//
// A superpacket crosses the engine once: before it is segmented on the way out,
// after it has been coalesced on the way in. For a known flow there is no
// allocation, no lock of our own and no log line on either way; the clock is read
// once per batch.
//
// The Device is also the seam for another transport than wireguard-go's device:
// ReadEach hands packets out where they lie, WriteFrom takes any buffers, and both
// know nothing of keys or sockets and leave the choice of the goroutine to the caller.
package datapath

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// Options of a Device. The zero value is the default.
type Options struct {
	// CoalesceUDP joins equal-sized UDP datagrams of one flow into UDP superpackets
	// for the link, until it refuses one with EINVAL. The kernel takes them from
	// Linux 6.2 on; tun.TrustsUSO says more.
	CoalesceUDP bool
}

// Device is the packet path. It implements wireguard-go's tun.Device: Read is
// called from one goroutine, Write from one per peer, the rest from anywhere.
type Device struct {
	link    Link
	engine  *natengine.Engine
	local   *Local // may be nil
	options Options
	start   time.Time
	mtu     atomic.Int64

	coalesceUDP atomic.Bool // and the link has not refused it

	out     outbound  // state of the one reader
	writers sync.Pool // of *inbound, scratch of one Write

	events   chan tun.Event
	eventsMu sync.Mutex // guards closed and sending on events
	closed   bool
}

var _ tun.Device = (*Device)(nil)

// New joins a link, an engine and, unless nil, an in-process endpoint. The Device
// owns link and local: its Close closes them.
func New(link Link, engine *natengine.Engine, local *Local, o Options) *Device {
	return newDevice(link, engine, local, time.Now(), o)
}

// Beside makes a path for another tunnel of the same gateway: with the engine and the clock of d, over a link and with an
// in-process endpoint of its own. That has the addresses of the other; what comes by a path is answered by it.
func (d *Device) Beside(link Link, local *Local) *Device {
	return newDevice(link, d.engine, local, d.start, d.options)
}

func newDevice(link Link, engine *natengine.Engine, local *Local, start time.Time, o Options) *Device {
	d := &Device{
		link:    link,
		engine:  engine,
		local:   local,
		options: o,
		start:   start,
		out:     newOutbound(),
		events:  make(chan tun.Event, 1),
	}
	d.mtu.Store(int64(link.MTU()))
	d.coalesceUDP.Store(o.CoalesceUDP)
	d.writers.New = func() any { return newInbound() }
	if local != nil {
		local.attach(link.Wake, func() { engine.Count(nil, natengine.Outbound, natengine.DropLocalQueue) })
	}
	return d
}

// Now is the monotonic time since New. It is what the engine is given, so Sweep
// and Trace of the same engine must be called with it too.
func (d *Device) Now() time.Duration { return time.Since(d.start) }

// SetMTU tells wireguard-go (which pads no message beyond it) and the in-process
// endpoint the new MTU in octets. The link's own MTU is the caller's business.
func (d *Device) SetMTU(mtu int) {
	d.mtu.Store(int64(mtu))
	if d.local != nil {
		d.local.SetMTU(mtu)
	}
	d.eventsMu.Lock()
	defer d.eventsMu.Unlock()
	if d.closed {
		return
	}
	select {
	case d.events <- tun.EventMTUUpdate:
	default: // one is waiting already, and its receiver will ask MTU for the newest value
	}
}

// MTU implements tun.Device. It never fails.
func (d *Device) MTU() (int, error) { return int(d.mtu.Load()), nil }

// Name implements tun.Device. It never fails.
func (d *Device) Name() (string, error) { return d.link.Name(), nil }

// File implements tun.Device. There is none to give away; wireguard-go's device
// does not ask (checked at the version in go.mod).
func (d *Device) File() *os.File { return nil }

// Events implements tun.Device. No EventUp is ever sent: whoever made
// wireguard-go's device calls its Up when the configuration is complete.
func (d *Device) Events() <-chan tun.Event { return d.events }

// BatchSize implements tun.Device.
func (d *Device) BatchSize() int { return conn.IdealBatchSize }

// Close ends Read and Write, the link, the in-process endpoint and Events.
// Further calls do nothing.
func (d *Device) Close() error {
	d.eventsMu.Lock()
	defer d.eventsMu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	close(d.events)
	err := d.link.Close()
	if d.local != nil {
		d.local.Close()
	}
	return err
}

// dropOf names the reason to drop a packet that does not parse.
func dropOf(err error) natengine.Drop {
	if errors.Is(err, packet.ErrTinyFragment) || errors.Is(err, packet.ErrFragmentRange) {
		return natengine.DropFragment
	}
	return natengine.DropMalformed
}

// traffic adds up what one batch carries, so that the counters of a peer, which
// other goroutines read, are touched once per batch and peer.
type traffic struct {
	direction      natengine.Direction
	peer           *natengine.PeerState
	packets, bytes int
}

// add counts packets and octets of IP, as they travel through the tunnel.
func (t *traffic) add(peer *natengine.PeerState, packets, bytes int) {
	if peer != t.peer {
		t.flush()
		t.peer = peer
	}
	t.packets += packets
	t.bytes += bytes
}

func (t *traffic) flush() {
	if t.peer != nil {
		t.peer.CountTraffic(t.direction, t.packets, t.bytes)
	}
	t.peer, t.packets, t.bytes = nil, 0, 0
}
