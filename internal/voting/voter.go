package voting

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/isthmus-net/isthmus/internal/crowd"
	"github.com/isthmus-net/isthmus/internal/mandate"
	"github.com/isthmus-net/isthmus/internal/statefile"
)

const (
	promiseName  = "vote.json"
	promiseLimit = 1 << 10 // in octets

	listenAgain = time.Second // delay after an error of the socket

	crowdInterval = 250 * time.Millisecond // interval of the calls of Crowd.Open

	// knownRate is the maximum number of signatures per second that a voter checks for asks that
	// name its incarnation. Only receivers of its answers have the incarnation. The same limit
	// applies separately to other asks from the addresses of gateways. strangeRate is the limit for
	// all remaining asks. A gateway sends seven asks per second.
	knownRate   = 500
	strangeRate = 50
)

// A Holder is a gateway that has reported to the voter that it has a mandate.
type Holder struct {
	Epoch uint64
	Pod   string
	Addr  netip.Addr // address of the Pod
}

// A Voter is the vote of one node. Run may be called only once. The other methods may be called
// concurrently with Run.
type Voter struct {
	Node      string
	Directory string                                   // directory of the stored promise
	Listen    func(netip.Addr) (net.PacketConn, error) // opens the socket; nil: on UDP port Port
	Log       *slog.Logger

	refused, unread atomic.Uint64 // see Refused

	mu            sync.Mutex
	place         place
	changed       chan struct{} // closed when the address changes or a key is set; nil: Run does not wait
	holder        Holder
	follow        func()              // see OnHolder
	expectedAddrs map[netip.Addr]bool // see Expect
	err           error

	// Only Run uses the fields below.
	machine                  *mandate.Voter
	stored                   record
	last                     netip.AddrPort // address of the holder that last got the vote
	lastAsk                  cookie
	waits                    waitingGateway
	known, expected, strange *rate.Limiter
}

// A place has the two values that a voter needs before it can vote.
type place struct {
	Addr netip.Addr        `json:"addr"` // address of the node; zero: not known yet
	Key  ed25519.PublicKey `json:"key"`  // public key of the gateways; nil: nodes do not vote, or the key is not known yet
}

// waitingGateway is a gateway to notify as soon as the vote becomes free.
type waitingGateway struct {
	ask ask
	at  net.Addr
}

// A record is the stored state of a voter. It includes the address and the key, because a voter may
// start while the API server is unreachable.
type record struct {
	Place   place           `json:"place"`
	Promise mandate.Promise `json:"promise"`
}

// OnHolder sets a function to call when the result of Holder changes. The function must not
// call the voter.
func (v *Voter) OnHolder(f func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.follow = f
}

// Expect sets the addresses of gateways. A flood from other addresses then cannot displace the asks
// of these gateways.
func (v *Voter) Expect(gateways map[netip.Addr]bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.expectedAddrs = gateways
}

// Set sets the public key with which asks must be signed. If the key is nil, the voter accepts no
// ask.
func (v *Voter) Set(key ed25519.PublicKey) { v.put(func(p *place) { p.Key = key }) }

// At sets the address of the node, at which the voter listens.
func (v *Voter) At(addr netip.Addr) { v.put(func(p *place) { p.Addr = addr }) }

func (v *Voter) put(set func(*place)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	before := v.place
	if set(&v.place); v.place.Addr == before.Addr && (v.place.Key == nil) == (before.Key == nil) || v.changed == nil {
		return
	}
	close(v.changed)
	v.changed = nil
}

// Holder returns the gateway with the highest epoch of those that have reported a mandate, or zero
// if there is none.
func (v *Voter) Holder() Holder {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.holder
}

// Err returns the reason why the node cannot vote, or nil. It also returns nil while no key is
// set, because nodes then do not vote.
func (v *Voter) Err() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.place.Key == nil {
		return nil
	}
	return v.err
}

func (v *Voter) fail(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err != nil && (v.err == nil || v.err.Error() != err.Error()) {
		v.Log.Warn("this node cannot vote on the active gateway", "error", err)
	}
	v.err = err
}

// Run votes until ctx ends. The promise stays stored for the next voter on the node.
func (v *Voter) Run(ctx context.Context) {
	for {
		v.mu.Lock()
		current, changed := v.place, make(chan struct{})
		v.changed = changed
		v.mu.Unlock()
		var again <-chan time.Time
		err := v.start()
		if err == nil && current.Addr.IsValid() && current.Key != nil {
			err = v.vote(ctx, current.Addr, changed)
		}
		if err != nil {
			v.fail(err)
			again = time.After(listenAgain)
		}
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-changed:
		}
	}
}

// vote answers at an address until the address changes or ctx ends.
func (v *Voter) vote(ctx context.Context, addr netip.Addr, changed <-chan struct{}) error {
	listen := v.Listen
	if listen == nil {
		listen = func(addr netip.Addr) (net.PacketConn, error) {
			return net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, Port)))
		}
	}
	conn, err := listen(addr)
	if err != nil {
		return err
	}
	ended := make(chan struct{})
	var failed error // error of read
	strangers := crowd.Of(conn)
	go func() {
		defer close(ended)
		failed = v.read(conn, strangers)
	}()
	tick := time.NewTicker(crowdInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			v.unread.Add(uint64(strangers.Open()))
		case <-ctx.Done():
			err := conn.SetReadDeadline(time.Unix(1, 0)) // unblocks read without closing the socket, which teardown still needs
			<-ended
			v.teardown(conn)
			return errors.Join(err, conn.Close())
		case <-changed:
			err := conn.Close()
			<-ended
			return err
		case <-ended:
			return errors.Join(failed, conn.Close())
		}
	}
}

// Refused returns the number of datagrams that were read and refused, and the number that the
// kernel dropped because too many arrived.
func (v *Voter) Refused() (read, unread uint64) { return v.refused.Load(), v.unread.Load() }

// gateways returns the addresses whose datagrams a flood must not displace: those set by
// Expect, and the holder's.
func (v *Voter) gateways() map[netip.Addr]bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	all := maps.Clone(v.expectedAddrs)
	if all == nil {
		all = make(map[netip.Addr]bool, 1)
	}
	if v.last.IsValid() {
		all[v.last.Addr().Unmap()] = true
	}
	return all
}

// start reads the state that the previous voter has stored, unless it was read before.
func (v *Voter) start() error {
	if v.machine != nil {
		return nil
	}
	var stored *mandate.Promise
	switch err := statefile.Read(v.Directory, promiseName, promiseLimit, &v.stored); {
	case err == nil:
		stored = &v.stored.Promise
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("promise: %w", err)
	}
	v.known, v.expected, v.strange = rate.NewLimiter(knownRate, knownRate), rate.NewLimiter(knownRate, knownRate), rate.NewLimiter(strangeRate, strangeRate)
	v.machine = mandate.NewVoter(mandate.ID(v.Node), mandate.Usual, random(), stored, now())
	v.put(func(p *place) {
		if !p.Addr.IsValid() {
			p.Addr = v.stored.Place.Addr
		}
		if p.Key == nil {
			p.Key = v.stored.Place.Key
		}
	})
	return nil
}

// store writes a promise to the file, together with the place.
func (v *Voter) store(p mandate.Promise) error {
	v.mu.Lock()
	r := record{v.place, p}
	v.mu.Unlock()
	if r.Promise == v.stored.Promise && r.Place.Addr == v.stored.Place.Addr && r.Place.Key.Equal(v.stored.Place.Key) {
		return nil
	}
	if err := statefile.Write(v.Directory, promiseName, promiseLimit, r); err != nil {
		return fmt.Errorf("promise: %w", err)
	}
	v.stored = r
	return nil
}

// read answers datagrams until the socket fails.
func (v *Voter) read(conn net.PacketConn, strangers *crowd.Crowd) error {
	buf := make([]byte, askLimit+1) // a longer datagram is truncated to a length that is refused
	logged := false
	for failures := 0; ; {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			// ReadFrom may return ICMP errors of earlier answers, which do not affect other
			// messages.
			if failures++; failures > 100 || errors.Is(err, net.ErrClosed) || errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
				return err
			}
			continue
		}
		failures = 0
		if v.receive(buf[:n], from, func(b []byte, to net.Addr) { _, _ = conn.WriteTo(b, to) }) { // an answer that cannot be sent counts as lost
			continue
		}
		v.refused.Add(1)
		if err := strangers.Refuse(v.gateways); err != nil && !logged {
			logged = true
			v.Log.Warn("cannot install the kernel filter against unknown senders", "error", err)
		}
	}
}

func isTimeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

// receive answers a datagram, and returns false if it refuses the datagram. If the datagram
// releases the vote, receive also notifies a waiting gateway at once.
func (v *Voter) receive(b []byte, from net.Addr, send func([]byte, net.Addr)) bool {
	a, ok := openAsk(b)
	if !ok {
		return false
	}
	u, _ := from.(*net.UDPAddr)
	v.mu.Lock()
	key, follow := v.place.Key, v.follow
	budget := v.strange
	if u != nil && v.expectedAddrs[u.AddrPort().Addr().Unmap()] {
		budget = v.expected
	}
	v.mu.Unlock()
	known := v.machine.Knows(a.Ask)
	if known {
		budget = v.known
	}
	if !budget.Allow() || !signed(b, key) {
		return false
	}
	reply := v.machine.Receive(a.Ask, now())
	stored := v.stored.Promise
	if stored.Ended = false; reply.Granted || reply.Promise != stored { // the promise also differs if an earlier store has failed
		if err := v.store(v.machine.Stored()); err != nil {
			v.fail(err)
			return true
		}
	}
	if reply.Granted && u != nil {
		v.last, v.lastAsk = u.AddrPort(), a.cookie
	}
	v.fail(nil)
	v.mu.Lock()
	newer := a.Holds && a.Epoch > v.holder.Epoch
	if newer {
		v.holder = Holder{a.Epoch, string(a.From), a.addr}
	}
	v.mu.Unlock()
	if newer && follow != nil {
		follow()
	}
	send(answer{reply, a.cookie}.datagram(), from)
	switch {
	case a.Kind == mandate.Probe && known && !a.Holds:
		v.waits = waitingGateway{a, from}
	case a.Kind == mandate.Release && v.waits.at != nil && v.waits.ask.From != a.From:
		send(answer{v.machine.Receive(v.waits.ask.Ask, now()), v.waits.ask.cookie}.datagram(), v.waits.at)
		v.waits = waitingGateway{}
	}
	return true
}

// teardown stores, for the next voter on this node, that the holder still counts the vote, and
// notifies the holder.
func (v *Voter) teardown(conn net.PacketConn) {
	promise, last, ok := v.machine.End(now())
	if !ok || !v.last.IsValid() {
		return
	}
	if err := v.store(promise); err != nil {
		v.fail(err)
		return
	}
	_, _ = conn.WriteTo(answer{last, v.lastAsk}.datagram(), net.UDPAddrFromAddrPort(v.last))
}

// now reads the clock of a voter, which also advances while the machine sleeps.
func now() mandate.Time {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic(err) // impossible since Linux 2.6.39
	}
	return time.Duration(t.Nano())
}

func random() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never returns an error: a failure ends the program
	return max(1, binary.BigEndian.Uint64(b[:]))
}

// RemovePromise removes the stored promise from a directory.
func RemovePromise(directory string) error { return statefile.Remove(directory, promiseName) }
