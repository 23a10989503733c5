package kernel

import (
	"fmt"
	"net/netip"
	"strings"
)

// Accept stands for our rules in a foreign chain for forwarded packets: FORWARD of iptables-nft or
// iptables-legacy, or an nftables chain of any name. The rules accept packets from and to our
// devices. They also accept UDP and ICMP of gateways that are Pods on our node, because the node
// forwards their outer packets, and TCP between these and the other gateways that are Pods, which
// copy flows to each other. They are the last rules before the chain's end, or before a rule
// that drops or rejects everything. They exist only while the end of the chain drops all other
// packets, as after `iptables -P FORWARD DROP`. An accept in our own table would not help, because
// each table decides separately. Earlier rules, such as network policies, still apply.
//
// In a wanted State, an Accept without a Chain stands for all such chains. Foreign rules stay
// unchanged. Our rules carry acceptComment.
type Accept struct {
	Program string // IptablesNFT, IptablesLegacy or NFT
	Family  string // of an nftables table: "ip" or "inet"
	Table   string
	Chain   string
	// Gateways are the IPv4 addresses of gateways that are Pods on our node, sorted and separated
	// by spaces.
	Gateways string
	// Elsewhere are those of gateways that are Pods on other nodes, in the same form. Without
	// Gateways, it is empty.
	Elsewhere string
}

// AcceptFor returns the Accept for a node with gateway Pods at these addresses, here and on other
// nodes, in any order.
func AcceptFor(here, elsewhere []netip.Addr) Accept {
	a := Accept{Gateways: addresses(here)}
	if a.Gateways != "" {
		a.Elsewhere = addresses(elsewhere)
	}
	return a
}

// InChain returns the Accept of the same chain, without gateways.
func (a Accept) InChain() Accept {
	a.Gateways, a.Elsewhere = "", ""
	return a
}

// WithGatewaysOf returns the Accept of the same chain with the gateways of b.
func (a Accept) WithGatewaysOf(b Accept) Accept {
	a.Gateways, a.Elsewhere = b.Gateways, b.Elsewhere
	return a
}

// Programs that own the chain of an Accept.
const (
	IptablesNFT    = "iptables-nft"
	IptablesLegacy = "iptables-legacy"
	NFT            = "nft"
)

// acceptComment is the prefix of the comment of our rules in foreign chains. We may remove every
// rule with it. In rules for a gateway, a colon and the gateway's address follow. If the other
// gateway is on another node, a hyphen and its address follow, too.
const acceptComment = "isthmus-route-agent"

// An AcceptRule is a rule of an Accept. It matches our devices, or addresses and a protocol.
type AcceptRule struct {
	In, Out             bool       // packets from our devices, and to them
	Source, Destination netip.Addr // zero: any
	Protocol            string     // "udp", "icmp" or "tcp"; empty: any
	Comment             string
}

// Rules returns the rules of an Accept, in order: two for our devices; for each gateway UDP to it
// and from it, and ICMP to it and from it; then TCP between it and each later gateway, and each
// gateway elsewhere.
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

// addressIn returns the address of a gateway. It is unspecified for an invalid one, which only a
// foreign edit of our comments can cause.
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

// OwnComment reports whether a comment marks one of our rules, and returns the rule's gateways on
// our node and elsewhere; both empty: the rule is for our devices.
func OwnComment(comment string) (here, elsewhere string, ours bool) {
	if gateways, found := strings.CutPrefix(comment, acceptComment+":"); found {
		here, elsewhere, _ = strings.Cut(gateways, "-")
		return here, elsewhere, true
	}
	return "", "", comment == acceptComment
}

// String names the chain in messages.
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
			return fmt.Sprintf("nft -a list chain %s %s %s; nft delete rule %[1]s %[2]s %[3]s handle N of each that says %s", a.Family, a.Table, a.Chain, acceptComment)
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

// format returns the rules as text. A rule has its matches, in the given words, and its comment.
func (a Accept) format(rule, in, out, source, destination, protocol string) (all []string) {
	for _, r := range a.Rules() {
		var matches []string
		add := func(is bool, text string) {
			if is {
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
	LimitGateway     = "GatewayOutOfReach"   // other nodes do not reach a gateway's Pod here
	LimitBridge      = "GatewayUnguarded"    // pods on a bridge here can send to a gateway as nodes
	LimitUncertain   = "ForwardingUncertain" // packets may be dropped
	LimitRefused     = "Refused"             // part of an object is rejected
	LimitSnapshot    = "SnapshotNotKept"     // after a reboot, the node does not refuse networks until it reaches the API server
	LimitVote        = "NodeDoesNotVote"     // it has no vote on the active gateway
)
