package bind

import "golang.zx2c4.com/wireguard/conn"

const (
	// MaxDatagram is the room reserved for one datagram: more than any UDP payload.
	MaxDatagram = 65535

	slabLen   = 512<<10 + MaxDatagram
	slabAlign = 64 // slabs hold datagrams at multiples of a cache line
)

// A Batch holds received datagrams, one behind the other in its own memory. The kernel may have
// joined several datagrams of one size. The caller may read and change the octets until Reset. Not
// for concurrent use. The zero value is empty.
type Batch struct {
	// More: the last call stopped at its limit. The socket may have more datagrams.
	More bool
	// Lost counts the datagrams that the kernel dropped because the socket was full, as reported since
	// Reset. The kernel counts datagrams that it joined as one.
	Lost uint64

	slab     []byte // nil before the first use
	used     int    // octets of slab
	kept     int    // octets of slab up to the end of the last kept message
	taken    int    // start of the last message that Next returned
	received []received
	at       int // first datagram with messages that Next has not returned
}

// received is a datagram of one recvmsg(2), or several that the kernel joined.
type received struct {
	from    conn.Endpoint
	at, end int // the part of slab that Next has not returned
	segment int // length of each message except the last; 0: a single message
}

// Space returns the memory for the next datagram: MaxDatagram octets, or nil when the batch is full.
func (b *Batch) Space() []byte {
	if b.slab == nil {
		b.slab = make([]byte, slabLen)
	}
	if b.used+MaxDatagram > len(b.slab) {
		return nil
	}
	return b.slab[b.used : b.used+MaxDatagram]
}

// Received appends the datagram in the first n octets of Space. With segment > 0 these are several
// datagrams of segment octets, the last of which may be shorter. An empty datagram takes room too, so that
// a batch of them is bounded.
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
func (b *Batch) Empty() bool { return b.at == len(b.received) }

// Next returns the next message and its sender, or nil if none is left.
func (b *Batch) Next() ([]byte, conn.Endpoint) {
	if b.at == len(b.received) {
		return nil, nil
	}
	r := &b.received[b.at]
	end := r.end
	if r.segment > 0 {
		end = min(end, r.at+r.segment)
	}
	m, from := b.slab[r.at:end:end], r.from
	b.taken = r.at
	if r.at = end; end == r.end {
		b.at++
	}
	return m, from
}

// Keep keeps the last message of Next until Reset. It moves the message into the room of earlier
// messages that were not kept, and returns it there.
func (b *Batch) Keep(m []byte) []byte {
	at := b.taken
	if to := aligned(b.kept); to+slabAlign <= at {
		copy(b.slab[to:], m)
		m, at = b.slab[to:to+len(m):to+len(m)], to
	}
	b.kept = at + len(m)
	return m
}

// Pack reclaims the memory of messages that were not kept. Next must have returned all messages.
func (b *Batch) Pack() {
	b.received, b.used, b.at = b.received[:0], aligned(b.kept), 0
}

// Reset empties the batch and reclaims its memory.
func (b *Batch) Reset() {
	b.More, b.Lost = false, 0
	b.received, b.used, b.kept, b.at = b.received[:0], 0, 0, 0
}
