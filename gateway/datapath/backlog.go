package datapath

import (
	"golang.zx2c4.com/wireguard/conn"

	"github.com/isthmus-net/isthmus/gateway/bind"
)

// Opening, translating and writing a message takes several times as long as receiving it. So when
// more comes than can be opened, messages wait here and not in the socket, where all peers share one
// queue: each peer has a queue of its own, and queues take turns by deficit round robin. A peer that
// sends too much fills its own queue, and waits for itself.

const (
	// messageCost is what a message costs besides its octets, in octets: about what the smallest one
	// takes, compared with a full one.
	messageCost = 1000

	// quantum is the cost of the messages of one peer that go in one turn. Messages of nobody have a
	// smaller one, so that junk from anywhere takes a fifth of the time of a peer at most, while what
	// comes from a peer that has moved still gets through.
	quantum       = 64 << 10
	nobodyQuantum = quantum / 4

	// backlogLimit is the cost of the messages that may wait in all, and thus bounds for how long:
	// some 8,000 small ones, or 3,400 full ones. Each queue gets an equal share of it, and at least
	// leastQueue, so that the first flight of a connection fits.
	backlogLimit = 8 << 20
	leastQueue   = 128 << 10
	nobodyLimit  = 256 << 10

	// maxSlabs bounds the memory of messages that wait: 14 MiB. While all of it is in use the socket
	// has to keep what comes. What a burst of one connection needs is kept for the next one.
	maxSlabs  = 24
	keptSlabs = 4

	// drainCalls is how often the socket is asked for more before something is opened: a call gives up
	// to 384 messages, so that a full buffer of small ones is drained at once. Fewer would leave the
	// messages of all peers in one queue there whenever the process did not run for a while.
	drainCalls = 32

	// workMessages, or messages of cost workCost, are opened before the socket is drained again.
	workMessages = 384
	workCost     = 1 << 20
)

// slab is memory of messages, some of which wait.
type slab struct {
	bind.Batch
	waiting int
}

// waiting is a data message that waits.
type waiting struct {
	b    []byte
	from conn.Endpoint
	in   *slab
}

func (w *waiting) cost() int { return messageCost + len(w.b) }

// queue is what waits of one peer, in the order in which it came.
type queue struct {
	peer     *peer     // nil: of nobody
	messages []waiting // from first on
	first    int
	cost     int    // of these
	deficit  int    // that may still go in this turn
	next     *queue // whose turn is the next; the last one's is nil
}

// backlog is the queues of the messages that wait. One goroutine uses it. The zero value is empty.
type backlog struct {
	queues      map[*peer]*queue // those that have messages
	first, last *queue           // in the order of their turns
	spare       []*queue         // empty ones, to use again
}

func (b *backlog) empty() bool { return b.first == nil }

// push has a message of a peer, or of nobody, wait. It reports false when there is no room.
func (b *backlog) push(p *peer, w waiting) bool {
	q := b.queues[p]
	if q == nil {
		q = b.begin(p)
	} else if q.cost+w.cost() > b.limit(p) {
		return false
	}
	q.messages = append(q.messages, w)
	q.cost += w.cost()
	w.in.waiting++
	return true
}

// limit is what may wait of a peer, or of nobody.
func (b *backlog) limit(p *peer) int {
	if p == nil {
		return nobodyLimit
	}
	return max(leastQueue, backlogLimit/len(b.queues))
}

// begin makes a queue, whose turn comes after all others.
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

// pop takes the message whose turn it is. The backlog must not be empty.
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
	} else if q.first >= 1024 && q.first > len(q.messages)/2 { // as many are moved as have gone
		n := copy(q.messages, q.messages[q.first:])
		clear(q.messages[n:])
		q.messages, q.first = q.messages[:n], 0
	}
	return w
}

// trim gives memory back that a flood has needed.
func (b *backlog) trim() {
	if len(b.spare) > 1 {
		clear(b.spare[1:])
		b.spare = b.spare[:1]
	}
}
