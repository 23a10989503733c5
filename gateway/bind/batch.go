package bind

import "golang.zx2c4.com/wireguard/conn"

// Batch is what one call has received: datagrams, each where it was received, some of them several
// of one size that the kernel has put together. They are the caller's, to read and to change, until
// the next call with the same Batch. Not for concurrent use.
type Batch struct {
	received []received
	at       int // the first that is not yet taken as a whole
}

// received is what one recvmsg(2) gave.
type received struct {
	rest    []byte
	segment int // length of each message but the last; 0: there is one only
	from    conn.Endpoint
}

// Add appends a datagram, or several put together, each of them segment octets long but for the
// last. segment 0 is one datagram.
func (b *Batch) Add(data []byte, segment int, from conn.Endpoint) {
	if b.at == len(b.received) {
		b.received, b.at = b.received[:0], 0
	}
	b.received = append(b.received, received{data, segment, from})
}

// Empty reports whether all of it was taken.
func (b *Batch) Empty() bool { return b.at == len(b.received) }

// Next takes the next message and says where it came from. It is nil when there is none left.
func (b *Batch) Next() ([]byte, conn.Endpoint) {
	if b.at == len(b.received) {
		return nil, nil
	}
	r := &b.received[b.at]
	size := len(r.rest)
	if r.segment > 0 {
		size = min(size, r.segment)
	}
	m, from := r.rest[:size:size], r.from
	if r.rest = r.rest[size:]; len(r.rest) == 0 {
		b.at++
	}
	return m, from
}
