package kernel

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// A FilterRule is one rule of a FilterChain: matches, which must all hold, and then a statement.
// String returns its text for nft(8). Package rtnl compiles the same terms to the kernel's
// expressions.
type FilterRule []Term

func (r FilterRule) String() string {
	words := make([]string, len(r))
	for i, term := range r {
		words[i] = term.String()
	}
	return strings.Join(words, " ")
}

// A Term is a match or a statement of a FilterRule, one of the types of this file. String returns
// its text for nft(8).
type Term interface {
	fmt.Stringer
	term()
}

// A Fixed is a term without parameters.
type Fixed string

// Matches without parameters.
const (
	IsAnswer      Fixed = "ct state established,related"
	IsTranslated  Fixed = "ct status dnat" // netfilter has translated the destination, on this node
	IsICMP        Fixed = "ip protocol icmp"
	HasReturnPath Fixed = "fib saddr . iif oif != 0" // an answer would leave by the device through which the packet arrived
	IsLocal       Fixed = "fib daddr type local"     // the destination is an address of the node
	IsNotLocal    Fixed = "fib daddr type != local"
	IsPriorityTag Fixed = "@ll,116,12 0" // the VLAN ID of the frame's tag is 0, which is 802.1p
)

// Statements without parameters. A rule that drops packets also counts them.
const (
	DoAccept     Fixed = "accept"
	DoReturn     Fixed = "return"
	DoDrop       Fixed = "counter drop"
	DoNotTrack   Fixed = "notrack"
	DoKeepSource Fixed = "snat to ip saddr" // translate the source to itself, so that no later chain translates it
)

// A Field is a packet field that can be looked up in sets.
type Field string

// Fields.
const (
	Source       Field = "ip saddr"
	Destination  Field = "ip daddr"
	Destination6 Field = "ip6 daddr"
	InDevice     Field = "iifname"
)

type (
	// InSet matches if a field is in a set.
	InSet struct {
		Field Field
		Set   string
	}
	// NotInSet matches if a field is not in a set.
	NotInSet InSet
	// NearSet matches if a set contains the /16 network to which the field, an IPv4 address,
	// belongs.
	NearSet InSet

	// From matches the name of the incoming device. A trailing "*" matches any suffix.
	From string
	// To matches the name of the outgoing device, in the form of From.
	To string
	// NotFrom matches every incoming device that does not have this name.
	NotFrom string
	// FromKind matches the kind of the incoming device (Linux 5.7 and later), such as veth.
	FromKind string

	// ToPort matches the destination port of UDP.
	ToPort uint16
	// EtherType matches the EtherType of a frame, after a VLAN tag that Linux removed.
	EtherType uint16
	// ICMPHead matches type and code. An earlier match must have selected ICMP.
	ICMPHead struct{ Type, Code byte }

	// Jump evaluates another chain. Evaluation continues with the next rule if that chain does not
	// decide.
	Jump string
	// SourceTo translates the source to an address.
	SourceTo struct{ Addr netip.Addr }
)

// EtherTypes of a Bridge.
const (
	VLANTag    EtherType = 0x8100
	ServiceTag EtherType = 0x88a8
)

func (f Fixed) String() string    { return string(f) }
func (m InSet) String() string    { return string(m.Field) + " @" + m.Set }
func (m NotInSet) String() string { return string(m.Field) + " != @" + m.Set }
func (m NearSet) String() string  { return string(m.Field) + " & 255.255.0.0 @" + m.Set }
func (d From) String() string     { return "iifname " + strconv.Quote(string(d)) }
func (d To) String() string       { return "oifname " + strconv.Quote(string(d)) }
func (d NotFrom) String() string  { return "iifname != " + strconv.Quote(string(d)) }
func (k FromKind) String() string { return "meta iifkind " + strconv.Quote(string(k)) }
func (p ToPort) String() string   { return fmt.Sprintf("udp dport %d", uint16(p)) }
func (h ICMPHead) String() string { return fmt.Sprintf("@th,0,16 0x%02x%02x", h.Type, h.Code) }
func (c Jump) String() string     { return "jump " + string(c) }
func (s SourceTo) String() string { return "snat to " + s.Addr.String() }

func (t EtherType) String() string {
	if t == ServiceTag {
		return "meta protocol 8021ad"
	}
	return "meta protocol 8021q"
}

func (Fixed) term()     {}
func (InSet) term()     {}
func (NotInSet) term()  {}
func (NearSet) term()   {}
func (From) term()      {}
func (To) term()        {}
func (NotFrom) term()   {}
func (FromKind) term()  {}
func (ToPort) term()    {}
func (EtherType) term() {}
func (ICMPHead) term()  {}
func (Jump) term()      {}
func (SourceTo) term()  {}

// Terms that many rules share.
const (
	toOverlay   = ToPort(OverlayPort)
	fromOverlay = From(OverlayDevice)
	fromOurs    = From(TunPrefix + "*")
	toOurs      = To(TunPrefix + "*")
)

var (
	fromRemote     = InSet{Source, "remote"}
	toRemote       = InSet{Destination, "remote"}
	fromNearRemote = NearSet{Source, "remote16"}
	toNearRemote   = NearSet{Destination, "remote16"}
	toRemote6      = InSet{Destination6, "remote6"}
	fromGateways   = InSet{Source, "gateways"}
	toGateways     = InSet{Destination, "gateways"}
	toOwn          = InSet{Destination, "own"}
	byUnderlay     = InSet{InDevice, "underlay"}
)
