package kernel

import "fmt"

// Accept is a pair of rules in a chain of others: for what comes from our devices, and what goes to
// them. The chain is one by which a packet filter looks at what is forwarded: FORWARD of iptables-nft
// or iptables-legacy, or a chain of nftables of any name. They are the last before the chain's end, or
// before a rule that drops or rejects everything, and are there only while the end of the chain drops
// what nobody has accepted, as after `iptables -P FORWARD DROP`. An accept in a table of our own would
// not do: each table has its own say. What is before, such as network policies, decides before.
//
// In a wanted State the zero value stands for all such chains, and nothing else is asked for. Rules of
// others are not touched. Ours say AcceptComment.
type Accept struct {
	Program string // IptablesNFT, IptablesLegacy or NFT
	Family  string // of an nftables table: "ip" or "inet"
	Table   string
	Chain   string
}

// Programs of an Accept: whose chains these are.
const (
	IptablesNFT    = "iptables-nft"
	IptablesLegacy = "iptables-legacy"
	NFT            = "nft"
)

// AcceptComment is the comment of our rules in chains of others. Nobody else is told to write it: rules
// with it are ours to remove.
const AcceptComment = "isthmus-route-agent"

// String names the chain for people.
func (a Accept) String() string {
	if a.Program == NFT {
		return fmt.Sprintf("chain %s of table %s %s", a.Chain, a.Family, a.Table)
	}
	return a.Chain + " of " + a.Program
}

func (a Accept) command(remove bool, _ string) string {
	if a == (Accept{}) {
		a = Accept{Program: IptablesNFT, Chain: "FORWARD"} // the one that most nodes have
	}
	if a.Program == NFT {
		if remove {
			return fmt.Sprintf("nft -a list chain %s %s %s; nft delete rule %[1]s %[2]s %[3]s handle N of each that says %s", a.Family, a.Table, a.Chain, AcceptComment)
		}
		rule := fmt.Sprintf(`add rule %s %s %s %%s "isthmus*" counter accept comment "%s"`, a.Family, a.Table, a.Chain, AcceptComment)
		return "nft '" + fmt.Sprintf(rule, "iifname") + "; " + fmt.Sprintf(rule, "oifname") + "'"
	}
	verb := " -A "
	if remove {
		verb = " -D "
	}
	c := ""
	for _, device := range []string{"-i", "-o"} {
		if c != "" {
			c += "; "
		}
		c += a.Program + verb + a.Chain + " " + device + " isthmus+ -m comment --comment " + AcceptComment + " -j ACCEPT"
	}
	return c
}

// A Limit is what rules of others in a kernel, or the kernel itself, keep from working, as far as can
// be seen.
type Limit struct {
	Reason  string // a word in CamelCase, such as ForwardingRefused
	Message string // what it costs, why, and what to do
}

// Reasons of Limits.
const (
	LimitMasqueraded = "PodsMasqueraded"     // peers do not see addresses of pods
	LimitForwarding  = "ForwardingRefused"   // packets between pods and peers are dropped
	LimitGateway     = "GatewayOutOfReach"   // other nodes do not reach a gateway's Pod here
	LimitBridge      = "GatewayUnguarded"    // pods on a bridge here can send to a gateway as nodes
	LimitUncertain   = "ForwardingUncertain" // some may be
	LimitRefused     = "Refused"             // something of an object is not believed
)
