package peering

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// A Diagnosis is what was found on the way between two clusters, or between one and all its peers.
type Diagnosis struct {
	// Broken is the first hop to mend; nil when nothing was found.
	Broken *Hop `json:"broken,omitempty"`
	// Hops are all that were looked at, in the order of the way. Where the other side was asked too
	// its hops stand beside ours.
	Hops []Hop `json:"hops"`
	// NotAsked says what could not be looked at, and why.
	NotAsked []string `json:"notAsked,omitempty"`
	// At is when it was looked.
	At time.Time `json:"at"`
}

// Fine reports whether everything works that was looked at, if less well than it could.
func (d *Diagnosis) Fine() bool {
	return !slices.ContainsFunc(d.Hops, func(h Hop) bool { return h.State != Works && h.State != Limited })
}

// Diagnose walks from a cluster to the peer of that name, or to all where it is empty, hop by hop.
// remote is the other side, or nil where there is no way to ask it. The error is ErrOtherPeer where
// both are given and the name is another peer's. When the other side cannot be asked, the result is the
// diagnosis of this side, beside an error.
func Diagnose(ctx context.Context, local, remote *Cluster, name string) (*Diagnosis, error) {
	if err := local.Identify(ctx); err != nil {
		return nil, err
	}
	meant := func(p *isthmus.Peering) bool { return name == "" || called(p, name) }
	var unasked error // of the other side
	if remote != nil {
		if unasked = remote.Identify(ctx); unasked != nil {
			remote = nil
		}
	}
	if remote != nil {
		if err := distinct(local, remote); err != nil {
			return nil, err
		}
		meant = func(p *isthmus.Peering) bool { return p.Spec.Cluster.ClusterID == remote.Identity.ClusterID }
	}
	here, err := local.examine(ctx, meant)
	if err != nil {
		return nil, err
	}
	d := &Diagnosis{At: time.Now()}
	if remote == nil {
		if len(here.peerings) == 0 && name != "" && unasked != nil { // it may be the name that the other side has for itself
			return nil, unasked
		}
		if len(here.peerings) == 0 && name != "" {
			return nil, fmt.Errorf("%s: %w: no Peering is called %s or for a cluster of that name; `isthmus status` shows the names", local, ErrNoPeering, Printable(name))
		}
		d.Hops, d.NotAsked = here.hops(), here.notAsked
		if unasked == nil {
			d.NotAsked = append(slices.Clone(d.NotAsked), "the other side: with --remote-context it is looked at too")
		}
	} else {
		if err := sameAs(here, name, remote); err != nil {
			return nil, err
		}
		var there *examination
		there, unasked = remote.examine(ctx, func(p *isthmus.Peering) bool { return p.Spec.Cluster.ClusterID == local.Identity.ClusterID })
		if unasked == nil {
			d.Hops, d.NotAsked = between(here, there), slices.Concat(here.notAsked, there.notAsked)
		} else {
			d.Hops, d.NotAsked = here.hops(), here.notAsked
		}
	}
	d.Broken = FirstBroken(d.Hops)
	return d, unasked
}

// ErrOtherPeer says that the two ways in which somebody named a peer lead to two.
var ErrOtherPeer = errors.New("another peer")

// called reports whether a Peering, or the cluster that it is with, has that name.
func called(p *isthmus.Peering, name string) bool {
	return p.Name == name || p.Spec.Cluster.ClusterName == name
}

// sameAs is the error where a name is not that of the cluster that was looked for.
func sameAs(e *examination, name string, remote *Cluster) error {
	if name == "" || name == remote.Identity.ClusterName || slices.ContainsFunc(e.found, func(p *isthmus.Peering) bool { return called(p, name) }) {
		return nil
	}
	with := "there is no Peering with it here"
	if len(e.found) > 0 {
		with = "its Peering here is " + Printable(e.found[0].Name)
	}
	return fmt.Errorf("%s: %s is %w than %s, which is cluster %s (%s): %s", e.cluster, Printable(name), ErrOtherPeer, remote,
		Printable(remote.Identity.ClusterName), Printable(remote.Identity.ClusterID), with)
}

// An examination is what was found in one cluster.
type examination struct {
	cluster  string
	own      []Hop
	peerings [][]Hop
	found    []*isthmus.Peering // beside peerings
	notAsked []string
}

func (c *Cluster) examine(ctx context.Context, meant func(*isthmus.Peering) bool) (*examination, error) {
	e := &examination{cluster: c.String()}
	var list isthmus.PeeringList
	if err := c.client.List(ctx, &list); err != nil {
		return nil, c.explain("Peerings", err)
	}
	var manager Holder
	var err error
	if e.own, manager, _, err = clusterHops(ctx, c); err != nil {
		return nil, err
	}
	now, _ := c.now()
	dateByServer(list.Items, manager, now)
	for i := range list.Items {
		heed(e.own, &list.Items[i])
	}
	if !slices.ContainsFunc(e.own, func(h Hop) bool { return h.Name == hopRights }) {
		e.notAsked = append(e.notAsked, fmt.Sprintf("%s: whether the components have their rights: you may not create SubjectAccessReviews", c))
	}
	services := c.servicesOn(ctx)
	var counts map[string]*ServiceCounts
	if services {
		names, notAsked, err := c.namesHop(ctx)
		if err != nil {
			return nil, err
		}
		if e.own = append(e.own, names); notAsked != "" {
			e.notAsked = append(e.notAsked, notAsked)
		}
		if counts, err = c.importedServices(ctx); err != nil {
			return nil, err
		}
	}
	for i := range list.Items {
		p := &list.Items[i]
		if !meant(p) {
			continue
		}
		hops := peeringHops(c.String(), p, e.own)
		if at, ok := c.identityExpiry(ctx, p); ok && hops[0].State == Works {
			hops[0].Text += "; its token is good until " + at.Format(time.RFC3339)
		}
		if services {
			hops = append(hops, c.servicesHop(p, counts))
		}
		e.peerings, e.found = append(e.peerings, hops), append(e.found, p)
	}
	return e, nil
}

// hops are all, in the order of the way.
func (e *examination) hops() []Hop {
	all := slices.Clone(e.own)
	for _, p := range e.peerings {
		all = append(all, p...)
	}
	return all
}

// between is the way between two clusters, from both sides: what each side needs by itself, and
// then one hop of the peering after the other. A side that waits for the other, of which something
// is broken, is not to blame.
func between(a, b *examination) []Hop {
	sides := [2]*examination{a, b}
	var all []Hop
	for i, e := range sides {
		all = append(all, e.own...)
		if len(e.peerings) == 0 {
			other := sides[1-i].cluster
			all = append(all, Hop{Cluster: e.cluster, Name: stepNames[isthmus.ConditionReady], State: Broken, Source: "Peerings",
				Text: fmt.Sprintf("there is no Peering with %s: run `isthmus peer` for the two clusters", other)})
		}
	}
	broken := func(e *examination, names ...string) bool {
		return slices.ContainsFunc(e.own, func(h Hop) bool { return h.State == Broken && slices.Contains(names, h.Name) })
	}
	order := append(slices.Clone(steps), isthmus.ConditionReady, hopServices)
	for _, step := range order {
		name := cmp.Or(stepNames[step], step)
		for i, e := range sides {
			other := sides[1-i]
			for _, peering := range e.peerings {
				for _, h := range peering {
					if h.Name != name {
						continue
					}
					stuck := (broken(other, hopManager) || len(other.peerings) == 0) && slices.Contains(isthmus.WaitReasons, h.Reason) || broken(other, hopGateway) && step == isthmus.ConditionConnected
					// What we cannot publish there is missing there, and a tunnel that the other side has taken down is silent here.
					stuck = stuck || step == isthmus.ConditionPeerConfig && h.Reason == isthmus.ReasonPeerWithdrew && stands(all, other.cluster, isthmus.ConditionPublished) ||
						step == isthmus.ConditionConnected && slices.Contains(followsWithdrawal, h.Reason) && stands(all, other.cluster, isthmus.ConditionPeerConfig)
					stuck = stuck || len(other.peerings) == 0 && (h.Reason == v1alpha1.ReasonNotPeered || h.Reason == isthmus.ReasonPeerWithdrew)
					if h.State == Broken && (stuck || step == isthmus.ConditionReady && told(all)) {
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

// stands reports whether a hop of a side's Peering is known not to work.
func stands(hops []Hop, at, step string) bool {
	return slices.ContainsFunc(hops, func(h Hop) bool {
		return h.Cluster == at && h.Name == stepNames[step] && (h.State == Broken || h.State == Waits)
	})
}

// told reports whether something is broken already that a Peering's Ready would repeat.
func told(hops []Hop) bool {
	first := FirstBroken(hops)
	return first != nil && !comesLast(first)
}

// blameOne leaves one of the two sides of a tunnel broken, that which FirstBroken names: the other
// one sees the same fault from its side.
func blameOne(hops []Hop) {
	tunnel := stepNames[isthmus.ConditionConnected]
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

// Print writes a diagnosis for people. Nothing that others wrote reaches the terminal unescaped.
func (d *Diagnosis) Print(w io.Writer) error {
	heading := func(h *Hop) string {
		if h.Peering == "" {
			return h.Cluster
		}
		return h.Cluster + ", " + Printable(h.Peering)
	}
	last := ""
	for i := range d.Hops {
		h := &d.Hops[i]
		if at := heading(h); at != last {
			fmt.Fprintln(w, at)
			last = at
		}
		since := ""
		if h.Since != nil && !h.Since.IsZero() && h.State != Works {
			since = " (since " + h.Since.UTC().Format(time.RFC3339) + ")"
		}
		text := h.Text
		if h.Reason != "" && h.State != Works {
			text = h.Reason + ": " + text
		}
		fmt.Fprintf(w, "  %-16s %-8s %s%s\n", h.Name, h.State, text, since)
	}
	for _, n := range d.NotAsked {
		fmt.Fprintf(w, "not asked: %s\n", n)
	}
	return d.conclude(w)
}

// conclude says what to act on.
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
		_, err = fmt.Fprintf(w, "\nnothing is known to be broken; not known: %s\n", strings.Join(unknown, ", "))
	case len(limited) > 0:
		_, err = fmt.Fprintf(w, "\nit works, and less than it should: %s\n", strings.Join(limited, "; "))
	default:
		_, err = fmt.Fprintln(w, "\neverything works that was looked at")
	}
	return err
}
