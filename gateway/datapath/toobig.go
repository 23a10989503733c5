package datapath

import (
	"math/rand/v2"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// tooBig is the scratch for packets that are larger than the way to their peer.
type tooBig struct {
	answer [packet.VirtioHeaderLen + packet.MaxTooBig]byte // to the sender, virtio header first
	view   packet.View                                     // of a segment of a superpacket
}

// limit is the largest packet that may go to the peer in this batch.
func limit(b *batch, peer *natengine.PeerState) int {
	if mtu := peer.MTU(); mtu != 0 {
		return min(mtu, b.most)
	}
	return b.most
}

// tooBig handles a translated packet, or a superpacket with segments of gsoSize,
// that is larger than limit: what the sender allows to be cut is cut into
// fragments, anything else is dropped and, where that may be, answered.
func (d *Device) tooBig(b *batch, gsoSize, limit int, peer *natengine.PeerState) {
	o := &d.out
	if gsoSize == 0 {
		d.splitOrTell(&o.view, limit, peer)
		d.readReleased(b)
		return
	}
	s := &o.segmenter
	if err := s.Reset(&o.view, gsoSize); err != nil {
		d.engine.Count(peer, natengine.Outbound, natengine.DropVirtioHeader)
		return
	}
	for s.Remaining() > 0 {
		if err := o.tooBig.view.Parse(s.Next(), packet.ChecksumComplete); err != nil {
			d.engine.Count(peer, natengine.Outbound, dropOf(err))
			continue
		}
		if !d.splitOrTell(&o.tooBig.view, limit, peer) { // for all of them
			*s = packet.Segmenter{}
			break
		}
	}
	d.readReleased(b)
}

// splitOrTell queues the fragments of v. When it may not be cut it drops it, tells
// the sender, and says false.
func (d *Device) splitOrTell(v *packet.View, limit int, peer *natengine.PeerState) bool {
	o := &d.out
	if fragments := v.Split(limit, uint16(1+rand.N(1<<16-1))); fragments != nil {
		for _, f := range fragments {
			o.traffic.add(peer, 1, len(f))
		}
		if len(fragments) > 1 {
			peer.CountFragmented()
		}
		o.released = append(o.released, fragments...)
		return true
	}
	d.engine.Count(peer, natengine.Outbound, natengine.DropTooBig)
	packetAt := o.tooBig.answer[packet.VirtioHeaderLen:]
	answer, action := d.engine.TooBig(v, limit, packetAt, o.now)
	switch action {
	case natengine.Forward:
		// The virtio header in front of it is all zero: a plain packet.
		if err := d.link.Write([][]byte{o.tooBig.answer[:packet.VirtioHeaderLen+len(answer)]}); err != nil {
			d.engine.Count(peer, natengine.Inbound, natengine.DropTUNWrite)
		}
	case natengine.Deliver:
		d.deliverPacket(peer, answer)
	}
	return false
}
