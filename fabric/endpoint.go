package fabric

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// A Site holds the addresses of our own cluster and the networks behind the tunnels. No peer's
// gateway can have one of these addresses. It is read-only. The zero Site has no addresses.
type Site struct {
	Networks []SiteNetwork         // may overlap; the first one that contains an address counts
	Addrs    map[netip.Addr]string // single addresses; the value ends the sentence "192.0.2.1 is ..."
	Relays   map[netip.Addr]bool   // those of Addrs from which Services relay messages of peers
}

// A SiteNetwork is a network in which no gateway of a peer can be.
type SiteNetwork struct {
	Prefix netip.Prefix // the zero Prefix contains nothing
	What   string       // ends the sentence "192.0.2.1 is inside 192.0.2.0/24, ..."
	Relay  bool         // Services relay messages of peers from addresses in it
}

// Equal reports whether all fields of both are equal.
func (s Site) Equal(other Site) bool {
	same := len(s.Networks) == len(other.Networks) && (len(s.Networks) == 0 || &s.Networks[0] == &other.Networks[0])
	return (same || slices.Equal(s.Networks, other.Networks)) && maps.Equal(s.Addrs, other.Addrs) && maps.Equal(s.Relays, other.Relays)
}

// With returns the Site with more addresses, all described by what (see Addrs).
func (s Site) With(addrs []netip.Addr, what string) Site {
	all := make(map[netip.Addr]string, len(s.Addrs)+len(addrs))
	maps.Copy(all, s.Addrs)
	for _, a := range addrs {
		all[a.Unmap().WithZone("")] = what
	}
	s.Addrs = all
	return s
}

// WithRelays is With for addresses of nodes. A peer's message may come from one of them: a node
// that forwards packets for the gateway's Service to another node replaces the source by its own
// address.
func (s Site) WithRelays(addrs []netip.Addr, what string) Site {
	s = s.With(addrs, what)
	all := make(map[netip.Addr]bool, len(s.Relays)+len(addrs))
	maps.Copy(all, s.Relays)
	for _, a := range addrs {
		all[a.Unmap().WithZone("")] = true
	}
	s.Relays = all
	return s
}

// CheckEndpoint returns the reason why no gateway of a peer can be at addr, or "". A peer chooses
// the address, or the name that resolves to it, and we send UDP packets there. Callers check a
// literal address when they read it, and every address again before the gateway uses it, because a
// DNS server may give a different answer each time.
func (s Site) CheckEndpoint(addr netip.Addr) string {
	return checkWith(addr, func(addr netip.Addr) string {
		i := slices.IndexFunc(s.Networks, func(n SiteNetwork) bool { return n.Prefix.Contains(addr) })
		return s.is(addr, i)
	})
}

// is returns how the Site describes addr, which lies in s.Networks[in], or in none if in is -1. It
// returns "" if addr is none of the Site's.
func (s Site) is(addr netip.Addr, in int) string {
	if in >= 0 {
		return fmt.Sprintf("%v is inside %v, %s", addr, s.Networks[in].Prefix, s.Networks[in].What)
	}
	if what, is := s.Addrs[addr]; is {
		return fmt.Sprintf("%v is %s", addr, what)
	}
	return ""
}

// checkWith implements CheckEndpoint. site returns why a Site excludes an address, or "".
func checkWith(addr netip.Addr, site func(netip.Addr) string) string {
	if !addr.IsValid() {
		return "there is no address"
	}
	if addr.Zone() != "" {
		return quote(addr.String()) + " has a zone" // which may be any text
	}
	addr = addr.Unmap() // for the kernel it is the IPv4 address
	if v4, how := embedded(addr); how != "" {
		if wrong := checkWith(v4, site); wrong != "" {
			return fmt.Sprintf("%v leads to %v (%s): %s", addr, v4, how, wrong)
		}
	}
	for _, ranges := range [][]specialRange{specialRanges, metadataRanges, endpointRanges} {
		for _, r := range ranges {
			if r.prefix.Contains(addr) && !nat64.Contains(addr) {
				return fmt.Sprintf("%v is in %v (%s)", addr, r.prefix, r.name)
			}
		}
	}
	return site(addr)
}

// A SiteIndex checks addresses as its Site does, but fast enough for each message: the cost hardly
// depends on the number of networks, of which each peer adds two. It is immutable.
type SiteIndex struct {
	site     Site
	networks *prefixIndex // of site.Networks
}

// Index makes the index of a Site.
func (s Site) Index() *SiteIndex {
	x := &SiteIndex{site: s, networks: &prefixIndex{in: make(map[netip.Prefix][]int, len(s.Networks))}}
	for i := range s.Networks {
		x.networks.add(s.Networks[i].Prefix, i)
	}
	return x
}

// find returns the number of a network that contains addr and has this Relay value, or -1.
func (x *SiteIndex) find(addr netip.Addr, relay bool) int {
	return x.networks.find(addr, func(i int) bool { return x.site.Networks[i].Relay == relay })
}

// CheckEndpoint returns the same as Site.CheckEndpoint.
func (x *SiteIndex) CheckEndpoint(addr netip.Addr) string {
	return checkWith(addr, func(addr netip.Addr) string {
		first := -1 // lowest number of a network that contains addr
		x.networks.find(addr, func(i int) bool {
			if first < 0 || i < first {
				first = i
			}
			return false
		})
		return x.site.is(addr, first)
	})
}

// CheckSource returns the reason why no message of a peer can come from addr, or "". Replies go to
// the source of a message, so it is checked like an endpoint. Only addresses from which Services
// relay are exempt.
func (x *SiteIndex) CheckSource(addr netip.Addr) string {
	if x.site.Relays[addr.Unmap().WithZone("")] {
		return ""
	}
	return checkWith(addr, func(addr netip.Addr) string { return x.site.is(addr, x.find(addr, false)) })
}

// RelaysFrom reports whether Services relay messages of peers from addr, so that the address does
// not identify the sender.
func (x *SiteIndex) RelaysFrom(addr netip.Addr) bool {
	addr = addr.Unmap().WithZone("")
	return x.site.Relays[addr] || x.find(addr, true) >= 0
}

// endpointRanges cannot contain a gateway, in addition to specialRanges and metadataRanges. Pods
// may have such addresses (GKE allows class E).
var endpointRanges = []specialRange{
	{netip.MustParsePrefix("240.0.0.0/4"), "reserved, RFC 1112"},
}

// Networks of IPv6 addresses that embed the IPv4 address to which packets go in the end.
var (
	nat64     = netip.MustParsePrefix("64:ff9b::/96") // DNS64 returns it in networks without IPv4
	sixToFour = netip.MustParsePrefix("2002::/16")
	teredo    = netip.MustParsePrefix("2001::/32")
)

// embedded returns the IPv4 address in an IPv6 address, and how a packet gets there; how is empty
// where there is none.
func embedded(addr netip.Addr) (v4 netip.Addr, how string) {
	b := addr.As16()
	switch {
	case nat64.Contains(addr):
		return netip.AddrFrom4([4]byte(b[12:16])), "NAT64, RFC 6052"
	case sixToFour.Contains(addr):
		return netip.AddrFrom4([4]byte(b[2:6])), "6to4, RFC 3056"
	case teredo.Contains(addr): // the client's address, its bits inverted
		return netip.AddrFrom4([4]byte{^b[12], ^b[13], ^b[14], ^b[15]}), "Teredo, RFC 4380"
	}
	return netip.Addr{}, ""
}
