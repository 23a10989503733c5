package datapath

import (
	"errors"
	"os"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/gateway/capture"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// writer is the second half of an inbound goroutine, with its scratch memory. It joins decrypted
// packets into runs, translates the runs, and writes them to the link or passes them to the
// in-process endpoint.
type writer struct {
	t         *Tunnel
	tap       *tap // shared with the first half of the inbound goroutine
	coalescer packet.Coalescer
	ahead     natengine.Lookahead
	header    [packet.VirtioHeaderLen]byte
	vector    [][]byte // arguments of one Link.Write: header, packet, payloads
	whole     []byte   // a run as one contiguous packet
	segmenter packet.Segmenter
	view      packet.View
	local     packet.View // the current packet for the in-process endpoint
	traffic   traffic
	from      *peer // the peer that sent the current packets
	now       time.Duration
	closed    bool
}

func newWriter(t *Tunnel, shown *tap) writer {
	return writer{t: t, tap: shown, traffic: traffic{direction: natengine.Inbound}}
}

// writePackets translates packets from one peer, in order. It modifies them and does not keep them.
// A dropped packet is counted and is no error. os.ErrClosed means that the link is closed.
func (w *writer) writePackets(from *peer, packets [][]byte) error {
	peer := from.state
	w.from, w.now, w.closed = from, w.t.Now(), false
	w.coalescer.UDP = w.t.coalesceUDP.Load()
	for _, b := range packets {
		if err := w.coalescer.Add(b); err != nil {
			w.t.engine.Count(peer, natengine.Inbound, dropOf(err))
			if w.tap.active() {
				w.tap.showDropped(capture.BeforeNAT, peer, b, dropOf(err))
			}
		}
	}
	runs := w.coalescer.Runs()
	if len(runs) > 1 && w.ahead.Begin(w.t.engine, natengine.Inbound) {
		for i := range runs {
			w.ahead.Add(&runs[i].View)
		}
		w.ahead.Fetch()
	}
	for i := range runs {
		w.handleRun(peer, &runs[i])
	}
	w.traffic.flush()
	w.coalescer.Reset()
	if w.closed {
		return os.ErrClosed
	}
	return nil
}

// handleRun translates one run and delivers it. The key that decrypted its packets identifies the
// peer. The engine drops packets whose source address does not belong to that peer.
func (w *writer) handleRun(peer *natengine.PeerState, run *packet.Run) {
	if w.tap.active() {
		w.tap.saveHeaders(&run.View)
	}
	v := w.t.engine.InboundFrom(peer, &run.View, w.now)
	if w.tap.active() {
		w.tap.showTranslated(&run.View, v, v.Drop, run.Segments, run.Tail, w.now)
	}
	switch v.Action {
	case natengine.Forward:
		headers := run.View.PayloadOffset()
		w.traffic.add(v.Peer, run.Segments, run.View.Len()+(run.Segments-1)*headers)
		w.writeRun(v.Peer, run)
	case natengine.Deliver:
		w.traffic.add(v.Peer, run.Segments, run.View.Len()+(run.Segments-1)*run.View.PayloadOffset())
		// Deliver the packets one by one, because the endpoint's stack cannot handle superpackets.
		w.each(v.Peer, run, func(p []byte) { w.deliver(v.Peer, p) })
	case natengine.Discard: // the engine has counted only one packet of the run, so count the others
		for range run.Segments - 1 {
			w.t.engine.Count(v.Peer, natengine.Inbound, v.Drop)
		}
		return
	default: // the engine holds the packet
		return
	}
	for _, p := range v.Released() {
		w.traffic.add(v.Peer, 1, len(p))
		if v.Action == natengine.Deliver {
			w.deliver(v.Peer, p)
		} else {
			w.countRefused(v.Peer, 1, w.writeLink(packet.VirtioHeader{}, p, nil))
		}
	}
}

// writeRun writes a run to the link, as a superpacket if it consists of several packets. If the
// link refuses UDP superpackets, as some kernels do, writeRun stops making them.
func (w *writer) writeRun(peer *natengine.PeerState, run *packet.Run) {
	err := w.writeLink(run.Header, run.View.Bytes(), run.Tail)
	if run.Segments > 1 && run.View.Proto() == packet.UDP && errors.Is(err, syscall.EINVAL) {
		w.t.coalesceUDP.Store(false)
		w.each(peer, run, func(p []byte) { w.countRefused(peer, 1, w.writeLink(packet.VirtioHeader{}, p, nil)) })
		return
	}
	if w.countRefused(peer, run.Segments, err); err != nil && w.tap.active() {
		w.tap.showDropped(capture.AfterNAT, peer, run.View.Bytes(), natengine.DropTUNWrite)
	}
}

// writeLink writes one packet or superpacket to the link.
func (w *writer) writeLink(h packet.VirtioHeader, head []byte, tail [][]byte) error {
	h.Encode(w.header[:])
	w.vector = append(append(w.vector[:0], w.header[:], head), tail...)
	err := w.t.link.Write(w.vector)
	clear(w.vector) // do not keep packets in memory
	return err
}

// countRefused counts packets that the link has refused.
func (w *writer) countRefused(peer *natengine.PeerState, packets int, err error) {
	if err == nil {
		return
	}
	w.closed = w.closed || errors.Is(err, os.ErrClosed)
	for range packets {
		w.t.engine.Count(peer, natengine.Inbound, natengine.DropTUNWrite)
	}
}

// each calls f with each packet of a run, complete and in order. f must not keep the packet.
func (w *writer) each(peer *natengine.PeerState, run *packet.Run, f func([]byte)) {
	if run.Segments == 1 {
		f(run.View.Bytes())
		return
	}
	w.whole = append(w.whole[:0], run.View.Bytes()...)
	for _, b := range run.Tail {
		w.whole = append(w.whole, b...)
	}
	err := w.view.Parse(w.whole, packet.ChecksumPartial)
	if err == nil {
		err = w.segmenter.Reset(&w.view, int(run.Header.GSOSize))
	}
	if err != nil {
		w.t.engine.Count(peer, natengine.Inbound, dropOf(err))
		return
	}
	for w.segmenter.Remaining() > 0 {
		f(w.segmenter.Next())
	}
}

// deliver passes one packet to the in-process endpoint, or counts it as dropped.
func (w *writer) deliver(peer *natengine.PeerState, p []byte) {
	why := natengine.DropLocalQueue // used if there is no endpoint
	if w.t.local != nil {
		if err := w.local.Parse(p, packet.ChecksumComplete); err != nil {
			why = dropOf(err)
		} else {
			why = w.t.toLocal(w.from, &w.local, w.now)
		}
	}
	if why == natengine.DropNone {
		return
	}
	w.t.engine.Count(peer, natengine.Inbound, why)
	if w.tap.active() {
		w.tap.showDropped(capture.AfterNAT, peer, p, why)
	}
}
