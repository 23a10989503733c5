package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Accept stands for our rules in a foreign chain for forwarded packets: FORWARD of iptables-nft or
// iptables-legacy, or an nftables chain of any name. The rules accept packets from and to our
// devices. They also accept UDP and ICMP of gateways that are Pods on our node, because the node
// forwards their outer packets. They are the last rules before the chain's end, or before a rule
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
}

// AcceptFor returns the Accept for a node with gateway Pods at these addresses, in any order.
func AcceptFor(gateways []netip.Addr) Accept { return Accept{Gateways: addresses(gateways)} }

// InChain returns the Accept of the same chain, without Gateways.
func (a Accept) InChain() Accept {
	a.Gateways = ""
	return a
}

// Programs that own the chain of an Accept.
const (
	IptablesNFT    = "iptables-nft"
	IptablesLegacy = "iptables-legacy"
	NFT            = "nft"
)

// acceptComment is the prefix of the comment of our rules in foreign chains. We may remove every
// rule with it. In rules for a gateway, a colon and the gateway's address follow.
const acceptComment = "isthmus-route-agent"

// Comments returns the comments of the rules of an Accept, in order: two for our devices, and four
// for each gateway, UDP to it and from it, then ICMP to it and from it.
func (a Accept) Comments() []string {
	all := []string{acceptComment, acceptComment}
	for g := range strings.FieldsSeq(a.Gateways) {
		all = append(all, slices.Repeat([]string{acceptComment + ":" + g}, 4)...)
	}
	return all
}

// OwnComment reports whether a comment marks one of our rules, and returns the rule's gateway;
// empty: the rule is for our devices.
func OwnComment(comment string) (gateway string, ours bool) {
	if gateway, found := strings.CutPrefix(comment, acceptComment+":"); found {
		return gateway, true
	}
	return "", comment == acceptComment
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
		matches := []string{`iifname "isthmus*"`, `oifname "isthmus*"`}
		for g := range strings.FieldsSeq(a.Gateways) {
			for _, protocol := range []string{"udp", "icmp"} {
				matches = append(matches, "ip daddr "+g+" meta l4proto "+protocol, "ip saddr "+g+" meta l4proto "+protocol)
			}
		}
		return "nft '" + strings.Join(a.rules(matches, fmt.Sprintf("add rule %s %s %s %%s counter accept comment \"%%s\"", a.Family, a.Table, a.Chain)), "; ") + "'"
	}
	verb := " -A "
	if remove {
		verb = " -D "
	}
	matches := []string{"-i isthmus+", "-o isthmus+"}
	for g := range strings.FieldsSeq(a.Gateways) {
		for _, protocol := range []string{"udp", "icmp"} {
			matches = append(matches, "-d "+g+" -p "+protocol, "-s "+g+" -p "+protocol)
		}
	}
	return strings.Join(a.rules(matches, a.Program+verb+a.Chain+" %s -m comment --comment %s -j ACCEPT"), "; ")
}

// rules returns the matches with their comments, formatted.
func (a Accept) rules(matches []string, format string) []string {
	for i, comment := range a.Comments() {
		matches[i] = fmt.Sprintf(format, matches[i], comment)
	}
	return matches
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
