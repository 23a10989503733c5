package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// SourceNAT is an nftables table that decides the source address of flows between our pods and
// peers before foreign rules do. A CNI replaces the source of packets that leave the cluster,
// including packets for peers, by the node's address. A peer would then see the gateway's NAPT
// address instead of the pod's. Only the first chain that decides translates a flow. If we
// translate a source to itself, it therefore stays unchanged. The flow is still tracked, which
// Services need.
//
// A SourceNAT is optional: if the kernel cannot make it, all traffic passes, but peers cannot see
// the addresses of pods. The lists have the form of a Filter's lists.
type SourceNAT struct {
	Local    string // IPv4 networks of our own node's pods
	Pods     string // IPv4 networks of all pods of the cluster
	Remote   string // IPv4 networks of peers
	Underlay string // devices by which our node reaches the other nodes
	Self     netip.Addr
}

// SourceNATSets has the inputs of SourceNATFor, in any order.
type SourceNATSets struct {
	Local, Pods, Remote []netip.Prefix
	Underlay            []string
	Self                netip.Addr // IPv4 address of our node that gateways know
}

// SourceNATFor makes a SourceNAT. It leaves out IPv6 networks, and networks that are inside other
// networks.
func SourceNATFor(s SourceNATSets) SourceNAT {
	return SourceNAT{Local: networkElements(s.Local), Pods: networkElements(s.Pods), Remote: networkElements(s.Remote), Underlay: devices(s.Underlay), Self: s.Self}
}

// SourceNATPriority is the priority of the chain at postrouting. Foreign chains are at 100 (srcnat)
// or a little before.
const SourceNATPriority = 0

// Chains returns the chains. A chain comes before the chains that jump to it.
//
// A pod of this node keeps its address when it sends to a peer, directly or through a Service. The
// answers return to this node, which tracks the connection. If the API server has not reported the
// address of a pod yet, the incoming device identifies the pod (Linux 5.7 and later; earlier
// kernels never match this rule).
//
// A pod of another node keeps its address if the packet comes through the overlay. If it comes by
// another path, for example to a NodePort, the answers have to return to this node, so the source
// becomes the node's own address. A host that is not a pod is handled in the same way. A MASQUERADE
// rule of kube-proxy would instead use the address of the overlay's device or, if the device has no
// address, any address of the node. The gateway may have no route to that address.
//
// Packets from a peer to a pod keep their source, too, because some CNIs masquerade packets from
// outside of the cluster. If the peer sent them to a mapped endpoint that is a Service, kube-proxy
// chooses the source.
//
// The set of remote networks is matched last, because that costs the first packet of a flow 300 ns
// with a thousand peers.
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

// SelfOf returns the address Self that the rules of a SourceNAT's chain "topeers" contain, or the
// zero Addr. texts are the texts of these rules.
func SelfOf(texts []string) (self netip.Addr) {
	for _, text := range texts {
		_, after, _ := strings.Cut(text, "snat to ")
		if addr, err := netip.ParseAddr(after); err == nil {
			self = addr
		}
	}
	return self
}

// Sets returns the sets of the table. Only their elements differ between SourceNATs.
func (s SourceNAT) Sets() []FilterSet {
	return []FilterSet{
		{"local", "ipv4_addr", true, 0, s.Local},
		{"pods", "ipv4_addr", true, 0, s.Pods},
		{"remote", "ipv4_addr", true, 0, s.Remote},
		{"underlay", "ifname", false, 0, s.Underlay},
	}
}

// WithSet returns the SourceNAT with other elements in the named set.
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

// nftCommand returns a line for nft(8) that replaces a table in one step.
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
