package ipam

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// Bounds of the recorded requests for mappings.
const (
	// MaxMappingsPerCaller is the maximum number of mappings of one caller.
	MaxMappingsPerCaller = 4096
	// MaxNotes bounds the total length of the recorded callers of one peer's mappings, in bytes,
	// because one object stores them all.
	MaxNotes = 144 << 10
	// maxCaller bounds the name of a caller, in bytes.
	maxCaller = 256
)

// errAnothers means that another caller has requested the mapping.
var errAnothers = errors.New("was mapped by another caller; only that caller can unmap it")

// AddRequester records that a caller has requested an existing mapping of the peer. kind is the
// kind of the endpoint, or "" if it is unknown. AddRequester changes nothing if the caller is
// already recorded or the mapping does not exist.
func (b State) AddRequester(id string, ip netip.Addr, caller, kind string) (State, error) {
	callers, mapped := b.peers[id].requesters(ip)
	if _, known := slices.BinarySearch(callers, caller); known || !mapped {
		return b, nil
	}
	if len(caller) > maxCaller {
		return b, fmt.Errorf("the caller's name has %d bytes; want at most %d", len(caller), maxCaller)
	}
	has := 0
	for _, p := range b.peers {
		for _, callers := range p.endpoints {
			if _, mine := slices.BinarySearch(callers, caller); mine {
				has++
			}
		}
	}
	if has >= MaxMappingsPerCaller {
		return b, fmt.Errorf("this caller has already mapped %d endpoints; unmap some first", MaxMappingsPerCaller)
	}
	next := b.withCallers(id, ip, withCaller(callers, caller))
	if kind != "" {
		next.endpoints = maps.Clone(next.endpoints)
		next.note(ip, kind)
	}
	if n := next.peers[id].noted(); n > MaxNotes {
		return b, fmt.Errorf("the list of callers would have %[2]d bytes; want at most %[1]d; unmap endpoints that are not needed", MaxNotes, n)
	}
	return next, nil
}

// Withdraw removes a caller's request for a mapping. The mapping stays while another caller
// requests it. Callers in deleted no longer exist, so their requests do not count. A mapping
// without a known requester may be withdrawn by any caller. Withdrawing a mapping that does not
// exist changes nothing.
func (b State) Withdraw(id string, ip netip.Addr, caller string, deleted []string) (State, error) {
	callers, mapped := b.peers[id].requesters(ip)
	if !mapped {
		return b, nil
	}
	others := slices.DeleteFunc(slices.Clone(callers), func(c string) bool { return c == caller || slices.Contains(deleted, c) })
	if len(others) == 0 {
		return b.UnmapEndpoint(id, ip), nil
	}
	if !slices.Contains(callers, caller) {
		return b, errAnothers
	}
	return b.withCallers(id, ip, others), nil
}

// Requesters returns the callers that requested a mapping, sorted. The result must not be changed.
func (b State) Requesters(id string, ip netip.Addr) []string {
	callers, _ := b.peers[id].requesters(ip)
	return callers
}

func (p *account) requesters(ip netip.Addr) (callers []string, mapped bool) {
	if p == nil {
		return nil, false
	}
	callers, mapped = p.endpoints[ip]
	return callers, mapped
}

// An Endpoint is a mapped endpoint.
type Endpoint struct {
	IP netip.Addr
	// Kind is the kind of the endpoint when it was requested, as passed to AddRequester.
	Kind string
	// For has the sorted IDs of the peers for which the endpoint is mapped.
	For []string
}

// Known returns the mapped endpoints whose kind is known, sorted by address.
func (b State) Known() (known []Endpoint) {
	for _, ip := range slices.SortedFunc(maps.Keys(b.endpoints), netip.Addr.Compare) {
		if kind := b.endpoints[ip].kind; kind != "" {
			known = append(known, Endpoint{IP: ip, Kind: kind, For: b.having(ip)})
		}
	}
	return known
}

func (b State) having(ip netip.Addr) (ids []string) {
	for id, p := range b.peers {
		if _, mapped := p.endpoints[ip]; mapped {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// Expire unmaps an endpoint that is gone, for all peers. It changes nothing if the kind of the
// endpoint has changed meanwhile.
func (b State) Expire(e Endpoint) State {
	if now := b.endpoints[e.IP]; now == nil || now.kind != e.Kind {
		return b
	}
	for _, id := range b.having(e.IP) {
		b = b.UnmapEndpoint(id, e.IP)
	}
	return b
}

// noted returns the length of the peer's recorded callers, in bytes of JSON.
func (p *account) noted() (n int) {
	for _, callers := range p.endpoints {
		for _, by := range callers {
			n += len(by) + len(`"",`)
		}
	}
	return n
}

// withCallers returns the State with callers as the requesters of an existing mapping of the peer.
func (b State) withCallers(id string, ip netip.Addr, callers []string) State {
	p := *b.peers[id]
	p.endpoints = withRequesters(maps.Clone(p.endpoints), ip, callers)
	return b.withPeer(id, &p)
}

// note records the kind of an endpoint. It changes b.endpoints in place, so no other State may
// share that map.
func (b *State) note(ip netip.Addr, kind string) {
	if e := b.endpoints[ip]; e != nil {
		next := *e
		next.kind = kind
		b.endpoints[ip] = &next
	}
}

// withCaller returns the sorted list callers with caller added. It does not change callers.
func withCaller(callers []string, caller string) []string {
	i, known := slices.BinarySearch(callers, caller)
	if known {
		return callers
	}
	return slices.Insert(slices.Clone(callers), i, caller)
}
