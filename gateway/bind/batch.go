package bind

import "golang.zx2c4.com/wireguard/conn"

const (
	// MaxDatagram is the space in octets that is reserved for one datagram: more than any UDP
	// payload.
	MaxDatagram = 65535

	slabLen   = 512<<10 + MaxDatagram
	slabAlign = 64 // the offset of each datagram in a slab is a multiple of a cache line
)

// A Batch holds received datagrams in memory of its own, one after the other. Next splits datagrams
// that the kernel has joined. The caller may read and change the octets until Reset. A Batch must
// not be used concurrently. The zero value is empty.
type Batch struct {
	// More reports that the last receive call stopped at its limit, so the socket may have more
	// datagrams.
	More bool
	// Lost is the number of dropped datagrams that the kernel has reported since Reset. It drops
	// datagrams while the socket is full. Datagrams that it had joined count as one.
	Lost uint64

	slab     []byte // nil before the first use
	used     int    // octets of slab in use
	kept     int    // end of the last kept message in slab
	taken    int    // start of the last message that Next returned
	received []received
	next     int // index in received of the first element with messages that Next has not returned
}

// received is the result of one recvmsg(2): one datagram, or several that the kernel joined.
type received struct {
	from       conn.Endpoint
	start, end int // the octets of slab that Next has not returned
	segment    int // length of each message except the last; 0 for a single message
}

// Space returns the memory for the next datagram: MaxDatagram octets, or nil if the batch is
// full.
func (b *Batch) Space() []byte {
	if b.slab == nil {
		b.slab = make([]byte, slabLen)
	}
	if b.used+MaxDatagram > len(b.slab) {
		return nil
	}
	return b.slab[b.used : b.used+MaxDatagram]
}

// Received adds the datagram in the first n octets of Space to the batch. If segment > 0, the
// octets are several datagrams of segment octets each, of which the last may be shorter. An empty
// datagram uses space too, so that a batch cannot hold an unlimited number of them.
func (b *Batch) Received(n, segment int, from conn.Endpoint) {
	end := b.used + n
	b.received = append(b.received, received{from, b.used, end, segment})
	b.used = aligned(end)
	if n == 0 {
		b.used += slabAlign
	}
}

func aligned(n int) int { return (n + slabAlign - 1) &^ (slabAlign - 1) }

// Empty reports whether Next has returned all messages.
func (b *Batch) Empty() bool { return b.next == len(b.received) }

// Next returns the next message and its sender, or nil if none is left.
func (b *Batch) Next() ([]byte, conn.Endpoint) {
	if b.next == len(b.received) {
		return nil, nil
	}
	r := &b.received[b.next]
	end := r.end
	if r.segment > 0 {
		end = min(end, r.start+r.segment)
	}
	m, from := b.slab[r.start:end:end], r.from
	b.taken = r.start
	if r.start = end; end == r.end {
		b.next++
	}
	return m, from
}

// Keep preserves m, the message that Next returned last, until Reset. It moves the message into the
// space of earlier messages that were not kept, and returns the moved message.
func (b *Batch) Keep(m []byte) []byte {
	start := b.taken
	if to := aligned(b.kept); to+slabAlign <= start {
		copy(b.slab[to:], m)
		m, start = b.slab[to:to+len(m):to+len(m)], to
	}
	b.kept = start + len(m)
	return m
}

// Pack reclaims the memory of messages that were not kept. Next must have returned all messages.
func (b *Batch) Pack() {
	b.received, b.used, b.next = b.received[:0], aligned(b.kept), 0
}

// Reset empties the batch and reclaims its memory.
func (b *Batch) Reset() {
	b.More, b.Lost = false, 0
	b.received, b.used, b.kept, b.next = b.received[:0], 0, 0, 0
}
