// Package verify sends traffic between two clusters, from Pods that it creates, and reports
// which packets arrived, for `isthmus verify`.
//
//	Plan ─► Pods in both clusters ─► each gets its requests ─► Results ─► Pods are deleted
//
// The Pods run this program (Serve), so no other image is pulled. Plan, a pure function, computes
// the checks. The Pods get their requests through port-forwarding to their loopback addresses.
package verify

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// Protocols of a check.
const (
	TCP  = "tcp"
	UDP  = "udp"
	ICMP = "icmp"
	// Connect is a TCP connection to any listener. It is closed at once.
	Connect = "connect"
)

// Sizes are the numbers of octets to send and to receive, by protocol: a few, about as many as
// fit into one packet, and more than any MTU of the path, so that UDP and ICMP are fragmented.
var Sizes = map[string][]int{TCP: {1000, 500_000}, UDP: {100, 1300, 4000}, ICMP: {56, 1300, 4000}}

// minSize is the minimum size, by protocol: a UDP payload must have room for the cookie and an
// Answer, and an ICMP payload for the cookie.
var minSize = map[string]int{UDP: cookie + answerRoom, ICMP: cookie}

// An End is a Pod that sends or receives.
type End struct {
	Cluster string     `json:"cluster"`
	Network string     `json:"network"`         // "pod" or "host"
	Place   string     `json:"place,omitempty"` // "gateway": the node of the active gateway; "other": another node
	Pod     string     `json:"pod,omitempty"`   // NAMESPACE/NAME of a given Pod; then Place is empty
	Node    string     `json:"node"`
	Addr    netip.Addr `json:"addr"` // address of the Pod
	Seen    netip.Addr `json:"seen"` // the Pod's address as the other cluster uses it; only in the pod network
}

// String identifies the End for people.
func (e End) String() string {
	if e.Pod != "" {
		return fmt.Sprintf("%s: %s", e.Cluster, e.Pod)
	}
	where := "gateway's node"
	if e.Place == other {
		where = "other node"
	}
	return fmt.Sprintf("%s: %s, %s", e.Cluster, e.Network, where)
}

const (
	podNetwork  = "pod"
	hostNetwork = "host"
	gatewayNode = "gateway"
	other       = "other"
)

// A Check is one request, for which an answer is expected.
type Check struct {
	From     End    `json:"from"`
	To       End    `json:"to,omitzero"`
	Target   string `json:"target,omitempty"` // HOST or HOST:PORT, see Targets; then To is empty
	What     string `json:"what,omitempty"`   // description of a target that discover found; empty: the user named the target
	Protocol string `json:"protocol"`
	Size     int    `json:"size"` // octets of the payload

	own string // see Target.Own
}

// Only selects checks. An empty list selects all values.
type Only struct{ protocols, networks, directions []string }

// Words are the words that ParseOnly accepts.
var Words = []string{TCP, UDP, ICMP, podNetwork, hostNetwork, "out", "in"}

// ParseOnly parses a selection: words name protocols, networks of the sender, and directions.
func ParseOnly(words []string) (o Only, err error) {
	var wrong []error
	for _, w := range words {
		switch w {
		case TCP, UDP, ICMP:
			o.protocols = append(o.protocols, w)
		case podNetwork, hostNetwork:
			o.networks = append(o.networks, w)
		case "out", "in":
			o.directions = append(o.directions, w)
		default:
			wrong = append(wrong, fmt.Errorf("%q: want %s or %s", w, strings.Join(Words[:len(Words)-1], ", "), Words[len(Words)-1]))
		}
	}
	return o, errors.Join(wrong...)
}

// Targets returns the checks of targets from every End in a cluster: a ping to HOST, and a
// connection to HOST:PORT. HOST is an address that this cluster uses, such as a mapped address, or
// a name that the Pods resolve. Targets that the user named are checked even if selection excludes
// their protocol.
func Targets(local []End, selection Only, targets []Target) (checks []Check) {
	for _, t := range targets {
		protocol, word, size := ICMP, ICMP, Sizes[ICMP][0]
		if _, _, err := net.SplitHostPort(t.Host); err == nil {
			protocol, word, size = Connect, TCP, 0
		}
		for _, from := range local {
			if among(selection.networks, from.Network) && (t.What == "" || among(selection.protocols, word)) {
				checks = append(checks, Check{From: from, Target: t.Host, What: t.What, Protocol: protocol, Size: size, own: t.Own})
			}
		}
	}
	return checks
}

func (c Check) receiver() string {
	switch {
	case c.What != "":
		return c.Target + ", " + c.What
	case c.Target != "":
		return c.Target
	}
	return c.To.String()
}

func among(all []string, one string) bool { return len(all) == 0 || slices.Contains(all, one) }

// Plan returns the checks from every End in one cluster to every pod of the other, in both
// directions. Ends in the host network only send, because a cluster cannot reach the other's host
// network. sizes replaces the Sizes of a protocol. All sizes below the protocol's minimum are
// replaced by one check with the minimum size.
func Plan(local, remote []End, selection Only, sizes map[string][]int) (checks []Check) {
	known := map[Check]bool{}
	for _, direction := range []struct {
		name     string
		from, to []End
	}{{"out", local, remote}, {"in", remote, local}} {
		if !among(selection.directions, direction.name) {
			continue
		}
		for _, from := range direction.from {
			for _, to := range direction.to {
				if to.Network != podNetwork || !among(selection.networks, from.Network) {
					continue
				}
				for _, protocol := range []string{ICMP, UDP, TCP} {
					if !among(selection.protocols, protocol) {
						continue
					}
					lengths := Sizes[protocol]
					if own, ok := sizes[protocol]; ok {
						lengths = own
					}
					for _, size := range lengths {
						c := Check{From: from, To: to, Protocol: protocol, Size: max(size, minSize[protocol])}
						if !known[c] {
							known[c] = true
							checks = append(checks, c)
						}
					}
				}
			}
		}
	}
	return checks
}
