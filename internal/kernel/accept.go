package kernel

// Accept is a pair of rules in the chain FORWARD of iptables-nft (table ip filter of nftables), a chain
// of others: for what goes to our devices, and what comes from them. They are the last before the
// chain's end, or before a rule that drops or rejects everything, and are there only while the end of
// the chain drops what nobody has accepted, as after `iptables -P FORWARD DROP`. An accept in a table
// of our own would not do: each table has its own say. What is before, such as network policies,
// decides before.
//
// Rules of others are not touched. Ours say AcceptComment.
type Accept struct{}

// AcceptComment is the comment of our rules in chains of others. Nobody else is told to write it: rules
// with it are ours to remove.
const AcceptComment = "isthmus-route-agent"

func (Accept) command(remove bool, _ string) string {
	verb := "-A"
	if remove {
		verb = "-D"
	}
	c := "iptables-nft " + verb + " FORWARD -i isthmus+ -m comment --comment " + AcceptComment + " -j ACCEPT"
	return c + "; iptables-nft " + verb + " FORWARD -o isthmus+ -m comment --comment " + AcceptComment + " -j ACCEPT"
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
	LimitUncertain   = "ForwardingUncertain" // some may be
	LimitRefused     = "Refused"             // something of an object is not believed
)
