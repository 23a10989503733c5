package datapath

import (
	"golang.zx2c4.com/wireguard/conn"

	"github.com/isthmus-net/isthmus/gateway/bind"
)

// Decrypting, translating and writing a message takes several times as long as receiving it.
// Under overload messages therefore wait in a backlog and not in the socket, where all peers
// share one queue. In the backlog each peer has its own queue, and the queues are served by
// deficit round robin. So a peer that sends too much fills only its own queue.

const (
	// messageCost is the fixed cost of a message, in octets. With this value, the costs of small
	// and full-size messages are about proportional to their processing times.
	messageCost = 1000

	// quantum is the cost that one peer may use per turn. unknownQuantum is the cost per turn of
	// all messages that cannot be attributed to a peer. It is small because such messages may be
	// junk. It is not zero because they may also come from a peer with a new address.
	quantum        = 64 << 10
	unknownQuantum = quantum / 4

	// backlogLimit is the limit of the total cost of waiting messages, and thereby of their delay:
	// about 8,000 small or 3,400 full-size messages. Each queue gets an equal share of
	// backlogLimit, but at least leastQueue, so that the first flight of a TCP connection fits.
	backlogLimit = 8 << 20
	leastQueue   = 128 << 10
	unknownLimit = 256 << 10

	// maxSlabs limits the memory of waiting messages to 14 MiB. While all of it is in use, further
	// messages stay in the socket. Refused messages use no memory, so the limit of a peer's queue
	// also limits the memory that the peer can use. keptSlabs slabs are never released; they are
	// enough for a burst of one connection.
	maxSlabs  = 24
	keptSlabs = 4

	// drainCalls is the maximum number of times that the socket is read before messages are
	// decrypted. One call returns up to 384 messages, so even a socket buffer full of small
	// messages is drained. With fewer calls, messages would stay in the socket, in one queue for
	// all peers, whenever the process had not been scheduled for a while.
	drainCalls = 32

	// At most workMessages messages, or messages with a total cost of workCost, are decrypted before
	// the socket is drained again.
	workMessages = 384
	workCost     = 1 << 20
)

// A slab is a piece of memory for received messages. It is kept while any of its messages waits.
type slab struct {
	bind.Batch
	waiting int
}

// waitingMessage is a data message in the queue of a peer.
type waitingMessage struct {
	b    []byte
	from conn.Endpoint
	in   *slab
}

func (w *waitingMessage) cost() int { return messageCost + len(w.b) }

// A queue holds the waiting messages of one peer, in order of arrival.
type queue struct {
	peer     *peer            // nil: messages that cannot be attributed to a peer
	messages []waitingMessage // messages from index first on are waiting
	first    int
	cost     int    // total cost of the waiting messages
	deficit  int    // cost that may still be used in this turn
	next     *queue // in the order of turns; nil for the last queue
}

// A backlog holds the queues of waiting messages. Only one goroutine uses it. The zero value is
// empty.
type backlog struct {
	queues      map[*peer]*queue // the queues that are not empty
	first, last *queue           // the same queues, in the order of their turns
	spare       []*queue         // empty queues, for reuse
}

func (b *backlog) empty() bool { return b.first == nil }

// push adds a message to the queue of p. A nil p stands for messages without a peer, which share a
// queue. The message must be the last one in its slab. push returns false if there is no room.
func (b *backlog) push(p *peer, w waitingMessage) bool {
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

// limit returns the maximum cost of the queue of p. A nil p stands for messages without a peer.
func (b *backlog) limit(p *peer) int {
	if p == nil {
		return unknownLimit
	}
	return max(leastQueue, backlogLimit/len(b.queues))
}

// begin adds an empty queue for a peer, after all other queues in the order of turns.
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
	q.refill()
	b.queues[p] = q
	b.append(q)
	return q
}

func (q *queue) refill() {
	if q.peer == nil {
		q.deficit += unknownQuantum
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

// pop removes and returns the next message in turn. The backlog must not be empty.
func (b *backlog) pop() waitingMessage {
	for b.first.deficit <= 0 {
		q := b.first
		b.first = q.next
		q.refill()
		b.append(q)
	}
	q := b.first
	w := q.messages[q.first]
	q.messages[q.first] = waitingMessage{}
	q.first++
	q.cost -= w.cost()
	q.deficit -= w.cost()
	if q.first == len(q.messages) {
		b.first = q.next
		delete(b.queues, q.peer)
		*q = queue{messages: q.messages[:0]}
		b.spare = append(b.spare, q)
		// On average, this moves at most one message for each message taken.
	} else if q.first >= 1024 && q.first > len(q.messages)/2 {
		n := copy(q.messages, q.messages[q.first:])
		clear(q.messages[n:])
		q.messages, q.first = q.messages[:n], 0
	}
	return w
}

// trim releases memory that was needed during a flood.
func (b *backlog) trim() {
	if len(b.spare) > 1 {
		clear(b.spare[1:])
		b.spare = b.spare[:1]
	}
}
