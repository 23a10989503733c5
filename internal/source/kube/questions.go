package kube

import (
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync/atomic"
	"time"
)

// QuestionPort is the UDP port at which gateways ask each other whether they are active.
const QuestionPort = 5870

// A question or an answer is one datagram of questionLength octets:
//
//	 0  magic    4
//	 4  kind     1  question, answer
//	 5  flags    1  flagHolds, flagConfirmed
//	 6  zero     2
//	 8  transition  4  of the Lease
//	12  defers   4  milliseconds after the question
//	16  nonce   16  of the question
//	32  from    16  identity of the sender
//	48  to      16  identity of the receiver
//	64  tag     32  HMAC-SHA256 of all before
//
// A gateway accepts an answer only to its own nonce, so messages cannot be replayed. A question contains
// only sender and receiver. Question and answer have the same length, and only a question with a valid tag
// is answered, so the port cannot be used for amplification.
const (
	questionLength = 96
	signedLength   = questionLength - sha256.Size
)

var questionMagic = [4]byte{'I', 'G', 'Q', 1}

const (
	kindQuestion = 1
	kindAnswer   = 2

	flagHolds     = 1 << 0
	flagConfirmed = 1 << 1
)

type (
	nonce     [16]byte
	gatewayID [16]byte // a hash of the name of its Pod
)

func idOf(pod string) gatewayID {
	sum := sha256.Sum256([]byte(pod))
	return gatewayID(sum[:16])
}

// message is a question or an answer.
type message struct {
	kind     byte
	claim    claim         // of an answer
	defers   time.Duration // of an answer
	nonce    nonce
	from, to gatewayID
}

// questionKey derives the key that authenticates messages between the gateways of one installation.
// private is the WireGuard private key that they share.
func questionKey(private [32]byte) []byte {
	key, err := hkdf.Key(sha256.New, private[:], nil, "isthmus gateway questions", sha256.Size)
	if err != nil {
		panic(err) // longer than 255 hashes
	}
	return key
}

func (m message) seal(key []byte) []byte {
	b := make([]byte, signedLength, questionLength)
	copy(b, questionMagic[:])
	b[4] = m.kind
	if m.claim.holds {
		b[5] |= flagHolds
	}
	if m.claim.confirmed {
		b[5] |= flagConfirmed
	}
	binary.BigEndian.PutUint32(b[8:], uint32(m.claim.transition))
	binary.BigEndian.PutUint32(b[12:], uint32(max(0, m.defers)/time.Millisecond))
	copy(b[16:], m.nonce[:])
	copy(b[32:], m.from[:])
	copy(b[48:], m.to[:])
	return append(b, tagOf(b, key)...)
}

func tagOf(signed, key []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write(signed)
	return h.Sum(nil)
}

// openMessage reads a sealed message made with the same key; refused is the reason if it is invalid.
func openMessage(b, key []byte) (m message, refused string) {
	if len(b) != questionLength || [4]byte(b) != questionMagic {
		return m, refusedForm
	}
	if !hmac.Equal(b[signedLength:], tagOf(b[:signedLength], key)) {
		return m, refusedTag
	}
	return message{
		kind: b[4],
		claim: claim{holds: b[5]&flagHolds != 0, confirmed: b[5]&flagConfirmed != 0,
			transition: int32(binary.BigEndian.Uint32(b[8:]))},
		defers: min(time.Duration(binary.BigEndian.Uint32(b[12:]))*time.Millisecond, deferFor),
		nonce:  nonce(b[16:]), from: gatewayID(b[32:]), to: gatewayID(b[48:]),
	}, ""
}

// Reasons to refuse a datagram.
const (
	refusedForm     = "malformed"       // of another length or version
	refusedTag      = "unauthenticated" // made without our key
	refusedReceiver = "misdirected"     // for another gateway, or our own
	refusedNonce    = "unasked"         // an answer without a question of ours, or repeated
)

// questioner asks the other gateways and answers their questions. run starts it.
type questioner struct {
	election *election
	private  func() [32]byte // the WireGuard private key; zero: unknown yet
	before   []byte          // key from before the restart, until private is known; nil: none
	listen   func() (net.PacketConn, error)
	refused  func(why string) // counts
	log      *slog.Logger

	key atomic.Pointer[[]byte] // of the last private; nil: not known yet
}

// listenAt opens the port at the address of this gateway's Pod, at which other gateways know it.
func listenAt(addr netip.Addr) (net.PacketConn, error) {
	return net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, QuestionPort)))
}

// listenAgain is the delay before the port is opened again after a failure.
const listenAgain = 5 * time.Second

// run asks every questionInterval until ctx ends. If the port cannot be opened, it neither asks nor
// answers, as if there were no other gateway.
func (q *questioner) run(ctx context.Context) {
	tick := time.NewTicker(questionInterval)
	defer tick.Stop()
	var conn net.PacketConn
	var ended chan struct{} // closed when reading of conn has ended
	defer func() {
		if conn != nil {
			conn.Close()
			<-ended
		}
	}()
	var again time.Time
	logged := false
	if q.before != nil {
		q.key.Store(&q.before)
	}
	var private [32]byte
	for {
		if p := q.private(); p != private {
			private = p
			key := questionKey(p)
			q.key.Store(&key)
		}
		select {
		case <-ended: // the socket is broken
			conn.Close()
			conn, ended, again = nil, nil, time.Now().Add(listenAgain)
		default:
		}
		if now := time.Now(); conn == nil && !now.Before(again) {
			if c, err := q.listen(); err == nil {
				conn, ended, logged = c, make(chan struct{}), false
				go func(ended chan struct{}) {
					defer close(ended)
					q.read(c)
				}(ended)
			} else if again = now.Add(listenAgain); !logged {
				logged = true
				q.log.Warn("cannot ask the other gateways whether they are active; while the API server does not answer, two could be", "error", err)
			}
		}
		if key := q.key.Load(); conn != nil && key != nil {
			for _, o := range q.election.questions(time.Now()) {
				m := message{kind: kindQuestion, nonce: o.nonce, from: q.election.id, to: o.id}
				// An unsent question counts as unanswered.
				_, _ = conn.WriteTo(m.seal(*key), net.UDPAddrFromAddrPort(netip.AddrPortFrom(o.addr, QuestionPort)))
			}
		}
		q.election.judge(time.Now())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// read handles datagrams until the socket is closed.
func (q *questioner) read(conn net.PacketConn) {
	buf := make([]byte, questionLength+1) // a longer datagram is truncated to a length that is refused
	for failures := 0; ; {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			// The kernel also reports ICMP errors for earlier messages here. They concern no other
			// message.
			if failures++; failures > 100 || errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		failures = 0
		key := q.key.Load()
		if key == nil {
			q.refused(refusedTag)
			continue
		}
		m, refused := openMessage(buf[:n], *key)
		if refused == "" && (m.to != q.election.id || m.from == q.election.id) {
			refused = refusedReceiver
		}
		if refused == "" {
			switch m.kind {
			case kindQuestion:
				_, _ = conn.WriteTo(q.election.answer(m, time.Now()).seal(*key), from)
			case kindAnswer:
				if !q.election.heard(m, time.Now()) {
					refused = refusedNonce
				}
			default:
				refused = refusedForm
			}
		}
		if refused != "" {
			q.refused(refused)
		}
	}
}

// other is another gateway, known by its Pod.
type other struct {
	pod      string
	id       gatewayID
	addr     netip.Addr // of its Pod as last read; zero: none yet
	listed   bool       // by the API server, since this process started
	leaving  bool       // its Pod is being deleted, so it no longer takes the Lease
	answered bool       // ever
	last     account    // without age
	asked    time.Time  // when the question of the last answer was sent
	open     map[nonce]time.Time
}

// question is a question to send.
type question struct {
	nonce nonce
	id    gatewayID
	addr  netip.Addr
}

// questions returns the questions to send now.
func (e *election) questions(now time.Time) (all []question) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, o := range e.others {
		for n, at := range o.open {
			if now.Sub(at) >= deferFor { // too old: an answer would not count
				delete(o.open, n)
			}
		}
		if !o.addr.IsValid() {
			continue
		}
		var n nonce
		rand.Read(n[:]) // ends the program on failure
		o.open[n] = now
		all = append(all, question{n, o.id, o.addr})
	}
	return all
}

// answer returns the claim of this gateway, and how long it leaves the Lease to the gateway that asked.
func (e *election) answer(m message, now time.Time) message {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.judgeLocked(now)
	v := e.viewLocked(now)
	a := message{kind: kindAnswer, claim: v.claim, nonce: m.nonce, from: e.id, to: m.from}
	for _, o := range v.others {
		if !e.taking && idOf(o.pod) == m.from && v.defersTo(o) {
			a.defers = deferFor - o.age
		}
	}
	return a
}

// heard records an answer; false: no question of this gateway matches it.
func (e *election) heard(m message, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, o := range e.others {
		asked, open := o.open[m.nonce]
		if !open || o.id != m.from {
			continue
		}
		delete(o.open, m.nonce)
		if asked.Before(o.asked) {
			return true // a later answer came first
		}
		met := !o.answered
		o.answered, o.asked = true, asked
		o.last = account{claim: m.claim, pod: o.pod, defers: m.defers}
		if met && e.met != nil {
			e.met()
		}
		e.judgeLocked(now)
		return true
	}
	return false
}

// see records another gateway as the API server has it.
func (e *election) see(pod string, addr netip.Addr, leaving bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	o := e.otherLocked(pod)
	o.addr, o.listed, o.leaving = addr, true, leaving
}

// unsee records that another gateway is gone.
func (e *election) unsee(pod string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.others, pod)
}

// onlySeen forgets the gateways that are missing from a complete list of the API server.
func (e *election) onlySeen() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for pod, o := range e.others {
		if !o.listed {
			delete(e.others, pod)
		}
	}
}

func (e *election) otherLocked(pod string) *other {
	o := e.others[pod]
	if o == nil {
		o = &other{pod: pod, id: idOf(pod), open: make(map[nonce]time.Time)}
		e.others[pod] = o
	}
	return o
}

// standbys is how many other gateways answer and can take over; ok is false if there is no other gateway.
func (e *election) standbys(now time.Time) (n int, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, o := range e.others {
		if o.leaving {
			continue
		}
		ok = true
		if o.answered && now.Sub(o.asked) < deferFor && !o.last.holds {
			n++
		}
	}
	return n, ok
}

// acquaintance is the state about the Lease and the other gateways that survives a restart.
type acquaintance struct {
	Transition int32                 `json:"transition,omitempty"` // of the Lease
	Others     map[string]netip.Addr `json:"others,omitempty"`     // gateways that have answered, by Pod
}

func (e *election) acquaintance() acquaintance {
	e.mu.Lock()
	defer e.mu.Unlock()
	a := acquaintance{Transition: e.transition}
	for pod, o := range e.others {
		if o.answered && !o.leaving && o.addr.IsValid() {
			if a.Others == nil {
				a.Others = make(map[string]netip.Addr)
			}
			a.Others[pod] = o.addr
		}
	}
	return a
}
