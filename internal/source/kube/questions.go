package kube

import (
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/internal/crowd"
	"github.com/isthmus-net/isthmus/internal/voting"
)

// QuestionPort is the UDP port at which each gateway receives the other gateways' questions about
// its state.
const QuestionPort = 5870

// A question or an answer is one datagram of questionLength octets:
//
//	 0  magic    4
//	 4  kind     1  question, answer
//	 5  flags    1  flagHolds, flagConfirmed, flagSilent
//	 6  zero     2
//	 8  transition  4  of the Lease
//	12  defers   4  milliseconds for which the sender leaves the Lease to the receiver
//	16  nonce   16  of the question
//	32  from    16  identity of the sender
//	48  to      16  identity of the receiver
//	64  tag     32  HMAC-SHA256 of the octets before it
//
// A question contains no state. It only shows that its sender exists, and may cause a question in
// return. A gateway accepts an answer only with the nonce of its own question, so replayed answers
// have no effect. Questions and answers have the same length, and only a question with a valid tag
// gets an answer, so there is no amplification.
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
	flagSilent    = 1 << 2
)

type (
	nonce     [16]byte
	gatewayID [16]byte // a hash of the Pod's name
)

// unnamed returns a placeholder for the unknown name of a Pod; no Pod can have this name.
func unnamed(id gatewayID) string { return unnamedPrefix + hex.EncodeToString(id[:]) }

const unnamedPrefix = "?"

func idOf(pod string) gatewayID {
	if text, ok := strings.CutPrefix(pod, unnamedPrefix); ok {
		if id, err := hex.DecodeString(text); err == nil && len(id) == len(gatewayID{}) {
			return gatewayID(id)
		}
	}
	sum := sha256.Sum256([]byte(pod))
	return gatewayID(sum[:16])
}

// message is a question or an answer in parsed form.
type message struct {
	kind     byte
	state    leaseState    // only set in an answer
	defers   time.Duration // only set in an answer
	nonce    nonce
	from, to gatewayID
}

// questionKey returns the key with which the gateways of one installation authenticate messages.
// private is the WireGuard private key that they share.
func questionKey(private [32]byte) []byte {
	key, err := hkdf.Key(sha256.New, private[:], nil, "isthmus gateway questions", sha256.Size)
	if err != nil {
		panic(err) // fails only for lengths over 255 hashes
	}
	return key
}

func (m message) seal(key []byte) []byte {
	b := make([]byte, signedLength, questionLength)
	copy(b, questionMagic[:])
	b[4] = m.kind
	if m.state.holds {
		b[5] |= flagHolds
	}
	if m.state.confirmed {
		b[5] |= flagConfirmed
	}
	if m.state.silent {
		b[5] |= flagSilent
	}
	binary.BigEndian.PutUint32(b[8:], uint32(m.state.transition))
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

// openMessage checks and parses a sealed message. refused is the reason to reject the message, or
// "" if the message is valid.
func openMessage(b, key []byte) (m message, refused string) {
	if len(b) != questionLength || [4]byte(b) != questionMagic {
		return m, refusedForm
	}
	if !hmac.Equal(b[signedLength:], tagOf(b[:signedLength], key)) {
		return m, refusedTag
	}
	return message{
		kind: b[4],
		state: leaseState{holds: b[5]&flagHolds != 0, confirmed: b[5]&flagConfirmed != 0,
			transition: int32(binary.BigEndian.Uint32(b[8:])), silent: b[5]&flagSilent != 0},
		defers: min(time.Duration(binary.BigEndian.Uint32(b[12:]))*time.Millisecond, deferFor),
		nonce:  nonce(b[16:]), from: gatewayID(b[32:]), to: gatewayID(b[48:]),
	}, ""
}

// Reasons to reject a datagram, for the metrics.
const (
	refusedForm     = "malformed"       // wrong length or version
	refusedTag      = "unauthenticated" // sealed with another key
	refusedReceiver = "misdirected"     // addressed to another gateway, or sent by this one
	refusedNonce    = "unasked"         // not the nonce of an open question
	refusedUnread   = "unread"          // dropped by the kernel, because too many arrived
)

// questioner asks the other gateways and answers their questions. run does the work.
type questioner struct {
	election *election
	private  func() [32]byte // returns the WireGuard private key; zero: not known yet
	savedKey []byte          // key from before a restart, used until the private key is known; nil: none
	listen   func() (net.PacketConn, error)
	refused  func(why string, n uint32) // counts rejected datagrams
	log      *slog.Logger

	key atomic.Pointer[[]byte] // result of questionKey; nil: not known yet
}

// listenAt opens QuestionPort at the address of this gateway's Pod.
func listenAt(addr netip.Addr) (net.PacketConn, error) {
	return net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, QuestionPort)))
}

// listenAgain is the delay before the port is opened again after a failure.
const listenAgain = 5 * time.Second

// run sends questions every questionInterval until ctx ends. If the port cannot be opened, this
// gateway neither asks nor answers.
func (q *questioner) run(ctx context.Context) {
	tick := time.NewTicker(questionInterval)
	defer tick.Stop()
	var conn net.PacketConn
	strangers := new(crowd.Crowd) // unknown addresses that have sent to conn
	var ended chan struct{}       // closed when read has returned
	defer func() {
		if conn != nil {
			conn.Close()
			<-ended
		}
	}()
	var again time.Time
	logged := false
	if q.savedKey != nil {
		q.key.Store(&q.savedKey)
	}
	var private [32]byte
	for {
		if p := q.private(); p != private {
			private = p
			key := questionKey(p)
			q.key.Store(&key)
		}
		select {
		case <-ended: // the socket failed
			conn.Close()
			conn, ended, again = nil, nil, time.Now().Add(listenAgain)
		default:
		}
		if now := time.Now(); conn == nil && !now.Before(again) {
			if c, err := q.listen(); err == nil {
				conn, ended, logged, strangers = c, make(chan struct{}), false, crowd.Of(c)
				go func(ended chan struct{}) {
					defer close(ended)
					q.read(c, strangers)
				}(ended)
			} else if again = now.Add(listenAgain); !logged {
				logged = true
				q.log.Warn("cannot ask other gateways whether they are active; during an API server outage, two gateways could be active", "error", err)
			}
		}
		if n := strangers.Open(); n > 0 {
			q.refused(refusedUnread, n)
		}
		if key := q.key.Load(); conn != nil && key != nil {
			for _, o := range q.election.questions(time.Now()) {
				m := message{kind: kindQuestion, nonce: o.nonce, from: q.election.id, to: o.id}
				// Ignore the error: a failed send has the same effect as a missing answer.
				_, _ = conn.WriteTo(m.seal(*key), net.UDPAddrFromAddrPort(netip.AddrPortFrom(o.addr, QuestionPort)))
			}
		}
		q.election.reevaluate(time.Now())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// read handles datagrams until the socket is closed.
func (q *questioner) read(conn net.PacketConn, strangers *crowd.Crowd) {
	buf := make([]byte, questionLength+1) // a longer datagram is truncated to a length that is rejected
	for failures := 0; ; {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			// ReadFrom may return ICMP errors of earlier sends, which do not affect other
			// messages.
			if failures++; failures > 100 || errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		failures = 0
		m, refused := message{}, refusedTag
		key := q.key.Load()
		if key != nil {
			m, refused = openMessage(buf[:n], *key)
		}
		if refused == "" && (m.to != q.election.id || m.from == q.election.id) {
			refused = refusedReceiver
		}
		if refused == "" {
			switch m.kind {
			case kindQuestion:
				now := time.Now()
				if at, ok := from.(*net.UDPAddr); ok {
					q.election.recordQuestion(m.from, at.AddrPort().Addr().Unmap(), now)
				}
				_, _ = conn.WriteTo(q.election.answer(m, now).seal(*key), from)
			case kindAnswer:
				if !q.election.handleAnswer(m, time.Now()) {
					refused = refusedNonce
				}
			default:
				refused = refusedForm
			}
		}
		if refused == "" {
			continue
		}
		q.refused(refused, 1)
		if err := strangers.Refuse(q.election.neighbours); err != nil {
			q.log.Warn("cannot install the kernel filter against unknown senders", "error", err)
		}
	}
}

// otherGateway has the known state of another gateway, which is identified by its Pod.
type otherGateway struct {
	pod          string // name of the Pod; until the API server lists the Pod, the result of unnamed
	id           gatewayID
	addr         netip.Addr // address of the Pod as last read; zero: none yet
	listed       bool       // the API server has listed the Pod since this process started
	lastQuestion time.Time  // time of the other gateway's last question
	leaving      bool       // the Pod is being deleted, so the other gateway will not take the Lease
	answered     bool       // the other gateway has answered at least once
	last         account    // last answer of the other gateway, without age
	sent         time.Time  // time at which this gateway sent the question that last answers
	promised     time.Time  // end of this gateway's promise to leave the Lease to the other one
	missed       int        // consecutive unanswered questions, counted while the API server answers and does not list the Pod
	open         map[nonce]time.Time
}

// stranger reports whether this gateway has only received questions from o. They may be replays, so
// they do not prove that o exists.
func (o *otherGateway) stranger() bool { return !o.listed && !o.answered }

// maxMissed is how many questions an unlisted gateway may leave unanswered before it is forgotten.
// It is the number of questions in one minute. After that time, a watch of Pods is up to date.
const maxMissed = int(time.Minute / questionInterval)

// question is a question that is ready to be sent.
type question struct {
	nonce nonce
	id    gatewayID
	addr  netip.Addr
}

// questions returns the questions to send now.
func (e *election) questions(now time.Time) (all []question) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for id, o := range e.others {
		switch silent := now.Sub(o.sent) >= deferFor; {
		case o.listed || !silent:
			o.missed = 0
		case e.readsLocked():
			o.missed++
		}
		if o.stranger() && now.Sub(o.lastQuestion) >= deferFor || o.missed > maxMissed {
			delete(e.others, id)
			continue
		}
		for n, sent := range o.open {
			if now.Sub(sent) >= deferFor { // an answer to this question would be too old to be useful
				delete(o.open, n)
			}
		}
		if !o.addr.IsValid() {
			continue
		}
		var n nonce
		rand.Read(n[:]) // never returns an error: a failure ends the program
		o.open[n] = now
		all = append(all, question{n, o.id, o.addr})
	}
	return all
}

// answer returns this gateway's answer to m: its state, and how long it will not take the Lease.
func (e *election) answer(m message, now time.Time) message {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.reevaluateLocked(now)
	v := e.viewLocked(now)
	a := message{kind: kindAnswer, state: v.leaseState, nonce: m.nonce, from: e.id, to: m.from}
	o := e.others[m.from]
	if o == nil || !o.answered || o.leaving {
		return a
	}
	a.state.silent = v.holds && !e.sending
	if to := o.account(now); !e.taking && !e.byVotesLocked() && v.defersTo(to) {
		a.defers, o.promised = deferFor-to.age, o.sent.Add(deferFor)
	}
	return a
}

// recordQuestion records a question from a gateway. The gateway's Pod may be unknown because it is
// newer than the last contact with the API server. Therefore this gateway asks unlisted gateways,
// too, and takes each into account once it has answered. After that, a replayed question from
// another address does not change the address.
func (e *election) recordQuestion(id gatewayID, addr netip.Addr, now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	o := e.others[id]
	if o == nil {
		o = e.otherLocked(unnamed(id))
	}
	if o.lastQuestion = now; o.stranger() {
		o.addr = addr
	}
}

// account returns the last answer of o. The durations in it are relative to now.
func (o *otherGateway) account(now time.Time) account {
	a := o.last
	a.pod, a.age, a.promised = o.pod, now.Sub(o.sent), o.promised.Sub(now)
	return a
}

// handleAnswer handles an answer. It returns false if the answer belongs to no open question.
func (e *election) handleAnswer(m message, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	o := e.others[m.from]
	if o == nil {
		return false
	}
	sent, open := o.open[m.nonce]
	if !open {
		return false
	}
	delete(o.open, m.nonce)
	if sent.Before(o.sent) {
		return true // a later answer has arrived first
	}
	met := !o.answered
	last := account{leaseState: m.state, defers: m.defers}
	if m.state.silent && o.last.silent {
		last.mute = o.last.mute + sent.Sub(o.sent)
	}
	o.answered, o.sent, o.last = true, sent, last
	if met && e.met != nil {
		e.met()
	}
	e.reevaluateLocked(now)
	return true
}

// addListed records another gateway that the API server lists.
func (e *election) addListed(pod string, addr netip.Addr, leaving bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	o := e.otherLocked(pod)
	o.addr, o.listed, o.leaving = addr, true, leaving
}

// removeListed removes another gateway whose Pod was deleted.
func (e *election) removeListed(pod string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.others, idOf(pod))
}

// dropUnlisted removes the gateways that are missing from the API server's complete list.
func (e *election) dropUnlisted() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for id, o := range e.others {
		if !o.listed {
			delete(e.others, id)
		}
	}
}

func (e *election) otherLocked(pod string) *otherGateway {
	id := idOf(pod)
	o := e.others[id]
	if o == nil {
		o = &otherGateway{id: id, open: make(map[nonce]time.Time)}
		e.others[id] = o
	}
	o.pod = pod
	return o
}

// neighbours returns the known addresses of the other gateways. The value is true for the
// active gateway.
func (e *election) neighbours() map[netip.Addr]bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make(map[netip.Addr]bool)
	for _, o := range e.others {
		if o.addr.IsValid() && !o.stranger() {
			all[o.addr] = o.pod == e.name
		}
	}
	return all
}

// standbys returns the number of other gateways that answer as standbys. ok is false if there is no
// other gateway. A standby that answers may still lack contact to a majority of the voters.
func (e *election) standbys(now time.Time) (n int, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, o := range e.others {
		if o.leaving || o.stranger() {
			continue
		}
		ok = true
		if o.answered && now.Sub(o.sent) < deferFor && !o.last.holds {
			n++
		}
	}
	return n, ok
}

// acquaintance is the state about the Lease and the other gateways that survives a restart.
type acquaintance struct {
	Transition int32                 `json:"transition,omitempty"` // transitions of the Lease
	Others     map[string]netip.Addr `json:"others,omitempty"`     // Pod → address, only of gateways that have answered
	List       voting.List           `json:"list,omitzero"`        // the nodes that vote
}

func (e *election) acquaintance() acquaintance {
	e.mu.Lock()
	defer e.mu.Unlock()
	a := acquaintance{Transition: e.transition, List: e.list}
	for _, o := range e.others {
		if o.answered && !o.leaving && o.addr.IsValid() {
			if a.Others == nil {
				a.Others = make(map[string]netip.Addr)
			}
			a.Others[o.pod] = o.addr
		}
	}
	return a
}
