package flowsync

import (
	"bufio"
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

const (
	// queueMost is the maximum number of changes that wait for one connection. If a connection is
	// too slow, all flows are sent again.
	queueMost = 1 << 16
	// gather is the time during which changes are collected before they are sent.
	gather = 5 * time.Millisecond
	// writeTimeout is the maximum duration of one write.
	writeTimeout = 5 * time.Second
)

// A queue holds the data to send on one connection. Adding to it never blocks, so the engine does
// not wait for the connection.
type queue struct {
	mu   sync.Mutex
	all  []record
	lost bool
	wake chan struct{}

	parcels []parcel // packets to relay, sent after the changes in all
	octets  int      // total length of parcels
}

func (q *queue) add(peer string, f natengine.Flow, ended bool) {
	q.mu.Lock()
	if len(q.all) < queueMost {
		q.all = append(q.all, record{peer, f, ended})
	} else {
		q.lost = true
	}
	q.mu.Unlock()
	q.wakeUp()
}

func (q *queue) wakeUp() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// take removes and returns the waiting changes, and the packets to send after them. spare is the
// slice of an earlier call, which take reuses.
func (q *queue) take(spare []record) (all []record, parcels []parcel, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.lost {
		return nil, nil, errLost
	}
	all, q.all = q.all, spare[:0]
	parcels, q.parcels, q.octets = q.parcels, nil, 0
	return all, parcels, nil
}

// errLost means that changes were lost, so that all flows have to be sent again.
var errLost = errors.New("changes were lost")

// send sends all flows to the other end of conn. While this gateway is the active one, it then
// sends each change, until ctx or the connection ends.
func (k *Keeper) send(ctx context.Context, conn net.Conn) error {
	w := writer{bufio.NewWriterSize(conn, 64<<10)}
	for {
		k.mu.Lock()
		running, changes := k.running, k.changes
		k.mu.Unlock()
		if running == nil {
			return k.sendCopy(conn, w)
		}
		if err := k.sendRunning(ctx, conn, w, running, changes); !errors.Is(err, errLost) {
			return err
		}
		// Pause, so that a flood of flows does not make this loop send one list after the other.
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(retryPause):
		}
	}
}

// sendCopy sends the list of all flows in this standby's copy to the gateway that requested it.
func (k *Keeper) sendCopy(conn net.Conn, w writer) error {
	k.mu.Lock()
	k.expire(time.Now())
	age := time.Since(k.heard)
	all := make([]record, 0, k.copy.n)
	for peer, flows := range k.copy.flows {
		for id, state := range flows {
			all = append(all, record{peer: peer, flow: id.In(state)})
		}
	}
	k.mu.Unlock()
	w.begin(false, age)
	for chunk := range slices.Chunk(all, 1024) {
		w.records(chunk)
		if err := flush(conn, w); err != nil {
			return err
		}
	}
	w.frame(frameEnd)
	return flush(conn, w)
}

func flush(conn net.Conn, w writer) error {
	if err := conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	return w.w.Flush()
}

// sendRunning sends the flows of the running gateway and then all changes, until this gateway is
// no longer the active one. It returns errLost if all flows have to be sent again.
func (k *Keeper) sendRunning(ctx context.Context, conn net.Conn, w writer, running Flows, changes int) error {
	q := &queue{wake: make(chan struct{}, 1)}
	defer running.Follow(q.add)()
	defer k.follow(q)()
	unsent := 0 // packets that are counted as Unsent on return, because they were not flushed
	defer func() {
		k.mu.Lock()
		k.counts.Unsent += uint64(unsent)
		k.mu.Unlock()
	}()
	push := func() error {
		err := flush(conn, w)
		if err == nil {
			unsent = 0
		}
		return err
	}
	var spare []record
	pass := func() error {
		all, parcels, err := q.take(spare)
		if err != nil {
			return err
		}
		w.records(all)
		spare = all
		for _, one := range parcels {
			w.parcel(one)
		}
		unsent += len(parcels)
		return nil
	}
	w.begin(true, 0)
	var err error
	running.EachFlow(func(peer string, f natengine.Flow) { q.add(peer, f, false) }, func() bool {
		if err = pass(); err == nil {
			err = errors.Join(push(), ctx.Err())
		}
		return err == nil
	})
	if err != nil {
		return err
	}
	if err := pass(); err != nil {
		return err
	}
	w.frame(frameEnd)
	beat := time.NewTicker(beatInterval)
	defer beat.Stop()
	for {
		if err := push(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-q.wake:
			if !q.hurries() {
				time.Sleep(gather)
			}
			if err := pass(); err != nil {
				return err
			}
		case <-beat.C:
			k.mu.Lock()
			over := k.changes != changes
			k.mu.Unlock()
			if over {
				return nil
			}
			w.frame(frameBeat)
		}
	}
}
