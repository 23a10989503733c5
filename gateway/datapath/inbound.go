package datapath

import (
	"errors"
	"os"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// inbound is the scratch of one Write. Writes of several peers run at once, so it
// comes from a pool.
type inbound struct {
	coalescer packet.Coalescer
	ahead     natengine.Lookahead
	header    [packet.VirtioHeaderLen]byte
	vector    [][]byte // header, packet, payloads: what one Link.Write takes
	whole     []byte   // a run put together for who takes packets only
	segmenter packet.Segmenter
	view      packet.View
	traffic   traffic
	now       time.Duration
	closed    bool
}

func newInbound() *inbound {
	return &inbound{traffic: traffic{direction: natengine.Inbound}}
}

// Write translates decrypted packets, each at offset of its buffer, and hands
// them to the link or to the in-process endpoint; it implements tun.Device. All
// packets of one call came from one peer, in the order given. The buffers are
// changed, and not kept. Packets that are dropped are counted and are no error;
// os.ErrClosed means that the link is closed.
func (d *Device) Write(bufs [][]byte, offset int) (int, error) {
	return d.WriteFrom(nil, bufs, offset)
}

// WriteFrom is Write for packets whose peer is known by the key that opened them: those with a source that is not an address
// of that peer are dropped. wireguard-go's device checks that itself, for Write.
func (d *Device) WriteFrom(peer *natengine.PeerState, bufs [][]byte, offset int) (int, error) {
	in := d.writers.Get().(*inbound)
	in.now = d.Now()
	in.closed = false
	in.coalescer.UDP = d.coalesceUDP.Load()
	for _, b := range bufs {
		if err := in.coalescer.Add(b[offset:]); err != nil {
			d.engine.Count(nil, natengine.Inbound, dropOf(err))
		}
	}
	runs := in.coalescer.Runs()
	if len(runs) > 1 && in.ahead.Begin(d.engine, natengine.Inbound) {
		for i := range runs {
			in.ahead.Add(&runs[i].View)
		}
		in.ahead.Fetch()
	}
	for i := range runs {
		if peer != nil && !d.engine.Owns(peer, &runs[i].View) {
			for range runs[i].Segments {
				d.engine.Count(peer, natengine.Inbound, natengine.DropSource)
			}
			continue
		}
		d.inbound(in, &runs[i])
	}
	in.traffic.flush()
	in.coalescer.Reset()
	closed := in.closed
	d.writers.Put(in)
	if closed {
		return 0, os.ErrClosed
	}
	return len(bufs), nil
}

// inbound handles one run.
func (d *Device) inbound(in *inbound, run *packet.Run) {
	v := d.engine.Inbound(&run.View, in.now)
	switch v.Action {
	case natengine.Forward:
		headers := run.View.PayloadOffset()
		in.traffic.add(v.Peer, run.Segments, run.View.Len()+(run.Segments-1)*headers)
		d.writeRun(in, v.Peer, run)
	case natengine.Deliver:
		in.traffic.add(v.Peer, run.Segments, run.View.Len()+(run.Segments-1)*run.View.PayloadOffset())
		// Packet by packet: its sockets know no superpackets.
		d.each(in, v.Peer, run, func(p []byte) { d.deliverPacket(v.Peer, p) })
	default: // discarded and counted by the engine, or held
		return
	}
	for _, p := range v.Released() {
		in.traffic.add(v.Peer, 1, len(p))
		if v.Action == natengine.Deliver {
			d.deliverPacket(v.Peer, p)
		} else {
			d.written(in, v.Peer, 1, d.writeLink(in, packet.VirtioHeader{}, p, nil))
		}
	}
}

// writeRun writes a run to the link, as a superpacket where it is more than one packet. A link that refuses those of UDP,
// as some kernels do, gets no more of them.
func (d *Device) writeRun(in *inbound, peer *natengine.PeerState, run *packet.Run) {
	err := d.writeLink(in, run.Header, run.View.Bytes(), run.Tail)
	if run.Segments > 1 && run.View.Proto() == packet.UDP && errors.Is(err, syscall.EINVAL) {
		d.coalesceUDP.Store(false)
		d.each(in, peer, run, func(p []byte) { d.written(in, peer, 1, d.writeLink(in, packet.VirtioHeader{}, p, nil)) })
		return
	}
	d.written(in, peer, run.Segments, err)
}

// writeLink writes one packet or superpacket to the link.
func (d *Device) writeLink(in *inbound, h packet.VirtioHeader, head []byte, tail [][]byte) error {
	h.Encode(in.header[:])
	in.vector = append(append(in.vector[:0], in.header[:], head), tail...)
	err := d.link.Write(in.vector)
	clear(in.vector) // the pool must not keep packets alive
	return err
}

// written counts packets that the link did not take.
func (d *Device) written(in *inbound, peer *natengine.PeerState, packets int, err error) {
	if err == nil {
		return
	}
	in.closed = in.closed || errors.Is(err, os.ErrClosed)
	for range packets {
		d.engine.Count(peer, natengine.Inbound, natengine.DropTUNWrite)
	}
}

// each calls f with each packet of a run, complete and in order; f does not keep it.
func (d *Device) each(in *inbound, peer *natengine.PeerState, run *packet.Run, f func([]byte)) {
	if run.Segments == 1 {
		f(run.View.Bytes())
		return
	}
	in.whole = append(in.whole[:0], run.View.Bytes()...)
	for _, b := range run.Tail {
		in.whole = append(in.whole, b...)
	}
	err := in.view.Parse(in.whole, packet.ChecksumPartial)
	if err == nil {
		err = in.segmenter.Reset(&in.view, int(run.Header.GSOSize))
	}
	if err != nil {
		d.engine.Count(peer, natengine.Inbound, dropOf(err))
		return
	}
	for in.segmenter.Remaining() > 0 {
		f(in.segmenter.Next())
	}
}

// deliverPacket hands one packet to the in-process endpoint.
func (d *Device) deliverPacket(peer *natengine.PeerState, p []byte) {
	if d.local == nil {
		d.engine.Count(peer, natengine.Inbound, natengine.DropLocalQueue)
		return
	}
	d.local.deliver(p)
}
