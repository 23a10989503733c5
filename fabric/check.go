package fabric

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// report collects problems.
type report struct {
	origin   Origin // the object of the problems that the method add records
	problems []Problem
}

func (r *report) add(field, format string, args ...any) { r.addAt(r.at(field), format, args...) }

func (r *report) addAt(at place, format string, args ...any) {
	r.problems = append(r.problems, Problem{at.origin, at.field, fmt.Sprintf(format, args...)})
}

// at returns the place of a field in the object r.origin.
func (r *report) at(field string) place { return placeIn(r.origin, field) }

// A place is the field of an object from which a value was read.
type place struct {
	origin Origin
	field  string // JSON path
	label  string // the name of the value in problems about other values
}

func placeIn(o Origin, field string) place { return place{o, field, field} }

// quote quotes an untrusted string for a message. It escapes control characters, so that none
// reaches a terminal. It truncates the string, so that it cannot fill a log.
func quote(s string) string {
	const limit = 100
	if len(s) <= limit {
		return strconv.Quote(s)
	}
	cut := limit
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return strconv.Quote(s[:cut]) + "..."
}

// CheckClusterID returns the reason why a cluster ID is invalid, or "". An ID must be a Kubernetes
// label value, because Liqo finds the objects of a peer by the label clusterID. The ID is also a
// label of every metric.
func CheckClusterID(id string) string {
	const want = "want at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit"
	switch {
	case id == "":
		return "is empty; " + want
	case len(id) > 63:
		return fmt.Sprintf("%s has %d characters; %s", quote(id), len(id), want)
	}
	for i := range len(id) {
		if c := id[i]; !isAlphanumeric(c) && (i == 0 || i == len(id)-1 || c != '-' && c != '_' && c != '.') {
			return quote(id) + " has an invalid character; " + want
		}
	}
	return ""
}

// CheckClusterName returns the reason why a cluster name is invalid, or "". Names are only
// displayed, so any printable text is valid.
func CheckClusterName(name string) string {
	const want = "want at most 253 printable characters"
	if len(name) > 253 {
		return fmt.Sprintf("%s has %d bytes; %s", quote(name), len(name), want)
	}
	for _, c := range name {
		if c == utf8.RuneError || !unicode.IsPrint(c) {
			return quote(name) + " has a character that cannot be printed; " + want
		}
	}
	return ""
}

func isAlphanumeric(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

// A specialRange is a range of addresses with a special purpose. name is the purpose, for messages.
type specialRange struct {
	prefix netip.Prefix
	name   string
}

// specialRanges cannot belong to any cluster's pods. 240.0.0.0/4 is missing here, because some
// clusters use it for pods (GKE allows class E).
var specialRanges = []specialRange{
	{netip.MustParsePrefix("0.0.0.0/8"), "this network, RFC 1122"},
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("255.255.255.255/32"), "limited broadcast"},
	{netip.MustParsePrefix("::/8"), "unspecified, loopback, IPv4-mapped and NAT64, RFC 4291 and 6052"},
	{netip.MustParsePrefix("100::/64"), "discard-only, RFC 6666"},
	{netip.MustParsePrefix("fe80::/10"), "link-local"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
}

// metadataRanges contain the services from which machines in a cloud get their credentials (checked
// 2026-11). Services at link-local addresses are not among them. A pod network may contain such a
// range, but an endpoint may not be in one. natengine also drops packets of peers to the IPv6
// ranges.
var metadataRanges = []specialRange{
	{netip.MustParsePrefix("fd00:ec2::/32"), "services of Amazon's machines"},
	{netip.MustParsePrefix("fd20:ce::254/128"), "the metadata service of Google's machines"},
	{netip.MustParsePrefix("100.100.100.200/32"), "the metadata service of Alibaba's machines"},
	{netip.MustParsePrefix("168.63.129.16/32"), "services of Azure's machines"},
	{netip.MustParsePrefix("192.0.0.192/32"), "the metadata service of Oracle's machines"},
}

// MetadataRanges returns the networks that contain the metadata services of clouds. Services at
// link-local addresses are not among them.
func MetadataRanges() []netip.Prefix { return prefixesOf(metadataRanges) }

// SpecialRanges returns the networks that cannot belong to any cluster's pods.
func SpecialRanges() []netip.Prefix { return prefixesOf(specialRanges) }

func prefixesOf(ranges []specialRange) []netip.Prefix {
	all := make([]netip.Prefix, len(ranges))
	for i, s := range ranges {
		all[i] = s.prefix
	}
	return all
}

func special(p netip.Prefix) (specialRange, bool) {
	for _, s := range specialRanges {
		if s.prefix.Overlaps(p) {
			return s, true
		}
	}
	return specialRange{}, false
}

// A pair is one network in two forms: own is the form in its own cluster, and seen is the form that
// the other side uses. ownAt and seenAt are the places from which they were read.
type pair struct {
	own, seen     netip.Prefix
	ownAt, seenAt place
}

func (p pair) remapped() bool { return p.own != p.seen }

// at returns the place of the value that determines p.seen.
func (p pair) at() place {
	if p.remapped() {
		return p.seenAt
	}
	return p.ownAt
}

func (p *Peer) pairs(at places) (localPod, localExternal, remotePod, remoteExternal pair) {
	return pair{p.Local.Pod, p.Local.PodSeen, at.localPod, at.localPodSeen},
		pair{p.Local.External, p.Local.ExternalSeen, at.localExternal, at.localExternalSeen},
		pair{p.Remote.Pod, p.Remote.PodSeen, at.remotePod, at.remotePodSeen},
		pair{p.Remote.External, p.Remote.ExternalSeen, at.remoteExternal, at.remoteExternalSeen}
}

// check returns all faults of a parsed peer. It does not compare the peer with other peers. from
// has the places from which the values of p were read.
func (p *Peer) check(from places) []Problem {
	var r report
	if wrong := CheckClusterID(p.ID); wrong != "" {
		r.addAt(from.id, "%s", wrong)
	}
	if wrong := CheckClusterName(p.Name); wrong != "" {
		r.addAt(from.name, "%s", wrong)
	}

	localPod, localExternal, remotePod, remoteExternal := p.pairs(from)
	sound := true
	for _, n := range []pair{localPod, localExternal, remotePod, remoteExternal} {
		sound = r.checkNetwork(n) && sound
	}
	if sound {
		r.checkOverlaps(localPod, localExternal, remotePod, remoteExternal)
	}

	if wrong := checkEndpoint(p.Endpoint); wrong != "" {
		r.addAt(from.endpoint, "%s", wrong)
	} else if addr, err := netip.ParseAddr(p.Endpoint); err == nil && sound {
		for _, n := range []pair{remotePod, remoteExternal} {
			if n.seen.Contains(addr) {
				// If a network behind the tunnel contained the endpoint, the host would route the
				// tunnel's own UDP packets into the tunnel.
				r.addAt(from.endpoint, "%s is inside %v (%s), which is reached through the tunnel itself; want an address outside", addr, n.seen, n.at().label)
			}
		}
	}
	if p.Port == 0 {
		r.addAt(from.port, "is 0; want a UDP port from 1 to 65535")
	}
	if wrong := checkPublicKey(p.PublicKey); wrong != "" {
		r.addAt(from.publicKey, "%s", wrong)
	}
	r.tunnels(from.tunnels, p.PublicKey, p.Port, p.Tunnels)
	return r.problems
}

// checkNetwork checks one network and its remapping. If it returns false, n is invalid, and callers
// need not compare n with other networks.
func (r *report) checkNetwork(n pair) bool {
	sound := r.checkPrefix(n.ownAt, n.own)
	if !n.remapped() {
		return sound
	}
	sound = r.checkPrefix(n.seenAt, n.seen) && sound
	switch {
	case !sound:
	case n.own.Addr().Is4() != n.seen.Addr().Is4():
		r.addAt(n.seenAt, "%v is %s, but %s is %v; want a network of the same family", n.seen, family(n.seen), n.ownAt.label, n.own)
		sound = false
	case n.own.Bits() != n.seen.Bits():
		r.addAt(n.seenAt, "%v differs in length from %s, %v; want a /%d", n.seen, n.ownAt.label, n.own, n.own.Bits())
		sound = false
	}
	return sound
}

// CheckNetwork returns the reason why a network of pods or of mapped endpoints is invalid, or "".
// It allows the same prefix lengths as the CRD. Every permitted network has at least two addresses:
// the network address, which NAPT uses, and a first host.
func CheckNetwork(p netip.Prefix) string {
	shortest := 8
	if !p.Addr().Is4() {
		shortest = 16
	}
	switch longest := p.Addr().BitLen() - 2; {
	case !p.IsValid():
		return "is absent; want a CIDR such as 10.244.0.0/16"
	case p != p.Masked():
		return fmt.Sprintf("%q has host bits set; want %v", p.String(), p.Masked())
	case p.Bits() < shortest || p.Bits() > longest:
		return fmt.Sprintf("%v has a length of %d; want one from %d to %d", p, p.Bits(), shortest, longest)
	}
	if s, found := special(p); found {
		return fmt.Sprintf("%v overlaps %v (%s); want a network that pods can have", p, s.prefix, s.name)
	}
	return ""
}

// checkPrefix adds the result of CheckNetwork to the report. It returns whether p is valid.
func (r *report) checkPrefix(at place, p netip.Prefix) bool {
	wrong := CheckNetwork(p)
	if wrong != "" {
		r.addAt(at, "%s", wrong)
	}
	return wrong == ""
}

// checkOverlaps checks the four networks of one peer against each other. Some overlaps are
// permitted, because each side chooses its networks independently: Pa@B may equal Pb@A or Xb@A, and
// Xa@B may equal Pb@A.
func (r *report) checkOverlaps(localPod, localExternal, remotePod, remoteExternal pair) {
	for _, n := range []pair{localExternal, remotePod, remoteExternal} {
		if n.own.Addr().Is4() != localPod.own.Addr().Is4() {
			r.addAt(n.ownAt, "%v is %s, but %s is %v; want networks of one family", n.own, family(n.own), localPod.ownAt.label, localPod.own)
			return
		}
	}
	r.apart(localExternal.ownAt, localExternal.own, localPod.ownAt, localPod.own)
	if localExternal.remapped() || localPod.remapped() {
		r.apart(localExternal.at(), localExternal.seen, localPod.at(), localPod.seen)
	}
	r.apart(remoteExternal.at(), remoteExternal.seen, remotePod.at(), remotePod.seen)
	for _, remote := range []pair{remotePod, remoteExternal} {
		for _, local := range []pair{localPod, localExternal} {
			r.apart(remote.at(), remote.seen, local.ownAt, local.own)
		}
	}
}

func (r *report) apart(at place, p netip.Prefix, otherAt place, other netip.Prefix) {
	if p.Overlaps(other) {
		r.addAt(at, "%v overlaps %s, %v; want networks that do not overlap", p, otherAt.label, other)
	}
}

func family(p netip.Prefix) string {
	if p.Addr().Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// checkEndpoint returns the reason why the endpoint of a peer's gateway is invalid, or "". A peer
// chooses this value, and we send UDP packets there.
func checkEndpoint(s string) string {
	const want = "want the IP address or DNS name of the peer's gateway"
	if s == "" {
		return "is empty; " + want
	}
	addr, err := netip.ParseAddr(s)
	if err != nil {
		if wrong := checkName(s); wrong != "" {
			return quote(s) + " " + wrong + "; " + want
		}
		return ""
	}
	if addr.Is4In6() {
		return fmt.Sprintf("%s is an IPv4 address in IPv6 form; want %s", quote(s), addr.Unmap())
	}
	if wrong := (Site{}).CheckEndpoint(addr); wrong != "" {
		return wrong + "; " + want
	}
	return ""
}

// checkName returns the reason why a DNS name is invalid, or "". It accepts RFC 1123 labels, and an
// optional dot at the end. It also accepts '_' in labels, because the DNS allows it and some
// providers use it.
func checkName(s string) string {
	name := strings.TrimSuffix(s, ".")
	if len(name) > 253 {
		return "is longer than 253 characters"
	}
	label := ""
	for label = range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return "is neither an IP address nor a DNS name"
		}
		for i := range len(label) {
			if c := label[i]; !isAlphanumeric(c) && c != '-' && c != '_' {
				return "is neither an IP address nor a DNS name"
			}
		}
	}
	label = strings.ToLower(label)
	hex, isHex := strings.CutPrefix(label, "0x")
	switch {
	case label == "localhost":
		return "is this host"
	case strings.Trim(label, "0123456789") == "" || isHex && strings.Trim(hex, "0123456789abcdef") == "":
		return "ends in a number, but is not an IP address" // no top-level domain is a number (RFC 3696); resolvers disagree about such names
	}
	return ""
}

// checkReal returns the reason why the endpoint of a mapping is invalid, or "".
func checkReal(addr netip.Addr) string {
	if addr == GatewayAddr || addr == GatewayAddr6 {
		return ""
	}
	for _, s := range slices.Concat(specialRanges, metadataRanges) {
		if s.prefix.Contains(addr.WithZone("")) {
			return fmt.Sprintf("%v is in %v (%s); want an address that is reachable from our pod network", addr, s.prefix, s.name)
		}
	}
	return ""
}
