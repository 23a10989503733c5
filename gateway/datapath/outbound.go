package datapath

import (
	"errors"
	"time"

	"github.com/isthmus-net/isthmus/gateway/capture"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

const (
	// scratchLen is large enough for any packet. The header starts at scratchPad, so that the
	// packet starts at a multiple of 16 octets.
	scratchPad = 16 - packet.VirtioHeaderLen
	scratchLen = scratchPad + packet.VirtioHeaderLen + 65535

	// localBurst is the maximum number of packets of the in-process endpoint that one batch sends
	// before those of the link.
	localBurst = 32
)

// outbound is the goroutine that reads packets from the link and from the in-process endpoint,
// with its scratch memory.
type outbound struct {
	t         *Tunnel
	scratch   []byte // the current packet of the link, with its virtio header
	header    packet.VirtioHeader
	view      packet.View
	segmenter packet.Segmenter     // segments of the last superpacket that are left for the next batch; refers to scratch
	released  [][]byte             // fragments that are left for the next batch, owned
	peer      *natengine.PeerState // destination of the current packet and of the remaining segments
	padTo     int                  // length to which the current packet must be padded; 0: no padding
	big       tooBig
	traffic   traffic
	now       time.Duration
	tap       *tap
	seal      sealer
}

func newOutbound(t *Tunnel) outbound {
	shown := &tap{t: t, dir: natengine.Outbound}
	return outbound{
		t:       t,
		scratch: make([]byte, scratchLen)[scratchPad:],
		traffic: traffic{direction: natengine.Outbound},
		tap:     shown,
		seal:    newSealer(t, shown),
	}
}

// run sends packets until the link ends.
func (o *outbound) run() {
	defer close(o.t.ended)
	defer o.seal.expiry.Stop()
	for {
		o.seal.fit(o.t.MTU())
		err := o.read(&batch{to: &o.seal})
		o.seal.finish()
		if err != nil {
			return
		}
	}
}

// A sink consumes the packets of a batch, one after the other.
type sink interface {
	// take consumes one complete packet, with final checksums and no larger than the MTU of its
	// peer. p may have capacity for padding, up to maxSize octets in total. The sink may modify p
	// until take returns. more reports whether there is room for another packet.
	take(peer *natengine.PeerState, p []byte) (more bool)

	// maxSize returns the size of the largest packet that the sink accepts now, in octets. It may
	// grow while the batch is empty.
	maxSize() int
}

// A batch is the set of packets of one read. It ends when the link has no more packets or the sink
// is full. Segments of a superpacket that do not fit go into the next batch.
type batch struct {
	to    sink
	n     int // number of packets
	full  bool
	timed bool // the clock has been read for this batch
}

func (b *batch) add(peer *natengine.PeerState, p []byte) {
	b.n++
	b.full = !b.to.take(peer, p)
}

// read fills a batch. It blocks only while the batch is empty. It returns an empty batch if packets
// that wait for a session must be checked. It returns an error only when the link has ended:
// os.ErrClosed after Close.
func (o *outbound) read(b *batch) error {
	o.tap.begin()
	o.readKept(b)
	o.readLocal(b)
	o.readInjected(b)
	var err error
	for !b.full {
		mayBlock := b.n == 0
		if mayBlock {
			b.timed = false // the next packet may come much later, so read the clock again
			o.divert()
		}
		var n int
		if n, err = o.t.link.Read(o.scratch, mayBlock); err != nil {
			if errors.Is(err, ErrWoken) {
				err = nil
				o.tap.begin()
				o.readLocal(b)
				if o.readInjected(b); o.t.recheck.Load() {
					break
				}
				continue
			}
			if errors.Is(err, ErrAgain) {
				err = nil
			}
			break
		}
		if d := o.t.diverted.Load(); d != nil {
			if d.f(o.scratch[:n]); b.n > 0 {
				break // packets in the batch must not wait for further packets
			}
			continue
		}
		o.handlePacket(b, o.scratch[:n])
	}
	o.traffic.flush()
	return err
}

// readKept adds the packets that were left over from the previous batch.
func (o *outbound) readKept(b *batch) {
	for o.segmenter.Remaining() > 0 && !b.full {
		b.add(o.peer, o.segmenter.Next())
	}
	if len(o.released) > 0 {
		o.readReleased(b)
	}
}

// readReleased adds fragments that the engine had held, or that this goroutine has made.
func (o *outbound) readReleased(b *batch) {
	i := 0
	for ; i < len(o.released) && !b.full; i++ {
		b.add(o.peer, o.released[i])
	}
	rest := copy(o.released, o.released[i:])
	clear(o.released[rest:])
	o.released = o.released[:rest]
}

// readLocal adds packets of the in-process endpoint. If a packet stays queued, the batch is not
// empty, so read does not block while the packet waits. A padded packet, which probes the path MTU,
// gets a batch of its own. Otherwise its message could be sent in a UDP superpacket, and virtual
// links may pass a superpacket although they drop a single packet of that size.
func (o *outbound) readLocal(b *batch) {
	if o.t.local == nil {
		return
	}
	// While scratch still holds segments of a superpacket, the batch is full, so this loop does not
	// overwrite them.
	for first := b.n; !b.full && b.n-first < localBurst; {
		if b.n > 0 && o.t.local.hasPadded() {
			b.full = true
			return
		}
		n, size := o.t.local.next(o.scratch)
		if n == 0 {
			return
		}
		if err := o.view.Parse(o.scratch[:n], packet.ChecksumComplete); err != nil {
			o.discard(o.scratch[:n], dropOf(err))
			continue
		}
		o.padTo = size
		o.translate(b, 0, true)
		o.padTo = 0
		if size > 0 {
			b.full = true
		}
	}
}

// handlePacket handles one packet from the link. p starts with the virtio header.
func (o *outbound) handlePacket(b *batch, p []byte) {
	if err := o.header.Decode(p); err != nil {
		o.discard(p[min(len(p), packet.VirtioHeaderLen):], natengine.DropVirtioHeader)
		return
	}
	gsoSize, drop := o.parse(p[packet.VirtioHeaderLen:])
	if drop != natengine.DropNone && o.header.FinishInner(p[packet.VirtioHeaderLen:]) == nil {
		gsoSize, drop = o.parse(p[packet.VirtioHeaderLen:])
	}
	if drop != natengine.DropNone {
		o.discard(p[packet.VirtioHeaderLen:], drop)
		return
	}
	o.translate(b, gsoSize, false)
}

// discard counts a packet that is dropped before it reaches the engine.
func (o *outbound) discard(p []byte, why natengine.Drop) {
	o.t.engine.Count(nil, natengine.Outbound, why)
	if o.tap.active() {
		o.tap.showDropped(capture.BeforeNAT, nil, p, why)
	}
}

// parse parses a packet from the link and validates the virtio header against it.
func (o *outbound) parse(p []byte) (gsoSize int, drop natengine.Drop) {
	if err := o.view.Parse(p, o.header.ChecksumState()); err != nil {
		return 0, dropOf(err)
	}
	gsoSize, err := o.header.Validate(&o.view)
	if err != nil {
		return 0, natengine.DropVirtioHeader
	}
	return gsoSize, natengine.DropNone
}

// translate passes the parsed packet to the engine and acts on the verdict. local is true for a
// packet of the in-process endpoint. Such a packet is sent even to a peer that counts as down,
// because an answer to the packet shows that the peer is back.
func (o *outbound) translate(b *batch, gsoSize int, local bool) {
	if !b.timed {
		o.now, b.timed = o.t.Now(), true
	}
	if o.tap.active() {
		o.tap.saveHeaders(&o.view)
	}
	v := o.t.engine.Outbound(&o.view, o.now)
	if o.tap.active() {
		o.show(v, gsoSize, local)
	}
	if v.Action != natengine.Forward {
		return // the engine has dropped and counted the packet, or holds it
	}
	if v.Peer.Down() && !local {
		for range 1 + len(v.Released()) {
			o.t.engine.Count(v.Peer, natengine.Outbound, natengine.DropPeerDown)
		}
		return
	}
	o.peer = v.Peer
	o.forward(b, gsoSize, v.Peer)
	if len(v.Released()) > 0 {
		o.release(b, v)
	}
}

// show shows a packet, with the verdict on it, to a capture.
func (o *outbound) show(v natengine.Verdict, gsoSize int, local bool) {
	drop, segments := v.Drop, 1
	if v.Action == natengine.Forward && v.Peer.Down() && !local {
		drop = natengine.DropPeerDown
	}
	if gsoSize > 0 {
		segments = (o.view.Len() - o.view.PayloadOffset() + gsoSize - 1) / gsoSize
	}
	o.tap.showTranslated(&o.view, v, drop, segments, nil, o.now)
}

// release adds the fragments that the engine released together with the current packet.
func (o *outbound) release(b *batch, v natengine.Verdict) {
	for _, p := range v.Released() {
		if mtu := limit(b, v.Peer); len(p) > mtu {
			// Parse cannot fail, because the fragment was parsed when it arrived.
			if o.view.Parse(p, packet.ChecksumComplete) == nil {
				o.splitOrReject(&o.view, mtu, v.Peer)
			}
			continue
		}
		o.released = append(o.released, p)
		o.traffic.add(v.Peer, 1, len(p))
	}
	o.readReleased(b)
}

// forward adds the translated packet, or its segments, to the batch.
func (o *outbound) forward(b *batch, gsoSize int, peer *natengine.PeerState) {
	if gsoSize == 0 {
		o.view.CompleteChecksum()
		p := o.view.Bytes()
		if mtu := limit(b, peer); len(p) > mtu {
			o.tooBig(b, 0, mtu, peer)
			return
		}
		b.add(peer, o.padded(p, b.to.maxSize()))
		o.traffic.add(peer, 1, len(p))
		return
	}
	headers := o.view.PayloadOffset()
	if mtu := limit(b, peer); headers+gsoSize > mtu {
		o.tooBig(b, gsoSize, mtu, peer)
		return
	}
	if err := o.segmenter.Reset(&o.view, gsoSize); err != nil {
		o.t.engine.Count(peer, natengine.Outbound, natengine.DropVirtioHeader)
		return
	}
	segments := o.segmenter.Remaining()
	o.traffic.add(peer, segments, o.view.Len()+(segments-1)*headers)
	o.readKept(b)
}

// padded pads p with zeros to padTo octets, but to at most limit octets. If padTo is set, p is at
// the beginning of scratch, so padded extends it in place.
func (o *outbound) padded(p []byte, limit int) []byte {
	if size := min(o.padTo, limit); size > len(p) {
		clear(o.scratch[len(p):size])
		return o.scratch[:size]
	}
	return p
}
