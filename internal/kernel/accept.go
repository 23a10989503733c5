package kernel

import (
	"fmt"
	"net/netip"
	"strings"
)

// Accept represents our rules in a foreign chain for forwarded packets: FORWARD of iptables-nft or
// iptables-legacy, or an nftables chain of any name. The rules accept packets from and to our
// devices. For gateways that are Pods on our node, they also accept UDP and ICMP, because the node
// forwards the gateways' outer packets. They accept TCP between these gateways and other gateways
// that are Pods, because gateways replicate flows. Our rules stand at the end of the chain, or
// directly before a final rule that drops or rejects everything. They exist only while the end of
// the chain drops all other packets, as after `iptables -P FORWARD DROP`. An accept rule in our own
// table would have no effect on the foreign chain. Earlier rules of that chain, such as network
// policies, still apply.
//
// In a wanted State, an Accept without a Chain represents all such chains. Foreign rules stay
// unchanged.
type Accept struct {
	Program string // IptablesNFT, IptablesLegacy or NFT
	Family  string // of an nftables table: "ip" or "inet"
	Table   string
	Chain   string
	// Gateways are the IPv4 addresses of gateways that are Pods on our node, sorted and separated
	// by spaces.
	Gateways string
	// Elsewhere has the addresses of gateways that are Pods on other nodes, in the form of
	// Gateways. It is empty if Gateways is empty.
	Elsewhere string
}

// AcceptFor returns the Accept for a node. local and remote are the addresses, in any order, of the
// gateway Pods on this node and of those on other nodes.
func AcceptFor(local, remote []netip.Addr) Accept {
	a := Accept{Gateways: addresses(local)}
	if a.Gateways != "" {
		a.Elsewhere = addresses(remote)
	}
	return a
}

// InChain returns an Accept for the same chain, without gateways.
func (a Accept) InChain() Accept {
	a.Gateways, a.Elsewhere = "", ""
	return a
}

// WithGatewaysOf returns an Accept for the same chain, but with the gateways of the Accept b.
func (a Accept) WithGatewaysOf(b Accept) Accept {
	a.Gateways, a.Elsewhere = b.Gateways, b.Elsewhere
	return a
}

// The values of Accept.Program, which names the program that owns the chain.
const (
	IptablesNFT    = "iptables-nft"
	IptablesLegacy = "iptables-legacy"
	NFT            = "nft"
)

// acceptComment is the prefix of the comments of our rules in foreign chains. We may remove every
// rule with this prefix. In a rule for a gateway on our node, a colon and the gateway's address
// follow. In a rule between that gateway and one on another node, a hyphen and the other gateway's
// address follow, too.
const acceptComment = "isthmus-route-agent"

// An AcceptRule is a rule of an Accept. It matches our devices, or addresses and a protocol.
type AcceptRule struct {
	In, Out             bool       // packets from our devices, and to them
	Source, Destination netip.Addr // zero: any
	Protocol            string     // "udp", "icmp" or "tcp"; empty: any
	Comment             string
}

// Rules returns the rules of an Accept, in order. The first two are for our devices. The next rules
// are for each gateway on our node in turn. Four of them accept UDP to and from the gateway, and
// ICMP to and from it. Then come rules that accept TCP between this gateway and each later gateway
// in the list, and between this gateway and each gateway on another node.
func (a Accept) Rules() []AcceptRule {
	all := []AcceptRule{{In: true, Comment: acceptComment}, {Out: true, Comment: acceptComment}}
	here, elsewhere := strings.Fields(a.Gateways), strings.Fields(a.Elsewhere)
	for i, text := range here {
		g, comment := addressIn(text), acceptComment+":"+text
		for _, protocol := range []string{"udp", "icmp"} {
			all = append(all, AcceptRule{Destination: g, Protocol: protocol, Comment: comment}, AcceptRule{Source: g, Protocol: protocol, Comment: comment})
		}
		between := func(other netip.Addr, comment string) {
			all = append(all, AcceptRule{Source: other, Destination: g, Protocol: "tcp", Comment: comment},
				AcceptRule{Source: g, Destination: other, Protocol: "tcp", Comment: comment})
		}
		for _, other := range here[i+1:] {
			between(addressIn(other), comment)
		}
		for _, other := range elsewhere {
			between(addressIn(other), comment+"-"+other)
		}
	}
	return all
}

// addressIn parses the address of a gateway. For an invalid text, it returns the unspecified
// address. Only another program that edits our comments can cause this.
func addressIn(text string) netip.Addr {
	if addr, err := netip.ParseAddr(text); err == nil && addr.Is4() {
		return addr
	}
	return netip.IPv4Unspecified()
}

// Comments returns the comments of the rules of an Accept, in order.
func (a Accept) Comments() (all []string) {
	for _, r := range a.Rules() {
		all = append(all, r.Comment)
	}
	return all
}

// OwnComment reports whether a comment marks one of our rules. If the rule is for a gateway on our
// node, local is the address of that gateway. If it is for TCP to and from a gateway on another
// node, remote is the address of the other gateway.
func OwnComment(comment string) (local, remote string, ours bool) {
	if gateways, found := strings.CutPrefix(comment, acceptComment+":"); found {
		local, remote, _ = strings.Cut(gateways, "-")
		return local, remote, true
	}
	return "", "", comment == acceptComment
}

// String names the chain for messages.
func (a Accept) String() string {
	if a.Program == NFT {
		return fmt.Sprintf("chain %s of table %s %s", a.Chain, a.Family, a.Table)
	}
	return a.Chain + " of " + a.Program
}

func (a Accept) command(remove bool, _ string) string {
	if a.InChain() == (Accept{}) {
		a.Program, a.Chain = IptablesNFT, "FORWARD" // the most common one
	}
	if a.Program == NFT {
		if remove {
			return fmt.Sprintf("nft -a list chain %s %s %s; nft delete rule %[1]s %[2]s %[3]s handle N of each rule with comment %s", a.Family, a.Table, a.Chain, acceptComment)
		}
		add := fmt.Sprintf("add rule %s %s %s %%s counter accept comment \"%%s\"", a.Family, a.Table, a.Chain)
		return "nft '" + strings.Join(a.format(add, `iifname "isthmus*"`, `oifname "isthmus*"`, "ip saddr ", "ip daddr ", "meta l4proto "), "; ") + "'"
	}
	verb := " -A "
	if remove {
		verb = " -D "
	}
	rule := a.Program + verb + a.Chain + " %s -m comment --comment %s -j ACCEPT"
	return strings.Join(a.format(rule, "-i isthmus+", "-o isthmus+", "-s ", "-d ", "-p "), "; ")
}

// format returns the rules as text. rule is the format of one rule. The other arguments are the
// prefixes of the matches, such as "-s ".
func (a Accept) format(rule, in, out, source, destination, protocol string) (all []string) {
	for _, r := range a.Rules() {
		var matches []string
		add := func(isSet bool, text string) {
			if isSet {
				matches = append(matches, text)
			}
		}
		add(r.In, in)
		add(r.Out, out)
		add(r.Source.IsValid(), source+r.Source.String())
		add(r.Destination.IsValid(), destination+r.Destination.String())
		add(r.Protocol != "", protocol+r.Protocol)
		all = append(all, fmt.Sprintf(rule, strings.Join(matches, " "), r.Comment))
	}
	return all
}

// A Limit is a restriction that foreign rules or the kernel impose, as far as we can detect it.
type Limit struct {
	Reason  string // a word in CamelCase, such as ForwardingRefused
	Message string // effect, cause and remedy
}

// Reasons of Limits.
const (
	LimitMasqueraded = "PodsMasqueraded"     // peers do not see the addresses of pods
	LimitForwarding  = "ForwardingRefused"   // packets between pods and peers are dropped
	LimitGateway     = "GatewayOutOfReach"   // other nodes cannot reach a gateway's Pod on our node
	LimitBridge      = "GatewayUnguarded"    // pods on a bridge of our node can send to a gateway as if they were nodes
	LimitUncertain   = "ForwardingUncertain" // packets may be dropped
	LimitRefused     = "Refused"             // an API object, or one of its fields, is invalid
	LimitSnapshot    = "SnapshotNotKept"     // after a reboot, the node does not refuse networks until it reaches the API server
	LimitVote        = "NodeDoesNotVote"     // the node does not vote on the active gateway
)
