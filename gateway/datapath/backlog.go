package datapath

import (
	"golang.zx2c4.com/wireguard/conn"

	"github.com/isthmus-net/isthmus/gateway/bind"
)

// Decrypting, translating and writing a message takes several times as long as receiving it. Under
// overload, messages therefore wait here and not in the socket, where all peers share one queue. Here each
// peer has a queue, and the queues take turns by deficit round robin. A peer that sends too much fills
// only its own queue.

const (
	// messageCost is the fixed cost of a message, in octets: about the time of the smallest message
	// compared with a full one.
	messageCost = 1000

	// quantum is the cost that one peer may use per turn. Messages without a peer have a smaller quantum:
	// junk gets a fifth of the time of a peer at most, while messages of a peer that has moved still pass.
	quantum       = 64 << 10
	nobodyQuantum = quantum / 4

	// backlogLimit bounds the total cost of waiting messages, and thereby their delay: some 8,000 small or
	// 3,400 full messages. Each queue gets an equal share, and at least leastQueue, so that the first
	// flight of a connection fits.
	backlogLimit = 8 << 20
	leastQueue   = 128 << 10
	nobodyLimit  = 256 << 10

	// maxSlabs bounds the memory of waiting messages to 14 MiB. While all of it is in use, further
	// messages stay in the socket. Refused messages use none of it, so what one peer uses is bounded by its
	// queue. keptSlabs, enough for a burst of one connection, are kept for the next one.
	maxSlabs  = 24
	keptSlabs = 4

	// drainCalls is how often the socket is read before messages are decrypted. A call returns up to 384
	// messages, so a full buffer of small ones is drained at once. With fewer calls, the messages of all
	// peers would stay in one queue whenever the process was not scheduled for a while.
	drainCalls = 32

	// workMessages messages, or messages of cost workCost, are decrypted before the socket is drained
	// again.
	workMessages = 384
	workCost     = 1 << 20
)

// slab is the memory of received messages, some of which wait.
type slab struct {
	bind.Batch
	waiting int
}

// waiting is a data message in a queue.
type waiting struct {
	b    []byte
	from conn.Endpoint
	in   *slab
}

func (w *waiting) cost() int { return messageCost + len(w.b) }

// queue holds the waiting messages of one peer, in order of arrival.
type queue struct {
	peer     *peer     // nil: messages without a peer
	messages []waiting // the waiting ones start at first
	first    int
	cost     int    // of the waiting messages
	deficit  int    // cost that is left in this turn
	next     *queue // in the order of turns; nil for the last
}

// backlog holds the queues of waiting messages. One goroutine uses it. The zero value is empty.
type backlog struct {
	queues      map[*peer]*queue // queues with messages
	first, last *queue           // in the order of their turns
	spare       []*queue         // empty queues for reuse
}

func (b *backlog) empty() bool { return b.first == nil }

// push queues a message of a peer, or of no peer (nil). The message is the last one taken from its
// slab. push reports false when there is no room.
func (b *backlog) push(p *peer, w waiting) bool {
	q := b.queues[p]
	if q == nil {
		q = b.begin(p)
	} else if q.cost+w.cost() > b.limit(p) {
		return false
	}
	w.b = w.in.Keep(w.b)
	q.messages = append(q.messages, w)
	q.cost += w.cost()
	w.in.waiting++
	return true
}

// limit is the greatest cost of the queue of a peer, or of the queue without a peer (nil).
func (b *backlog) limit(p *peer) int {
	if p == nil {
		return nobodyLimit
	}
	return max(leastQueue, backlogLimit/len(b.queues))
}

// begin makes a queue and appends it to the turns.
func (b *backlog) begin(p *peer) *queue {
	if b.queues == nil {
		b.queues = make(map[*peer]*queue)
	}
	var q *queue
	if n := len(b.spare); n > 0 {
		q, b.spare = b.spare[n-1], b.spare[:n-1]
	} else {
		q = new(queue)
	}
	q.peer = p
	q.grant()
	b.queues[p] = q
	b.append(q)
	return q
}

func (q *queue) grant() {
	if q.peer == nil {
		q.deficit += nobodyQuantum
	} else {
		q.deficit += quantum
	}
}

func (b *backlog) append(q *queue) {
	if q.next = nil; b.first == nil {
		b.first = q
	} else {
		b.last.next = q
	}
	b.last = q
}

// pop takes the next message in turn. The backlog must not be empty.
func (b *backlog) pop() waiting {
	for b.first.deficit <= 0 {
		q := b.first
		b.first = q.next
		q.grant()
		b.append(q)
	}
	q := b.first
	w := q.messages[q.first]
	q.messages[q.first] = waiting{}
	q.first++
	q.cost -= w.cost()
	q.deficit -= w.cost()
	if q.first == len(q.messages) {
		b.first = q.next
		delete(b.queues, q.peer)
		*q = queue{messages: q.messages[:0]}
		b.spare = append(b.spare, q)
	} else if q.first >= 1024 && q.first > len(q.messages)/2 { // moves at most as many messages as were taken
		n := copy(q.messages, q.messages[q.first:])
		clear(q.messages[n:])
		q.messages, q.first = q.messages[:n], 0
	}
	return w
}

// trim frees the memory that a flood needed.
func (b *backlog) trim() {
	if len(b.spare) > 1 {
		clear(b.spare[1:])
		b.spare = b.spare[:1]
	}
}
