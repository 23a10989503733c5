package inline

import (
	"encoding/binary"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/natengine"
)

// sender is the scratch of the one goroutine that reads packets of the path.
type sender struct {
	slab    []byte   // batch slots, each a message: header, packet, padding, tag
	slots   [][]byte // of slab
	sizes   []int
	peers   []*natengine.PeerState
	sealed  [][]byte
	nonce   [12]byte
	batch   uint64
	pending []*device.Keypair // under which the device was given packets that it has to send first
	mtu     int
}

// fit makes slots for packets of the MTU. They only grow: the path may have kept packets for the slots that it saw last.
func (o *sender) fit(batch, mtu int) {
	o.mtu = mtu
	size := (headerLen + mtu + device.PaddingMultiple - 1 + tagLen + 63) &^ 63
	if len(o.slots) == batch && size <= len(o.slots[0]) {
		return
	}
	o.slab = make([]byte, batch*size)
	o.slots, o.sizes = make([][]byte, batch), make([]int, batch)
	o.peers, o.sealed = make([]*natengine.PeerState, batch), make([][]byte, 0, batch)
	for i := range o.slots {
		o.slots[i] = o.slab[i*size : (i+1)*size : (i+1)*size]
	}
}

// read sends packets of the path until there are some that have to go through the device, and returns those.
func (t *Transport) read(bufs [][]byte, sizes []int, offset int) (int, error) {
	o := &t.out
	for _, k := range o.pending {
		t.awaitSent(k)
	}
	clear(o.pending)
	o.pending = o.pending[:0]
	for {
		if mtu, err := t.path.MTU(); err == nil {
			o.fit(len(bufs), mtu)
		}
		n, err := t.path.ReadFor(o.slots, o.sizes, o.peers, headerLen)
		o.batch++
		table, now := t.peers.Load(), time.Now()
		left := 0
		for i := 0; i < n; {
			j := i + 1
			for j < n && o.peers[j] == o.peers[i] {
				j++
			}
			if p := table.byState[o.peers[i]]; p == nil || !t.send(p, i, j, now) {
				for ; i < j; i++ {
					sizes[left] = copy(bufs[left][offset:], o.slots[i][headerLen:headerLen+o.sizes[i]])
					left++
				}
			}
			i = j
		}
		if left > 0 || err != nil {
			return left, err
		}
	}
}

// send seals and sends the packets in slots i to j, all for one peer, or says that they have to go through the device.
func (t *Transport) send(p *peer, i, j int, now time.Time) bool {
	o := &t.out
	k := t.layout.current(p.dev)
	if k == nil || !t.layout.fresh(k, now) {
		return false
	}
	if p.plain != o.batch && now.Sub(p.sampled) >= sampleInterval {
		p.sampled, p.plain = now, o.batch
		o.pending = append(o.pending, k)
	}
	if p.plain == o.batch {
		return false
	}
	if p.keypair != k {
		t.awaitSent(k) // what the device sealed before, while there was no session
		p.keypair = k
	}
	count := uint64(j - i)
	counter := t.layout.nonce(k).Add(count) - count
	if counter+count >= device.RejectAfterMessages || counter+count < counter {
		return false // the device will see that too, and ask for a new session
	}
	aead, index := t.layout.sealer(k), t.layout.remote(k)
	o.sealed = o.sealed[:0]
	for ; i < j; i++ {
		m := o.slots[i]
		binary.LittleEndian.PutUint32(m, device.MessageTransportType)
		binary.LittleEndian.PutUint32(m[4:], index)
		binary.LittleEndian.PutUint64(m[8:], counter)
		size := o.sizes[i]
		padded := max(size, min((size+device.PaddingMultiple-1)&^(device.PaddingMultiple-1), o.mtu))
		clear(m[headerLen+size : headerLen+padded])
		setNonce(&o.nonce, counter)
		o.sealed = append(o.sealed, aead.Seal(m[:headerLen], o.nonce[:], m[headerLen:headerLen+padded], nil))
		counter++
	}
	if err := p.dev.SendBuffers(o.sealed); err != nil {
		for range o.sealed {
			t.count(p.state, natengine.Outbound, natengine.DropTunnelSend)
		}
	}
	return true
}

// awaitSent waits until everything that was sealed under k so far has been sent.
func (t *Transport) awaitSent(k *device.Keypair) {
	next, index := t.layout.nonce(k).Load(), t.layout.remote(k)
	await(func() bool { return t.sentUpTo(index) >= next })
}
