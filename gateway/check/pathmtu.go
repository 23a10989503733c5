package check

import (
	"encoding/json"
	"net/netip"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/device"
)

// This file contains packetization layer path MTU discovery (RFC 8899) for each peer. The kernel's
// path MTU reflects only the limits that routers report. Probes also detect a path that drops large
// datagrams silently. A probe is a PING of the connection check that WireGuard pads to a given size
// (datapath.Port.Send). Every peer answers it, even a Liqo gateway. The answer is small, so each
// side measures only the direction in which it sends.
//
// The size in force, which the RFC calls PLPMTU, is the size of an IP packet in the tunnel. The
// search differs from the RFC in three ways. A search starts with the largest size rather than the
// base, because a TCP connection keeps the segment size with which it starts. Several sizes are
// probed at once, in a round, because a probe carries no user data. While the size in force is not
// the largest, larger sizes are probed every half minute, or every ten minutes if the size was
// lowered twice within ten minutes.
const (
	// A round ends after PROBE_TIMER (RFC 8899, section 5.1.1), which is pathTimeout plus the
	// round-trip time. The last message of a round is small. If it is answered, the round ends
	// already pathMoment plus pathTrips round-trip times after its start.
	pathTimeout = time.Second
	pathMoment  = pathTimeout / 5
	pathTrips   = 4

	pathLook = interval / 8

	// pathRate is the maximum number of peers whose size in force is confirmed in a second. With up
	// to 100 peers, the size of each is confirmed in each interval.
	pathRate = 50

	// PMTU_RAISE_TIMER is pathRaise, or pathRaiseMost if the size in force was lowered twice within
	// pathRaiseMost.
	pathRaise     = 30 * time.Second
	pathRaiseMost = 10 * time.Minute

	// pathRetry is the interval at which a path in PathError is probed again. A short interruption
	// may have caused the error, and the peer is not ready while the error lasts.
	pathRetry = 5 * time.Second

	// pathSizes is the number of sizes that one round probes besides the largest one, the smallest
	// one and the one in force. With this value, a round has fewer probes than a peer answers in a
	// second.
	pathSizes = 5

	// WireGuard pads a packet to a multiple of padding octets, but never beyond the MTU of the
	// device.
	padding = device.PaddingMultiple
)

// PathState is a state of the search (RFC 8899, section 5.2).
type PathState string

// The values of PathState.
const (
	PathDisabled       PathState = "Disabled"       // the peer does not answer at all, so sizes cannot be probed
	PathSearching      PathState = "Searching"      // probes are being sent
	PathSearchComplete PathState = "SearchComplete" // the largest size that the path carries is in force
	PathError          PathState = "Error"          // the path does not even carry the base size
)

// PathMTU is the state of the search for the path MTU to one peer.
type PathMTU struct {
	State   PathState `json:"state"`
	Bytes   int       `json:"bytes"`   // largest IP packet in the tunnel that the path carries
	Ceiling int       `json:"ceiling"` // largest IP packet that the path should carry, according to the kernel
	Since   time.Time `json:"since"`   // when Bytes last changed
	// Confirmed is the time when a packet of Bytes octets was last answered, or zero if none ever
	// was.
	Confirmed time.Time `json:"confirmed,omitzero"`
}

// Narrow reports whether the path carries less than it should.
func (p PathMTU) Narrow() bool { return p.Bytes < p.Ceiling }

// A pathProbe is one message of a round. Its time identifies its answer.
type pathProbe struct {
	at       time.Time
	size     int // octets; 0: a control message, as small as any PING
	answered bool
}

// A pathSearch is the search on the path to one peer. It reads no clock and sends nothing. The
// zero value does nothing until a ceiling is set.
type pathSearch struct {
	PathMTU
	floor   int           // BASE_PLPMTU of RFC 8899
	base    int           // BaseMTU; floor is the smaller of base and the ceiling
	raise   time.Duration // PMTU_RAISE_TIMER
	raised  time.Time     // when PMTU_RAISE_TIMER last started
	lowered time.Time     // when Bytes was last lowered

	// The bounds of the search, as numbers of steps (see the method steps). low is the largest size
	// known to pass; -1: none. high is the smallest size known not to pass.
	low, high   int
	unconfirmed bool // one round has shown that the size in force must be lowered; a second one must confirm it

	round []pathProbe // messages of the current round; nil: no round
	began time.Time
	kind  pathKind
}

type pathKind uint8

const (
	pathConfirm  pathKind = iota // does the path still carry the size in force?
	pathSearches                 // what is the largest size that the path carries?
	pathUpwards                  // does the path carry a larger size now?
)

// steps returns the number of possible sizes: the floor, then each further multiple of padding,
// then the ceiling.
func (s *pathSearch) steps() int { return (s.Ceiling-s.floor+padding-1)/padding + 1 }

func (s *pathSearch) sizeOf(step int) int { return min(s.floor+step*padding, s.Ceiling) }

func (s *pathSearch) stepOf(size int) int { return (size - s.floor + padding - 1) / padding }

// limit sets the bounds of the search: the base, and the ceiling that the kernel reports for the
// path.
func (s *pathSearch) limit(base, ceiling int, now time.Time) {
	if s.base == base && s.Ceiling == ceiling {
		return
	}
	was := s.Bytes
	if was == s.Ceiling || was > ceiling {
		was = ceiling
	}
	s.base, s.floor, s.Ceiling = base, min(base, ceiling), ceiling
	if was = max(was, s.floor); was < ceiling { // round down to a step
		was -= (was - s.floor) % padding
	}
	if s.Bytes != was {
		s.Bytes, s.Since = was, now
	}
	s.round, s.Confirmed = nil, time.Time{}
	if s.State == "" {
		s.State = PathDisabled
	}
	if s.State != PathDisabled {
		s.begin(now)
	}
}

// begin starts a new search, as for a new path.
func (s *pathSearch) begin(now time.Time) {
	if s.Ceiling == 0 {
		return
	}
	s.State, s.low, s.high, s.unconfirmed = PathSearching, -1, s.steps(), false
	s.raise, s.raised, s.round = pathRaise, now, nil
}

// end stops the search. It is called when even small messages are not answered, because then a
// missing answer to a large message proves nothing.
func (s *pathSearch) end() { s.State, s.round = PathDisabled, nil }

// next returns the probes to send now, or nil. The size in force is confirmed once in
// confirmInterval.
func (s *pathSearch) next(now time.Time, confirmInterval time.Duration) []pathProbe {
	if s.round != nil || s.Ceiling == 0 {
		return nil
	}
	switch {
	case s.State == PathDisabled:
		return nil
	case s.State == PathSearching && s.low >= 0 && now.Sub(s.began) < pathTimeout:
		return nil // the peer answers only a limited number of messages a second
	case s.State == PathSearching:
		return s.probe(pathSearches, now)
	case s.State == PathError && now.Sub(s.raised) >= pathRetry, s.Narrow() && now.Sub(s.raised) >= s.raise:
		s.raised, s.low, s.high = now, s.stepOf(s.Bytes), s.steps()
		if s.State == PathError {
			s.low = -1
		}
		return s.probe(pathUpwards, now)
	case s.State == PathSearchComplete && now.Sub(s.began) >= confirmInterval:
		return s.probe(pathConfirm, now)
	}
	return nil
}

// probe starts a round and returns its messages.
func (s *pathSearch) probe(kind pathKind, now time.Time) []pathProbe {
	s.kind, s.began, s.round = kind, now, nil
	add := func(size, times int) {
		for range times {
			s.round = append(s.round, pathProbe{at: now.Add(time.Duration(len(s.round))), size: size})
		}
	}
	if kind == pathConfirm {
		add(s.Bytes, 1)
		add(0, 1)
		return s.round
	}
	for _, step := range s.candidates() {
		times := 2
		if kind == pathSearches && s.sizeOf(step) == s.Bytes {
			times = 3
		}
		add(s.sizeOf(step), times)
	}
	add(0, 2)
	return s.round
}

// candidates returns the steps to probe in a round, all between the bounds low and high: the
// largest one, the size in force, and further ones at even distances. If no step is known to pass,
// the smallest one is among them.
func (s *pathSearch) candidates() []int {
	var steps []int
	add := func(step int) {
		if step > s.low && step < s.high && !slices.Contains(steps, step) {
			steps = append(steps, step)
		}
	}
	add(s.high - 1)
	add(s.stepOf(s.Bytes))
	if s.low < 0 {
		add(0)
	}
	for i := 1; i <= pathSizes; i++ {
		add(s.low + i*(s.high-s.low)/(pathSizes+1))
	}
	return steps
}

// answer records the answer to the message that was sent at the given time. It returns false if the
// round has no such message, or if the message was already answered.
func (s *pathSearch) answer(sent time.Time) bool {
	for i := range s.round {
		if p := &s.round[i]; p.at.Equal(sent) && !p.answered {
			p.answered = true
			return true
		}
	}
	return false
}

// evaluate evaluates the round if it is finished, and reports whether the size in force has
// changed.
func (s *pathSearch) evaluate(now time.Time, rtt time.Duration) (changed bool) {
	if s.round == nil {
		return false
	}
	all := !slices.ContainsFunc(s.round, func(p pathProbe) bool { return !p.answered })
	timeout := pathTimeout + rtt
	if s.round[len(s.round)-1].answered {
		timeout = min(timeout, pathMoment+pathTrips*rtt)
	}
	if !all && now.Sub(s.began) < timeout {
		return false
	}
	round := s.round
	s.round = nil
	best, control := 0, false
	for _, p := range round {
		if p.answered {
			best, control = max(best, p.size), true
		}
	}
	if best >= s.Bytes {
		s.Confirmed, s.unconfirmed = now, false
	}
	if !control { // not even a control message was answered, so the loss does not depend on the size
		return false
	}
	if s.kind == pathConfirm {
		if best == 0 {
			s.State, s.low, s.high, s.unconfirmed = PathSearching, -1, s.steps(), false
		}
		return false
	}
	return s.conclude(round, best, now)
}

// conclude narrows the bounds of the search. best is the largest size that was answered in the
// round, or 0. conclude reports whether the size in force has changed.
func (s *pathSearch) conclude(round []pathProbe, best int, now time.Time) (changed bool) {
	if best != 0 {
		s.low = max(s.low, s.stepOf(best))
	}
	for _, p := range round {
		if p.size > best && s.stepOf(p.size) > s.low {
			s.high = min(s.high, s.stepOf(p.size))
		}
	}
	if s.kind == pathUpwards && best == 0 { // no larger size passes
		s.high = s.low + 1
	}
	size := s.floor
	if s.low >= 0 {
		size = s.sizeOf(s.low)
	}
	// The loss may come from a queue that was full for a moment, so probe again before the size is
	// lowered.
	if s.kind == pathSearches && !s.unconfirmed && (s.low < 0 || size < s.Bytes) {
		s.unconfirmed, s.low, s.high = true, -1, s.steps()
		return false
	}
	s.unconfirmed = false
	if size < s.Bytes {
		if s.raise = pathRaise; !s.lowered.IsZero() && now.Sub(s.lowered) < pathRaiseMost {
			s.raise = pathRaiseMost
		}
		s.lowered = now
	}
	if changed = size != s.Bytes; changed {
		s.Bytes, s.Since = size, now
	}
	switch {
	case s.low < 0:
		s.State, s.raised = PathError, now
	case s.high-s.low > 1:
		s.State = PathSearching
	default:
		s.State, s.raised = PathSearchComplete, now
	}
	return changed
}

// limit sets the bounds of the search for the path MTU to a peer.
func (p *peerState) limit(base, ceiling int, now time.Time) {
	p.BaseMTU, p.MaxMTU = base, ceiling
	p.path.limit(base, ceiling, now)
}

// OtherPath starts a new search for a peer. Call it when packets to the peer take another path.
func (m *Monitor) OtherPath(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.peers[id]; p != nil && p.path.State != PathDisabled {
		p.path.begin(time.Now())
	}
}

// NarrowPaths returns the path MTU, in octets, of each peer whose path carries less than the
// kernel reports.
func (m *Monitor) NarrowPaths() map[string]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	narrow := make(map[string]int)
	for id, p := range m.peers {
		if p.path.Narrow() {
			narrow[id] = p.path.Bytes
		}
	}
	return narrow
}

// searchPaths evaluates the rounds of all peers and sends the probes that are due.
func (m *Monitor) searchPaths(now time.Time) {
	type ping struct {
		to   netip.AddrPort
		text []byte
		size int
	}
	var pings []ping
	changed := false
	m.mu.Lock()
	every := max(interval, time.Duration(len(m.peers))*time.Second/pathRate)
	for id, p := range m.peers {
		was := p.path.PathMTU
		if p.path.evaluate(now, p.result.RTT) {
			changed = true
			m.o.Log.Warn("path MTU changed", "peer", id, "from", was.Bytes, "to", p.path.Bytes, "ceiling", p.path.Ceiling)
		} else if was.State != PathError && p.path.State == PathError {
			m.o.Log.Warn("packets of the smallest path MTU are lost", "peer", id, "size", p.path.Bytes)
		}
		if p.away || len(pings) >= pathMessages {
			continue
		}
		for _, probe := range p.path.next(now, every) {
			text, err := json.Marshal(message{id, "PING", probe.at.UTC().Format(time.RFC3339Nano)})
			if err == nil {
				pings = append(pings, ping{p.Probe, text, probe.size})
			}
		}
	}
	m.mu.Unlock()
	for _, ping := range pings {
		_ = m.port.Send(ping.text, ping.to, ping.size) // ignore the error: the missing answer counts as loss
	}
	if changed {
		m.o.PathChanged()
	}
}

func (m *Monitor) enter(p *peerState, s State, now time.Time) {
	p.result.State, p.result.Since = s, now
	if s == Connected {
		p.path.begin(now)
	} else {
		p.path.end()
	}
	if s == Connected {
		m.o.Log.Info("peer connected", "peer", p.ID, "rtt", p.result.RTT.String())
	} else {
		m.o.Log.Warn("peer does not answer", "peer", p.ID, "probe", p.Probe.String())
	}
}
