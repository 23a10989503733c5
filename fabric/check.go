package fabric

import (
	"encoding/base64"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// report collects the problems of one object.
type report struct {
	origin   Origin
	problems []Problem
}

func (r *report) add(field, format string, args ...any) {
	r.problems = append(r.problems, Problem{r.origin, field, fmt.Sprintf(format, args...)})
}

// quote prints a string from outside: escaped, so that it cannot write into a
// terminal, and cut, so that it cannot fill a log.
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

// CheckClusterID returns what is wrong with a cluster ID, or "". It has to be a
// Kubernetes label value, because that is how Liqo finds the objects of a peer
// (label clusterID), and it is a label of every metric.
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
			return quote(id) + " has a character that does not belong there; " + want
		}
	}
	return ""
}

// CheckClusterName returns what is wrong with a cluster name, or "". Names are
// shown to people, so that little is asked of them.
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

// specialRange is a range that can belong to no cluster's pods. 240.0.0.0/4 is
// not among them: clusters do use it for pods (GKE allows class E).
type specialRange struct {
	prefix netip.Prefix
	name   string
}

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

// metadataRanges are where clouds show a machine its credentials: natengine leads no peer there. In IPv4 these are
// link-local addresses. A network of pods may contain them, an endpoint may not be one (2026-11).
var metadataRanges = []specialRange{
	{netip.MustParsePrefix("fd00:ec2::/32"), "services of Amazon's machines"},
	{netip.MustParsePrefix("fd20:ce::254/128"), "the metadata service of Google's machines"},
}

// SpecialRanges returns the networks that can belong to no cluster's pods.
func SpecialRanges() []netip.Prefix {
	all := make([]netip.Prefix, len(specialRanges))
	for i, s := range specialRanges {
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

// pair is one network in its two forms, with the JSON fields they came from.
type pair struct {
	own, seen           netip.Prefix
	ownField, seenField string
}

func (p pair) remapped() bool { return p.own != p.seen }

// field names the JSON field that decides what the other side sees.
func (p pair) field() string {
	if p.remapped() {
		return p.seenField
	}
	return p.ownField
}

func (p *Peer) pairs() (localPod, localExternal, remotePod, remoteExternal pair) {
	return pair{p.Local.Pod, p.Local.PodSeen, "spec.localPodCIDR", "spec.localNATPodCIDR"},
		pair{p.Local.External, p.Local.ExternalSeen, "spec.localExternalCIDR", "spec.localNATExternalCIDR"},
		pair{p.Remote.Pod, p.Remote.PodSeen, "spec.remotePodCIDR", "spec.remoteNATPodCIDR"},
		pair{p.Remote.External, p.Remote.ExternalSeen, "spec.remoteExternalCIDR", "spec.remoteNATExternalCIDR"}
}

// check finds everything that is wrong with the peer taken alone. It is the
// whole meaning of a valid peer; PeerFrom adds only the reading of text.
func (p *Peer) check() []Problem {
	r := report{origin: p.Origin}
	if wrong := CheckClusterID(p.ID); wrong != "" {
		r.add("spec.clusterIdentity.clusterID", "%s", wrong)
	}
	if wrong := CheckClusterName(p.Name); wrong != "" {
		r.add("spec.clusterIdentity.clusterName", "%s", wrong)
	}

	localPod, localExternal, remotePod, remoteExternal := p.pairs()
	sound := true
	for _, n := range []pair{localPod, localExternal, remotePod, remoteExternal} {
		sound = r.network(n) && sound
	}
	if sound {
		r.together(localPod, localExternal, remotePod, remoteExternal)
	}

	if wrong := checkEndpoint(p.Endpoint); wrong != "" {
		r.add("spec.endpointIP", "%s", wrong)
	} else if addr, err := netip.ParseAddr(p.Endpoint); err == nil && sound {
		for _, n := range []pair{remotePod, remoteExternal} {
			if n.seen.Contains(addr) {
				// The host would route the tunnel's own UDP packets into the tunnel.
				r.add("spec.endpointIP", "%s is inside %v (%s), which is reached through the tunnel itself; want an address outside", addr, n.seen, n.field())
			}
		}
	}
	if p.Port == 0 {
		r.add("spec.backend_config.port", "is 0; want a UDP port from 1 to 65535")
	}
	if p.PublicKey == ([32]byte{}) {
		r.add("spec.backend_config.publicKey", "is all zero; want a WireGuard public key")
	}
	r.tunnels(p.PublicKey, p.Port, p.Tunnels)
	return r.problems
}

// network checks one network and its remapping; false means that comparing it
// with others makes no sense.
func (r *report) network(n pair) bool {
	sound := r.prefix(n.ownField, n.own)
	if !n.remapped() {
		return sound
	}
	sound = r.prefix(n.seenField, n.seen) && sound
	switch {
	case !sound:
	case n.own.Addr().Is4() != n.seen.Addr().Is4():
		r.add(n.seenField, "%v is %s, but %s is %v; want a network of the same family", n.seen, family(n.seen), n.ownField, n.own)
		sound = false
	case n.own.Bits() != n.seen.Bits():
		r.add(n.seenField, "%v has another length than %s, %v; want a /%d", n.seen, n.ownField, n.own, n.own.Bits())
		sound = false
	}
	return sound
}

// CheckNetwork says what is wrong with a network of pods or mapped endpoints by
// itself, or "". The bounds of its length are those of the CRD: room for the network
// address, which belongs to NAPT, and for a first host.
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
	if s, is := special(p); is {
		return fmt.Sprintf("%v overlaps %v (%s); want a network that pods can have", p, s.prefix, s.name)
	}
	return ""
}

// prefix is CheckNetwork for a report.
func (r *report) prefix(field string, p netip.Prefix) bool {
	wrong := CheckNetwork(p)
	if wrong != "" {
		r.add(field, "%s", wrong)
	}
	return wrong == ""
}

// together checks the four networks of one peer against each other. Some
// overlaps are normal and must pass: Pa@B equal to Pb@A, Xa@B equal to Pb@A,
// Pa@B equal to Xb@A, because each side chooses for itself.
func (r *report) together(localPod, localExternal, remotePod, remoteExternal pair) {
	for _, n := range []pair{localExternal, remotePod, remoteExternal} {
		if n.own.Addr().Is4() != localPod.own.Addr().Is4() {
			r.add(n.ownField, "%v is %s, but %s is %v; want networks of one family", n.own, family(n.own), localPod.ownField, localPod.own)
			return
		}
	}
	r.apart(localExternal.ownField, localExternal.own, localPod.ownField, localPod.own)
	if localExternal.remapped() || localPod.remapped() {
		r.apart(localExternal.field(), localExternal.seen, localPod.field(), localPod.seen)
	}
	r.apart(remoteExternal.field(), remoteExternal.seen, remotePod.field(), remotePod.seen)
	for _, remote := range []pair{remotePod, remoteExternal} {
		for _, local := range []pair{localPod, localExternal} {
			r.apart(remote.field(), remote.seen, local.ownField, local.own)
		}
	}
}

func (r *report) apart(field string, p netip.Prefix, otherField string, other netip.Prefix) {
	if p.Overlaps(other) {
		r.add(field, "%v overlaps %s, %v; want a network of its own", p, otherField, other)
	}
}

func family(p netip.Prefix) string {
	if p.Addr().Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// checkEndpoint says what is wrong with the address of a peer's gateway, or "".
// A peer chooses this value, and we send UDP packets there.
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
	if addr.Zone() != "" {
		return quote(s) + " has a zone; " + want
	}
	if addr.Is4In6() {
		return fmt.Sprintf("%s is an IPv4 address in IPv6 form; want %s", quote(s), addr.Unmap())
	}
	if s, is := special(netip.PrefixFrom(addr, addr.BitLen())); is {
		return fmt.Sprintf("%s is in %v (%s); %s", addr, s.prefix, s.name, want)
	}
	return ""
}

// checkName checks a DNS name: RFC 1123 labels, plus '_' which the DNS allows
// and some providers use, and a dot at the end if wanted.
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
		return "ends in a number, but is no IP address" // no top-level name is one (RFC 3696), and resolvers disagree
	}
	return ""
}

// checkReal says what is wrong with the endpoint of a mapping, or "".
func checkReal(addr netip.Addr) string {
	if addr == GatewayAddr || addr == GatewayAddr6 {
		return ""
	}
	for _, s := range slices.Concat(specialRanges, metadataRanges) {
		if s.prefix.Contains(addr.WithZone("")) {
			return fmt.Sprintf("%v is in %v (%s); want an address that can be reached from our pod network", addr, s.prefix, s.name)
		}
	}
	return ""
}

// ParseKey reads a WireGuard key as wg(8) prints it: 32 bytes in standard
// base64, 44 characters. The error does not repeat the text, which may be secret.
func ParseKey(s string) (key [32]byte, err error) {
	raw, err := base64.StdEncoding.Strict().DecodeString(s)
	switch {
	case err != nil || strings.ContainsAny(s, "\r\n"): // the decoder would skip line ends
		return key, fmt.Errorf("is not base64; want 32 bytes in 44 base64 characters")
	case len(raw) != len(key):
		return key, fmt.Errorf("has %d bytes; want 32 bytes in 44 base64 characters", len(raw))
	}
	if key = [32]byte(raw); key == ([32]byte{}) {
		return key, fmt.Errorf("is all zero; want a key")
	}
	return key, nil
}
