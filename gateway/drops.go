package gateway

import (
	"maps"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// dropTimes records when each drop counter last increased, accurate to a second. It polls the
// counters once a second, so that a drop on the packet path costs nothing more. Methods may be
// called concurrently.
type dropTimes struct {
	mu   sync.Mutex
	seen map[dropKey]dropSeen
}

// dropKey identifies one drop counter. peer is nil for packets that belong to no peer.
type dropKey struct {
	peer      *natengine.PeerState
	direction natengine.Direction
	reason    natengine.Drop
}

type dropSeen struct {
	count uint64
	at    time.Time // when poll last saw the counter increase
}

// poll reads all drop counters; it takes no lock of the engine. It stores no entry for a counter
// that is 0, and deletes the entries of removed peers.
func (d *dropTimes) poll(e *natengine.Engine, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.seen == nil {
		d.seen = make(map[dropKey]dropSeen)
	}
	note := func(k dropKey, count uint64) {
		if count == 0 {
			return
		}
		if was := d.seen[k]; was.count != count {
			d.seen[k] = dropSeen{count, now}
		}
	}
	peers := e.Peers()
	for _, direction := range directions {
		for _, reason := range natengine.Drops() {
			note(dropKey{nil, direction, reason}, e.NoPeerDrops(direction, reason))
			for _, p := range peers {
				note(dropKey{p, direction, reason}, p.Drops(direction, reason))
			}
		}
	}
	if len(d.seen) > 0 {
		known := map[*natengine.PeerState]bool{nil: true}
		for _, p := range peers {
			known[p] = true
		}
		maps.DeleteFunc(d.seen, func(k dropKey, _ dropSeen) bool { return !known[k.peer] })
	}
}

// lastIncrease returns the time when poll last saw the counter increase, or zero if it never did.
func (d *dropTimes) lastIncrease(peer *natengine.PeerState, direction natengine.Direction, reason natengine.Drop) time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.seen[dropKey{peer, direction, reason}].at
}

// increaseTime returns the time of the counter's last increase. count is its present value. If the
// counter has increased since the last poll, the result is now.
func (d *dropTimes) increaseTime(peer *natengine.PeerState, direction natengine.Direction, reason natengine.Drop, count uint64, now time.Time) time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	if seen := d.seen[dropKey{peer, direction, reason}]; seen.count == count {
		return seen.at
	}
	return now
}
