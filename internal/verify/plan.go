// Package verify sends traffic between two clusters, from pods that it makes, and says what arrived.
//
//	Plan ─► Pods in both clusters ─► each is told what to send ─► Results ─► Pods are deleted
//
// The Pods run this program (Serve), so that no other image is pulled. What to send is decided by a
// pure function; the Pods are told over ports at their loopback addresses.
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
	// Connect is a TCP connection to whatever listens there, which is closed at once.
	Connect = "connect"
)

// Sizes are the octets that are sent for each protocol, and come back: little, about as much as fits
// in one packet, and more than any MTU on the way, for which UDP and ICMP are fragmented.
var Sizes = map[string][]int{TCP: {1000, 500_000}, UDP: {100, 1300, 4000}, ICMP: {56, 1300, 4000}}

// least is what a question needs: by UDP room for the answer, by ICMP the cookie.
var least = map[string]int{UDP: cookie + answerRoom, ICMP: cookie}

// An End is a Pod that takes part.
type End struct {
	Cluster string     `json:"cluster"`
	Network string     `json:"network"`         // "pod" or "host"
	Place   string     `json:"place,omitempty"` // "gateway": the node of the active gateway; "other": another one
	Pod     string     `json:"pod,omitempty"`   // instead of Place: the Pod that was given, NAMESPACE/NAME
	Node    string     `json:"node"`
	Addr    netip.Addr `json:"addr"` // of the Pod
	Seen    netip.Addr `json:"seen"` // as the other cluster has it; of a pod network only
}

// String says which one it is.
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
	atGateway   = "gateway"
	other       = "other"
)

// A Check is one question that has to be answered.
type Check struct {
	From     End    `json:"from"`
	To       End    `json:"to,omitzero"`
	Target   string `json:"target,omitempty"` // instead of To: HOST or HOST:PORT, see Targets
	What     string `json:"what,omitempty"`   // that Target is, if it was found and not named by somebody
	Protocol string `json:"protocol"`
	Size     int    `json:"size"` // octets of the payload

	own string // see Target.Own
}

// Only chooses checks; what is empty chooses all.
type Only struct{ protocols, networks, directions []string }

// Words are those of ParseOnly.
var Words = []string{TCP, UDP, ICMP, podNetwork, hostNetwork, "out", "in"}

// ParseOnly reads words: protocols, the network that the sender is in, and the direction.
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

// Targets says what is sent to targets from everybody in a cluster: a ping to HOST, and a connection to
// HOST:PORT. HOST is an address as it is seen there, such as that of a mapped endpoint, or a name,
// which the Pods resolve. What somebody names is asked by whatever protocol.
func Targets(local []End, only Only, targets []Target) (checks []Check) {
	for _, t := range targets {
		protocol, word, size := ICMP, ICMP, Sizes[ICMP][0]
		if _, _, err := net.SplitHostPort(t.Host); err == nil {
			protocol, word, size = Connect, TCP, 0
		}
		for _, from := range local {
			if among(only.networks, from.Network) && (t.What == "" || among(only.protocols, word)) {
				checks = append(checks, Check{From: from, Target: t.Host, What: t.What, Protocol: protocol, Size: size, own: t.Own})
			}
		}
	}
	return checks
}

// whom is who is asked.
func (c Check) whom() string {
	switch {
	case c.What != "":
		return c.Target + ", " + c.What
	case c.Target != "":
		return c.Target
	}
	return c.To.String()
}

func among(all []string, one string) bool { return len(all) == 0 || slices.Contains(all, one) }

// Plan says what is sent from and to whom: from everybody in one cluster to every pod of the other
// one, both ways, since no cluster reaches the host network of another. sizes of a protocol replace
// those of Sizes; what is too little for a protocol becomes the least that it can carry, once.
func Plan(local, remote []End, only Only, sizes map[string][]int) (checks []Check) {
	known := map[Check]bool{}
	for _, way := range []struct {
		name     string
		from, to []End
	}{{"out", local, remote}, {"in", remote, local}} {
		if !among(only.directions, way.name) {
			continue
		}
		for _, from := range way.from {
			for _, to := range way.to {
				if to.Network != podNetwork || !among(only.networks, from.Network) {
					continue
				}
				for _, protocol := range []string{ICMP, UDP, TCP} {
					if !among(only.protocols, protocol) {
						continue
					}
					of := Sizes[protocol]
					if own, ok := sizes[protocol]; ok {
						of = own
					}
					for _, size := range of {
						c := Check{From: from, To: to, Protocol: protocol, Size: max(size, least[protocol])}
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
