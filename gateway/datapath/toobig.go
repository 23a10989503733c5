package datapath

import (
	"math/rand/v2"

	"github.com/isthmus-net/isthmus/gateway/capture"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// tooBig is scratch memory for packets that are larger than the path to their peer allows.
type tooBig struct {
	answer [packet.VirtioHeaderLen + packet.MaxTooBig]byte // the ICMP error, with its virtio header
	view   packet.View                                     // a segment of a superpacket
}

// limit returns the size of the largest packet that may be sent to the peer in this batch.
func limit(b *batch, peer *natengine.PeerState) int {
	size := b.to.maxSize()
	if mtu := peer.MTU(); mtu != 0 {
		return min(mtu, size)
	}
	return size
}

// tooBig handles a translated packet, or a superpacket with segments of gsoSize octets, that is
// larger than limit. If the sender allows it, tooBig fragments the packet. Otherwise it drops the
// packet and answers with an ICMP error, unless an RFC forbids the error.
func (o *outbound) tooBig(b *batch, gsoSize, limit int, peer *natengine.PeerState) {
	if gsoSize == 0 {
		o.splitOrReject(&o.view, limit, peer)
		o.readReleased(b)
		return
	}
	s := &o.segmenter
	if err := s.Reset(&o.view, gsoSize); err != nil {
		o.t.engine.Count(peer, natengine.Outbound, natengine.DropVirtioHeader)
		return
	}
	for s.Remaining() > 0 {
		if err := o.big.view.Parse(s.Next(), packet.ChecksumComplete); err != nil {
			o.t.engine.Count(peer, natengine.Outbound, dropOf(err))
			continue
		}
		if !o.splitOrReject(&o.big.view, limit, peer) { // one ICMP error is enough for all segments
			*s = packet.Segmenter{}
			break
		}
	}
	o.readReleased(b)
}

// splitOrReject queues the fragments of v. If v must not be fragmented, it drops v, sends an ICMP
// error, and returns false.
func (o *outbound) splitOrReject(v *packet.View, limit int, peer *natengine.PeerState) bool {
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
	o.t.engine.Count(peer, natengine.Outbound, natengine.DropTooBig)
	if o.tap.active() {
		o.tap.showDropped(capture.Tunnel, peer, v.Bytes(), natengine.DropTooBig)
	}
	packetBuf := o.big.answer[packet.VirtioHeaderLen:]
	answer, action := o.t.engine.TooBig(v, limit, packetBuf, o.now)
	switch action {
	case natengine.Forward:
		// The virtio header of a packet without offloads is all zero.
		if err := o.t.link.Write([][]byte{o.big.answer[:packet.VirtioHeaderLen+len(answer)]}); err != nil {
			o.t.engine.Count(peer, natengine.Inbound, natengine.DropTUNWrite)
		}
	case natengine.Deliver:
		if o.t.local != nil { // without an in-process endpoint, the source was forged
			o.t.local.deliver(nil, answer)
		}
	}
	return false
}
