package gateway

import (
	"maps"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// dropTimes knows when packets were last dropped, to a second, by looking at the counters once a
// second: a drop itself costs no more. Methods may be called concurrently.
type dropTimes struct {
	mu   sync.Mutex
	seen map[dropKey]dropSeen
}

// dropKey is one counter; a nil peer stands for packets of none.
type dropKey struct {
	peer      *natengine.PeerState
	direction natengine.Direction
	reason    natengine.Drop
}

type dropSeen struct {
	count uint64
	at    time.Time // when it was last seen to grow
}

// look takes notice of the counters, without a lock of the engine's. Those that are 0 take no room,
// and those of peers that are gone are forgotten.
func (d *dropTimes) look(e *natengine.Engine, now time.Time) {
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

// last is when a counter was last seen to grow; zero: it has not been.
func (d *dropTimes) last(peer *natengine.PeerState, direction natengine.Direction, reason natengine.Drop) time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.seen[dropKey{peer, direction, reason}].at
}

// lastOf is when a counter last grew that has this count now: one that grew since somebody looked at
// it did so just now.
func (d *dropTimes) lastOf(peer *natengine.PeerState, direction natengine.Direction, reason natengine.Drop, count uint64, now time.Time) time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	if seen := d.seen[dropKey{peer, direction, reason}]; seen.count == count {
		return seen.at
	}
	return now
}
