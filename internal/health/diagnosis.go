package health

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// A Diagnosis is the result of a check of the path between two clusters, or from one cluster to
// all its peers.
type Diagnosis struct {
	// Broken is the hop to repair first, or nil if no hop is broken.
	Broken *Hop `json:"broken,omitempty"`
	// Hops are all checked hops, in the order of the path. If the other side was queried, its
	// hops are next to ours.
	Hops []Hop `json:"hops"`
	// NotAsked lists the checks that were not possible, and the reasons.
	NotAsked []string `json:"notAsked,omitempty"`
	// At is the time of the check.
	At time.Time `json:"at"`
}

// Fine reports whether every checked hop works, with or without limits.
func (d *Diagnosis) Fine() bool {
	return !slices.ContainsFunc(d.Hops, func(h Hop) bool { return h.State != Works && h.State != Limited })
}

// A Side is the result of the check in one of two clusters.
type Side struct {
	Cluster  string
	Own      []Hop
	Peerings [][]Hop
	Found    []*isthmus.Peering // the API objects of Peerings, in the same order
	NotAsked []string
}

// AllHops returns all hops of the side, in the order of the path.
func (e *Side) AllHops() []Hop {
	all := slices.Clone(e.Own)
	for _, p := range e.Peerings {
		all = append(all, p...)
	}
	return all
}

// setupBroken reports whether a Peering of this cluster is not ready because of the cluster's own
// setup.
func (e *Side) setupBroken() bool {
	return slices.ContainsFunc(slices.Concat(e.Peerings...), func(h Hop) bool { return h.State == Broken && h.Reason == isthmus.ReasonLocalSetup })
}

// Between merges the hops of two clusters: first the hops that each cluster needs by itself,
// and then those of the peering, alternating. A hop that only waits for a broken hop of the
// other side does not count as broken.
func Between(a, b *Side) []Hop {
	sides := [2]*Side{a, b}
	var all []Hop
	for i, e := range sides {
		all = append(all, e.Own...)
		if len(e.Peerings) == 0 {
			other := sides[1-i].Cluster
			all = append(all, Hop{Cluster: e.Cluster, Name: StepNames[isthmus.ConditionReady], State: Broken, Source: "Peerings",
				Text: fmt.Sprintf("there is no Peering with %s; run `isthmus peer` for the two clusters", other)})
		}
	}
	broken := func(e *Side, names ...string) bool {
		return slices.ContainsFunc(e.Own, func(h Hop) bool { return h.State == Broken && slices.Contains(names, h.Name) })
	}
	order := append(slices.Clone(Steps), isthmus.ConditionReady, HopServices)
	for _, step := range order {
		name := cmp.Or(StepNames[step], step)
		for i, e := range sides {
			other := sides[1-i]
			for _, peering := range e.Peerings {
				for _, h := range peering {
					if h.Name != name {
						continue
					}
					stuck := (broken(other, HopManager) || len(other.Peerings) == 0) && slices.Contains(isthmus.WaitReasons, h.Reason) || broken(other, HopGateway) && step == isthmus.ConditionConnected
					// If the other side cannot publish its networks, this side lacks them. If the
					// other side has removed the tunnel, this side receives nothing.
					stuck = stuck || step == isthmus.ConditionPeerConfig && h.Reason == isthmus.ReasonPeerWithdrew && notWorking(all, other.Cluster, isthmus.ConditionPublished) ||
						step == isthmus.ConditionConnected && slices.Contains(followsWithdrawal, h.Reason) && notWorking(all, other.Cluster, isthmus.ConditionPeerConfig)
					stuck = stuck || other.setupBroken() && slices.Contains(followsSetup, h.Reason)
					stuck = stuck || len(other.Peerings) == 0 && (h.Reason == v1alpha1.ReasonNotPeered || h.Reason == isthmus.ReasonPeerWithdrew)
					if h.State == Broken && (stuck || step == isthmus.ConditionReady && explained(all)) {
						h.State = Waits
					}
					all = append(all, h)
				}
			}
		}
	}
	blameOne(all)
	return all
}

// notWorking reports whether one of a cluster's hops is broken or waits. step is the condition of
// the Peering from which the hop was made.
func notWorking(hops []Hop, cluster, step string) bool {
	return slices.ContainsFunc(hops, func(h Hop) bool {
		return h.Cluster == cluster && h.Name == StepNames[step] && (h.State == Broken || h.State == Waits)
	})
}

// explained reports whether a broken hop already shows the fault, which the hop of the condition
// Ready would only repeat.
func explained(hops []Hop) bool {
	first := FirstBroken(hops)
	return first != nil && !ranksLast(first)
}

// If the tunnel's hops are broken on both sides, they show the same fault. Then the hop that
// FirstBroken returns stays broken, and blameOne makes the other one wait.
func blameOne(hops []Hop) {
	tunnel := StepNames[isthmus.ConditionConnected]
	var tunnels []Hop
	for _, h := range hops {
		if h.Name == tunnel {
			tunnels = append(tunnels, h)
		}
	}
	blamed := FirstBroken(tunnels)
	for i := range hops {
		if h := &hops[i]; blamed != nil && h.Name == tunnel && h.State == Broken && (h.Cluster != blamed.Cluster || h.Peering != blamed.Peering) {
			h.State = Waits
		}
	}
}

// Print writes a diagnosis for people, with the hops of each cluster and peering in one block.
// It escapes text from outside this cluster.
func (d *Diagnosis) Print(w io.Writer) error {
	var headings []string
	hops := make(map[string][]*Hop)
	for i := range d.Hops {
		h := &d.Hops[i]
		heading := h.Cluster
		if h.Peering != "" {
			heading += ", " + safetext.Of(h.Peering)
		}
		if hops[heading] == nil {
			headings = append(headings, heading)
		}
		hops[heading] = append(hops[heading], h)
	}
	for _, heading := range headings {
		fmt.Fprintln(w, heading)
		for _, h := range hops[heading] {
			h.print(w)
		}
	}
	for _, n := range d.NotAsked {
		fmt.Fprintf(w, "not checked: %s\n", n)
	}
	return d.conclude(w)
}

func (h *Hop) print(w io.Writer) {
	since := ""
	if h.Since != nil && !h.Since.IsZero() && h.State == Broken {
		since = " (broken since " + h.Since.UTC().Format(time.RFC3339) + ")"
	}
	text := h.Text
	if h.Reason != "" && h.State != Works {
		text = h.Reason + ": " + text
	}
	fmt.Fprintf(w, "  %-16s %-8s %s%s\n", h.Name, h.State, text, since)
}

// conclude writes the remedy of the first broken hop, or a summary if none is broken.
func (d *Diagnosis) conclude(w io.Writer) (err error) {
	var unknown, limited []string
	for _, h := range d.Hops {
		switch h.State {
		case Unknown:
			unknown = append(unknown, h.Cluster+": "+h.Name)
		case Limited:
			limited = append(limited, h.Cluster+": "+h.Name+": "+h.Text)
		}
	}
	switch b := d.Broken; {
	case b != nil && b.Reason != "":
		_, err = fmt.Fprintf(w, "\nbroken: %s: %s: %s: %s\n", b.Cluster, b.Name, b.Reason, b.Text)
	case b != nil:
		_, err = fmt.Fprintf(w, "\nbroken: %s: %s: %s\n", b.Cluster, b.Name, b.Text)
	case len(unknown) > 0:
		_, err = fmt.Fprintf(w, "\nno broken hop was found; unknown: %s\n", strings.Join(unknown, ", "))
	case len(limited) > 0:
		_, err = fmt.Fprintf(w, "\neverything works, but with limits: %s\n", strings.Join(limited, "; "))
	default:
		_, err = fmt.Fprintln(w, "\nall checked hops work")
	}
	return err
}
