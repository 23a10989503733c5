package fabric

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// A Site holds the addresses of our own cluster, and the networks behind the tunnels. The gateway
// of a peer cannot have an address that the Site contains. A Site is read-only. The zero Site has
// no addresses.
type Site struct {
	Networks []SiteNetwork         // may overlap; the first one that contains an address counts
	Addrs    map[netip.Addr]string // single addresses; the value ends the sentence "192.0.2.1 is ..."
	Relays   map[netip.Addr]bool   // the keys of Addrs that may be sources of peers' messages; see WithRelays
}

// A SiteNetwork is a network that cannot contain the gateway of a peer.
type SiteNetwork struct {
	Prefix netip.Prefix // the zero Prefix contains nothing
	What   string       // ends the sentence "192.0.2.1 is inside 192.0.2.0/24, ..."
	Relay  bool         // addresses in Prefix may be sources of peers' messages; see WithRelays
}

// Equal reports whether all fields of s and other are equal.
func (s Site) Equal(other Site) bool {
	same := len(s.Networks) == len(other.Networks) && (len(s.Networks) == 0 || &s.Networks[0] == &other.Networks[0])
	return (same || slices.Equal(s.Networks, other.Networks)) && maps.Equal(s.Addrs, other.Addrs) && maps.Equal(s.Relays, other.Relays)
}

// With returns a copy of the Site with additional addresses. description becomes the value of each
// of these addresses in Addrs.
func (s Site) With(addrs []netip.Addr, description string) Site {
	all := make(map[netip.Addr]string, len(s.Addrs)+len(addrs))
	maps.Copy(all, s.Addrs)
	for _, a := range addrs {
		all[a.Unmap().WithZone("")] = description
	}
	s.Addrs = all
	return s
}

// WithRelays is like With, for addresses of nodes that forward packets for the gateway's Service to
// other nodes. Such a node replaces the source of a packet by its own address, so a peer's message
// may have this address as source.
func (s Site) WithRelays(addrs []netip.Addr, description string) Site {
	s = s.With(addrs, description)
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
// literal address when they read it. They check every address before the gateway uses it, because a
// DNS server may give a different answer each time.
func (s Site) CheckEndpoint(addr netip.Addr) string {
	return checkWith(addr, func(addr netip.Addr) string {
		i := slices.IndexFunc(s.Networks, func(n SiteNetwork) bool { return n.Prefix.Contains(addr) })
		return s.describe(addr, i)
	})
}

// describe returns the description of addr in the Site, or "" if the Site does not contain addr.
// index is the index in s.Networks of the network that contains addr, or -1.
func (s Site) describe(addr netip.Addr, index int) string {
	if index >= 0 {
		return fmt.Sprintf("%v is inside %v, %s", addr, s.Networks[index].Prefix, s.Networks[index].What)
	}
	if what, found := s.Addrs[addr]; found {
		return fmt.Sprintf("%v is %s", addr, what)
	}
	return ""
}

// checkWith implements CheckEndpoint. The function site returns the reason why a Site excludes an
// address, or "".
func checkWith(addr netip.Addr, site func(netip.Addr) string) string {
	if !addr.IsValid() {
		return "there is no address"
	}
	if addr.Zone() != "" {
		return quote(addr.String()) + " has an IPv6 zone" // quoted, because a zone may be any text
	}
	addr = addr.Unmap() // the kernel sends packets for an IPv4-mapped address by IPv4
	if v4, kind := embedded(addr); kind != "" {
		if wrong := checkWith(v4, site); wrong != "" {
			return fmt.Sprintf("%v contains the IPv4 address %v (%s): %s", addr, v4, kind, wrong)
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

// A SiteIndex checks addresses like its Site, but faster. It is fast enough to check each received
// message, even with thousands of networks. A SiteIndex is immutable.
type SiteIndex struct {
	site     Site
	networks *prefixIndex // of site.Networks
}

// Index returns the index of a Site.
func (s Site) Index() *SiteIndex {
	x := &SiteIndex{site: s, networks: &prefixIndex{in: make(map[netip.Prefix][]int, len(s.Networks))}}
	for i := range s.Networks {
		x.networks.add(s.Networks[i].Prefix, i)
	}
	return x
}

// find returns the index of a network that contains addr and whose Relay equals relay, or -1.
func (x *SiteIndex) find(addr netip.Addr, relay bool) int {
	return x.networks.find(addr, func(i int) bool { return x.site.Networks[i].Relay == relay })
}

// CheckEndpoint is a faster form of Site.CheckEndpoint.
func (x *SiteIndex) CheckEndpoint(addr netip.Addr) string {
	return checkWith(addr, func(addr netip.Addr) string {
		first := -1 // lowest index of a network that contains addr; -1: none
		x.networks.find(addr, func(i int) bool {
			if first < 0 || i < first {
				first = i
			}
			return false
		})
		return x.site.describe(addr, first)
	})
}

// CheckSource returns the reason why no message of a peer can come from addr, or "". Replies go to
// the source of a message, so CheckSource checks the source like an endpoint, with one exception:
// addresses of nodes that forward peers' messages are permitted; see WithRelays.
func (x *SiteIndex) CheckSource(addr netip.Addr) string {
	if x.site.Relays[addr.Unmap().WithZone("")] {
		return ""
	}
	return checkWith(addr, func(addr netip.Addr) string { return x.site.describe(addr, x.find(addr, false)) })
}

// RelaysFrom reports whether addr may be the source of forwarded messages of several peers, so that
// it does not identify the sender.
func (x *SiteIndex) RelaysFrom(addr netip.Addr) bool {
	addr = addr.Unmap().WithZone("")
	return x.site.Relays[addr] || x.find(addr, true) >= 0
}

// The gateway of a peer cannot be in endpointRanges, specialRanges or metadataRanges. Pods may have
// addresses in endpointRanges (GKE allows class E).
var endpointRanges = []specialRange{
	{netip.MustParsePrefix("240.0.0.0/4"), "reserved, RFC 1112"},
}

// Networks of IPv6 addresses that embed an IPv4 address. A packet to such an address reaches the
// host with the IPv4 address.
var (
	nat64     = netip.MustParsePrefix("64:ff9b::/96") // DNS64 returns such addresses in networks without IPv4
	sixToFour = netip.MustParsePrefix("2002::/16")
	teredo    = netip.MustParsePrefix("2001::/32")
)

// embedded returns the IPv4 address that is embedded in an IPv6 address. kind is the mechanism that
// carries packets to v4, or "" if addr embeds no address.
func embedded(addr netip.Addr) (v4 netip.Addr, kind string) {
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
