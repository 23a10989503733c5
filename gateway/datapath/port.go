package datapath

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// Limits of the packets from one peer to the in-process endpoint. Packets beyond a limit are
// dropped before they use anything that peers share.
const (
	// MessageRate and MessageBurst limit the messages from each of the two addresses of a peer's
	// gateway. A regular gateway sends one PING and one PONG every two seconds, and about twenty of
	// each in a short time while it probes the path MTU.
	MessageRate  = 20 // per second
	MessageBurst = 2 * MessageRate

	// otherRate and otherBurst limit all other packets. Of these, only ICMP echo requests are
	// answered. A packet uses one token for each otherLen octets, because an answer is sent in
	// fragments of that size.
	otherRate  = 100 // per second
	otherBurst = 64
	otherLen   = 1280
)

// A bucket is a token bucket (RFC 1812, section 4.3.2.8). The zero value is full. Safe for
// concurrent use.
type bucket struct{ paid atomic.Int64 } // value of Tunnel.Now at which the bucket will be full

// take removes n tokens from the bucket and returns true, or returns false if the bucket has fewer.
// The bucket gains rate tokens a second and holds at most burst.
func (b *bucket) take(now time.Duration, n, rate, burst int64) bool {
	interval := int64(time.Second) / rate
	for {
		was := b.paid.Load()
		next := max(was, int64(now)) + n*interval
		if next-int64(now) > burst*interval {
			return false
		}
		if b.paid.CompareAndSwap(was, next) {
			return true
		}
	}
}

// A datagram is an entry of a turns queue.
type datagram struct {
	at        netip.AddrPort // inbound: source; outbound: destination
	requester *peer          // outbound: the peer whose message this packet answers, and in whose queue it waits. nil: the packet waits in the queue of its destination address
	b         []byte         // inbound: payload; outbound: complete packet; owned
	size      int            // outbound: length to which the packet must be padded; 0: no padding
}

// A party is a peer whose messages are answered, or a destination address. Each party has its own
// queue.
type party struct {
	peer *peer
	addr netip.Addr
}

func (d datagram) party() party {
	if d.requester != nil {
		return party{peer: d.requester}
	}
	return party{addr: d.at.Addr()}
}

const (
	turnsEach = 32   // maximum number of datagrams of one party, unless turns.perParty is set
	turnsAll  = 4096 // maximum number of datagrams of all parties; beyond it, each party may still queue one
)

// turns is a fair queue of datagrams. It serves parties in turn and limits the datagrams of each,
// so a flood from one party delays another party by at most one datagram. Datagrams of one party
// stay in order. The zero value is empty. Safe for concurrent use.
type turns struct {
	perParty int          // maximum number of datagrams of one party; 0: turnsEach
	n        atomic.Int64 // number of datagrams; shows without the lock whether the queue is empty
	mu       sync.Mutex   // guards the following fields
	byParty  map[party][]datagram
	next     []party // parties with datagrams, in the order of turns
}

// push adds a datagram and reports whether there was room for it.
func (t *turns) push(d datagram) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	sender := d.party()
	waiting := t.byParty[sender]
	if len(waiting) == cmp.Or(t.perParty, turnsEach) || len(waiting) > 0 && t.n.Load() >= turnsAll {
		return false
	}
	if t.byParty == nil {
		t.byParty = make(map[party][]datagram)
	}
	if len(waiting) == 0 {
		t.next = append(t.next, sender)
	}
	t.byParty[sender] = append(waiting, d)
	t.n.Add(1)
	return true
}

// pop removes and returns the next datagram, if there is one.
func (t *turns) pop() (d datagram, ok bool) {
	if t.n.Load() == 0 {
		return datagram{}, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.next) == 0 {
		return datagram{}, false
	}
	sender := t.next[0]
	t.next = t.next[1:]
	waiting := t.byParty[sender]
	if d = waiting[0]; len(waiting) == 1 {
		delete(t.byParty, sender)
	} else {
		waiting[0] = datagram{}
		t.byParty[sender], t.next = waiting[1:], append(t.next, sender)
	}
	t.n.Add(-1)
	return d, true
}

// peek returns the next datagram without removing it, or the zero datagram.
func (t *turns) peek() datagram {
	if t.n.Load() == 0 {
		return datagram{}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.next) == 0 {
		return datagram{}
	}
	return t.byParty[t.next[0]][0]
}

// A Port is the UDP port of the in-process endpoint for messages between gateways. It accepts
// messages only from the gateways of peers (Peer.Gateway), and limits the rate from each of their
// addresses.
type Port struct {
	local   *Local
	number  uint16
	maxLen  int // maximum length of a message in octets; longer ones are truncated
	in      turns
	arrived chan struct{} // wakes Receive: in may have a datagram
	closed  chan struct{}
	once    sync.Once
}

// Listen opens the port number. maxLen is the maximum length of a message in octets; a longer
// message is truncated. An endpoint can have only one Port.
func (l *Local) Listen(number uint16, maxLen int) (*Port, error) {
	p := &Port{local: l, number: number, maxLen: maxLen, arrived: make(chan struct{}, 1), closed: make(chan struct{})}
	if l.closed.Load() {
		return nil, net.ErrClosed
	}
	if !l.port.CompareAndSwap(nil, p) {
		return nil, fmt.Errorf("in-process endpoint: port %d is already in use", number)
	}
	return p, nil
}

// Receive waits for a message, which the caller owns. Only one goroutine may call it. It returns
// net.ErrClosed after the port or its endpoint is closed.
func (p *Port) Receive() (message []byte, from netip.AddrPort, err error) {
	for {
		select {
		case <-p.closed:
			return nil, netip.AddrPort{}, net.ErrClosed
		default:
		}
		if d, ok := p.in.pop(); ok {
			return d.b, d.at, nil
		}
		select {
		case <-p.arrived:
		case <-p.closed:
		}
	}
}

// Send sends a message in a packet that WireGuard pads to size octets; 0 means no extra padding.
// size must not exceed the tunnel's MTU. The receiver removes the padding, by the length in the
// IP header (WireGuard paper, section 5.4.6). Without a session the packet waits for one, like
// any other packet. Send does not keep message.
func (p *Port) Send(message []byte, to netip.AddrPort, size int) error {
	select {
	case <-p.closed:
		return net.ErrClosed
	default:
	}
	b, err := p.local.udp(message, p.number, to)
	if err != nil {
		return err
	}
	link := p.local.link
	if p.local.out.push(datagram{at: to, b: b, size: size}) {
		link.call(&link.wake)
	} else {
		link.call(&link.overflow)
	}
	return nil
}

// Close makes Receive and Send return net.ErrClosed. Further calls do nothing.
func (p *Port) Close() {
	p.once.Do(func() { close(p.closed) })
}

// isFor reports whether a packet is a message for the port.
func (p *Port) isFor(v *packet.View) bool {
	_, _, _, fragment := v.Fragment()
	return p != nil && v.Proto() == packet.UDP && !fragment && v.DstPort() == p.number
}

// offer queues a copy of a message, or returns the reason to drop it.
func (p *Port) offer(v *packet.View) natengine.Drop {
	// Parse has checked the length field.
	size := int(binary.BigEndian.Uint16(v.Bytes()[v.TransportOffset()+4:]))
	message := v.Bytes()[v.PayloadOffset() : v.TransportOffset()+size]
	d := datagram{at: netip.AddrPortFrom(v.Src(), v.SrcPort()), b: bytes.Clone(message[:min(len(message), p.maxLen)])}
	if !p.in.push(d) {
		return natengine.DropLocalQueue
	}
	select {
	case p.arrived <- struct{}{}:
	default:
	}
	return natengine.DropNone
}

// toLocal passes a packet from a peer to the in-process endpoint, or returns the reason to drop
// it. It charges the peer's limits before it uses anything that peers share.
func (t *Tunnel) toLocal(p *peer, v *packet.View, now time.Duration) natengine.Drop {
	port := t.local.port.Load()
	if port.isFor(v) {
		from := p.gatewayOf(v.Src())
		switch {
		case from < 0:
			return natengine.DropLocalSource
		case !p.messages[from].take(now, 1, MessageRate, MessageBurst):
			return natengine.DropLocalRate
		case !v.ValidChecksums():
			return natengine.DropBadChecksum
		}
		return port.offer(v)
	}
	if streams := t.local.streams.Load(); p.streams.Load() && streams.isSegment(v) {
		return streams.deliver(p, v, now)
	}
	if !p.others.take(now, int64(1+len(v.Bytes())/otherLen), otherRate, otherBurst) {
		return natengine.DropLocalRate
	}
	if !v.ValidChecksums() {
		return natengine.DropBadChecksum
	}
	stack, why := useOf(v)
	if stack && !t.local.deliver(p, v.Bytes()) && why == natengine.DropNone {
		why = natengine.DropMalformed
	}
	return why
}

// useOf reports whether to pass a packet to the stack. It also returns the reason to count the
// packet as dropped, or DropNone. The stack answers ICMP echo requests and handles ICMP errors. It
// also answers TCP and UDP packets with an ICMP error (RFC 1122, section 3.2.2.1), but those count
// as dropped.
func useOf(v *packet.View) (stack bool, why natengine.Drop) {
	_, _, _, fragment := v.Fragment()
	echo, icmp := uint8(8), packet.ICMP
	if !v.Is4() {
		echo, icmp = 128, packet.ICMPv6
	}
	switch proto := v.Proto(); {
	case proto == icmp && (v.LaterFragment() || v.ICMPType() == echo || v.IsICMPError()):
		return true, natengine.DropNone
	case proto == packet.UDP:
		return !fragment, natengine.DropLocalPort
	case proto == packet.TCP:
		return !fragment, natengine.DropLocalProtocol
	}
	return false, natengine.DropLocalProtocol
}
