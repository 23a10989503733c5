package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// SourceNAT is a table of nftables that settles the source of flows between our pods and peers before
// others do. A CNI masquerades what leaves the cluster, as far as it knows, behind the address of the
// node; a peer would see the gateway's NAPT address then, and not the pod. A flow is translated once, by
// the first chain that says how: a source that is translated to itself stays what it is, and the flow
// stays tracked, so that Services work.
//
// It is optional: in a kernel that cannot make it all traffic passes, and pods lose their identity.
// The lists are as in Filter.
type SourceNAT struct {
	Local    string // networks of our node's own pods, IPv4
	Pods     string // networks of all pods of the cluster, IPv4
	Remote   string // networks of peers, IPv4
	Underlay string // devices by which our node reaches the others
	Self     netip.Addr
}

// SourceNATSets is what a SourceNAT is made of, in any order.
type SourceNATSets struct {
	Local, Pods, Remote []netip.Prefix
	Underlay            []string
	Self                netip.Addr // the address of our node that gateways know, IPv4
}

// SourceNATFor makes a SourceNAT. Networks inside others are left out, and so is IPv6.
func SourceNATFor(s SourceNATSets) SourceNAT {
	return SourceNAT{Local: NetworkElements(s.Local), Pods: NetworkElements(s.Pods), Remote: NetworkElements(s.Remote), Underlay: devices(s.Underlay), Self: s.Self}
}

// SourceNATPriority is that of the chain at postrouting: before the places that others have, which
// are at 100 (srcnat) or a little before.
const SourceNATPriority = 0

// Chains are the chains, those before that are jumped to.
//
// A pod of ours keeps its address, whether it names the peer's address or a Service that has it as
// an endpoint: the answers come to this node, where the connection is known. A pod whose address the
// API server has not told us yet is known by the device that its packet comes by (Linux 5.7 and
// later; before, such a rule never matches).
//
// A pod of another node keeps it when it comes by the overlay. If it comes another way, to a
// NodePort for example, answers have to come back to this node, and so have those for strangers:
// the source becomes the node's own. A MASQUERADE of kube-proxy would take an address of the
// overlay's device or, where that has none, any address of the node, for which the gateway may know
// no way.
//
// What comes from a peer and is for a pod keeps its source, too: some CNIs masquerade what comes from
// outside of the cluster. If it was for a Service that somebody mapped, kube-proxy decides.
//
// The set of remote networks is searched last: that costs the first packet of a flow 300 ns with a
// thousand peers.
func (s SourceNAT) Chains() []FilterChain {
	toPeers := []FilterRule{
		{InSet{Source, "local"}, DoKeepSource},
		{InSet{Source, "pods"}, Jump("bydevice")},
		{fromRemote, DoReturn},
	}
	if s.Self.IsValid() {
		toPeers = append(toPeers, FilterRule{IsTranslated, SourceTo{s.Self}})
	}
	return []FilterChain{
		{Name: "bydevice", Rules: []FilterRule{
			{fromOverlay, DoKeepSource},
			{byUnderlay, DoReturn},
			{FromKind("veth"), DoKeepSource},
			{FromKind("bridge"), DoKeepSource},
		}},
		{Name: "topeers", Rules: toPeers},
		{Name: "frompeers", Rules: []FilterRule{
			{IsTranslated, DoReturn},
			{DoKeepSource},
		}},
		{Name: "postrouting", Hook: "postrouting", NAT: true, Rules: []FilterRule{
			{toOurs, toRemote, Jump("topeers")},
			{InSet{Destination, "pods"}, fromRemote, Jump("frompeers")},
		}},
	}
}

// SelfOf is the Self of a SourceNAT whose chain "topeers" has rules of these texts; the zero Addr: none.
func SelfOf(texts []string) (self netip.Addr) {
	for _, text := range texts {
		_, after, _ := strings.Cut(text, "snat to ")
		if addr, err := netip.ParseAddr(after); err == nil {
			self = addr
		}
	}
	return self
}

// Sets are the sets, always the same but for their elements.
func (s SourceNAT) Sets() []FilterSet {
	return []FilterSet{
		{"local", "ipv4_addr", true, 0, s.Local},
		{"pods", "ipv4_addr", true, 0, s.Pods},
		{"remote", "ipv4_addr", true, 0, s.Remote},
		{"underlay", "ifname", false, 0, s.Underlay},
	}
}

// WithSet returns the SourceNAT with other elements in the set of a name.
func (s SourceNAT) WithSet(name, elements string) SourceNAT {
	*map[string]*string{"local": &s.Local, "pods": &s.Pods, "remote": &s.Remote, "underlay": &s.Underlay}[name] = elements
	return s
}

func (s SourceNAT) command(remove bool, _ string) string {
	return nftCommand(remove, "ip", s.Sets(), s.Chains())
}

func devices(names []string) string {
	all := slices.DeleteFunc(slices.Sorted(slices.Values(names)), func(name string) bool { return name == "" })
	return strings.Join(slices.Compact(all), " ")
}

// nftCommand is one line for nft(8), which replaces the table of a family in one step.
func nftCommand(remove bool, family string, sets []FilterSet, chains []FilterChain) string {
	c := fmt.Sprintf("add table %s %s; delete table %[1]s %[2]s", family, FilterTable)
	if remove {
		return "nft '" + c + "'"
	}
	c += fmt.Sprintf("; table %s %s { ", family, FilterTable)
	for _, set := range sets {
		flags := ""
		if set.Interval {
			flags = "flags interval; "
		}
		if set.Size > 0 {
			flags = fmt.Sprintf("size %d; ", set.Size)
		}
		c += fmt.Sprintf("set %s { type %s; %s", set.Name, set.Type, flags)
		if set.Elements != "" {
			elements := strings.ReplaceAll(set.Elements, " ", ", ")
			if set.Type == "ifname" {
				elements = `"` + strings.ReplaceAll(set.Elements, " ", `", "`) + `"`
			}
			c += fmt.Sprintf("elements = { %s }; ", elements)
		}
		c += "}; "
	}
	for _, chain := range chains {
		c += "chain " + chain.Name + " { "
		if chain.Hook != "" {
			c += fmt.Sprintf("type %s hook %s priority %d; ", chain.Kind(), chain.Hook, chain.Priority())
		}
		for _, rule := range chain.Rules {
			c += rule.String() + "; "
		}
		c += "}; "
	}
	return "nft '" + c + "}'"
}
