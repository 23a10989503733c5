package inline

import (
	"encoding/binary"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/natengine"
)

// What is sealed before it is sent. With half of the octets and less TCP was slower, with twice not faster; what waits here,
// for the half of a millisecond that it takes at most, would else wait in the queue of the TUN.
const (
	slabLen  = 512 << 10 // octets of messages, about
	maxBatch = 512       // packets
)

// sender is the scratch of the one goroutine that reads packets of the path. Each is sealed as soon as it is there, out of
// the place where it lies.
type sender struct {
	t     *Transport
	slab  []byte // messages of a batch: header, packet, padding, tag
	slot  int    // the most that one takes
	used  int    // octets of slab
	most  int    // largest packet
	mtu   int
	nonce [12]byte

	// Of the batch at hand.
	batch  uint64 // its number
	taken  int    // packets
	table  *peerTable
	now    time.Time
	bufs   [][]byte // for the device
	sizes  []int
	offset int
	left   int // packets for the device

	// Of the run at hand, of packets for one peer.
	state   *natengine.PeerState
	peer    *peer
	keypair *device.Keypair // nil: they have to go through the device
	sealed  [][]byte

	pending []*device.Keypair // under which the device was given packets that it has to send first
}

// fit makes room for packets of the MTU. It only grows: the path may have kept packets of the size that was told it last.
func (o *sender) fit(mtu int) {
	o.mtu = mtu
	if mtu <= o.most {
		return
	}
	o.most = mtu
	o.slot = slotFor(mtu)
	o.slab = make([]byte, slabLen+o.slot)
}

// slotFor is what the message of a packet takes of the slab: whole cache lines.
func slotFor(size int) int {
	return (headerLen + size + device.PaddingMultiple - 1 + tagLen + 63) &^ 63
}

// read sends packets of the path until there are some that have to go through the device, and returns those.
func (t *Transport) read(bufs [][]byte, sizes []int, offset int) (int, error) {
	o := &t.out
	for _, k := range o.pending {
		t.awaitSent(k)
	}
	clear(o.pending)
	o.pending = o.pending[:0]
	o.bufs, o.sizes, o.offset, o.left = bufs, sizes, offset, 0
	for {
		if mtu, err := t.path.MTU(); err == nil {
			o.fit(mtu)
		}
		o.taken, o.used = 0, 0
		err := t.path.ReadEach(o.most, o)
		o.flush()
		o.batch++
		if o.left > 0 || err != nil {
			return o.left, err
		}
	}
}

// Take implements datapath.Taker.
func (o *sender) Take(state *natengine.PeerState, p []byte) (more bool) {
	if o.taken == 0 {
		o.table, o.now = o.t.peers.Load(), time.Now()
		o.begin(state)
	} else if state != o.state {
		o.flush()
		o.begin(state)
	}
	if !o.seal(p) {
		o.sizes[o.left] = copy(o.bufs[o.left][o.offset:], p)
		o.left++
	}
	o.taken++
	return o.left < len(o.bufs) && o.taken < maxBatch && o.used+o.slot <= len(o.slab)
}

// begin finds out how packets for a peer are to go.
func (o *sender) begin(state *natengine.PeerState) {
	t := o.t
	p := o.table.byState[state]
	o.state, o.peer, o.keypair = state, p, nil
	if p == nil {
		return
	}
	k := t.layout.current(p.dev)
	if k == nil || !t.layout.fresh(k, o.now) {
		return
	}
	if p.plain != o.batch && o.now.Sub(p.sampled) >= sampleInterval {
		p.sampled, p.plain = o.now, o.batch
		o.pending = append(o.pending, k)
	}
	if p.plain == o.batch {
		return
	}
	if p.keypair != k {
		t.awaitSent(k) // what the device sealed before, while there was no session
		p.keypair = k
	}
	o.keypair = k
}

// seal makes a message of a packet, or says that it has to go through the device.
func (o *sender) seal(p []byte) bool {
	k, layout := o.keypair, &o.t.layout
	if k == nil {
		return false
	}
	counter := layout.nonce(k).Add(1) - 1
	if counter+1 >= device.RejectAfterMessages {
		o.flush()
		o.keypair = nil
		return false // the device will see that too, and ask for a new session
	}
	m := o.slab[o.used : o.used+o.slot : o.used+o.slot]
	o.used += slotFor(len(p))
	binary.LittleEndian.PutUint32(m, device.MessageTransportType)
	binary.LittleEndian.PutUint32(m[4:], layout.remote(k))
	binary.LittleEndian.PutUint64(m[8:], counter)
	setNonce(&o.nonce, counter)
	if padded := min((len(p)+device.PaddingMultiple-1)&^(device.PaddingMultiple-1), o.mtu); padded > len(p) {
		plain := m[headerLen : headerLen+padded]
		clear(plain[copy(plain, p):])
		p = plain
	}
	o.sealed = append(o.sealed, layout.sealer(k).Seal(m[:headerLen], o.nonce[:], p, nil))
	return true
}

// flush sends what was sealed.
func (o *sender) flush() {
	if len(o.sealed) == 0 {
		return
	}
	if err := o.peer.dev.SendBuffers(o.sealed); err != nil {
		for range o.sealed {
			o.t.count(o.state, natengine.Outbound, natengine.DropTunnelSend)
		}
	}
	clear(o.sealed)
	o.sealed = o.sealed[:0]
}

// awaitSent waits until everything that was sealed under k so far has been sent.
func (t *Transport) awaitSent(k *device.Keypair) {
	next, index := t.layout.nonce(k).Load(), t.layout.remote(k)
	await(func() bool { return t.sentUpTo(index) >= next })
}
