package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/inspect"
	"github.com/isthmus-net/isthmus/internal/place"
	"github.com/isthmus-net/isthmus/internal/safetext"
	"github.com/isthmus-net/isthmus/internal/source/kube"
)

// A tracePath is the path of a packet through the clusters, hop by hop.
type tracePath struct {
	Direction string    `json:"direction"` // "out", or "in" for the path of the answer
	Protocol  string    `json:"protocol"`
	From      string    `json:"from"`
	To        string    `json:"to"`
	Hops      []pathHop `json:"hops"`
	Arrives   bool      `json:"arrives"`
	// Leaves is true if the packet leaves for a peer, but the peer's cluster was not queried. It is
	// then unknown whether the packet arrives.
	Leaves bool `json:"leaves,omitempty"`
	// Verdict is a sentence that states whether the packet arrives, or where and why it ends.
	Verdict string `json:"verdict"`
}

// If a path works in this cluster and the peer's cluster is not queried, the last hop of the path
// has the name hopOtherSide.
const hopOtherSide = "other side"

// A pathHop is one hop of a tracePath. Step is set only for a gateway.
type pathHop struct {
	health.Hop
	Step *gateway.TraceStep `json:"step,omitempty"`
}

// clusterTrace is one run of `isthmus trace` on clusters.
type clusterTrace struct {
	ctx           context.Context
	query         gateway.TraceQuery // without addresses, because SRC and DST may be names
	local, remote *cluster.Cluster   // remote is nil if the other cluster is not queried
}

func (t *clusterTrace) run(cmd *cobra.Command, local, remote cluster.Access, src, dst string, output cli.Output) (err error) {
	if t.local, err = connect(local); err != nil {
		return err
	}
	if otherCluster(&local, &remote) {
		if t.remote, err = connect(remote); err != nil {
			return err
		}
	}
	for _, c := range []*cluster.Cluster{t.local, t.remote} {
		if c != nil {
			if err := c.Identify(t.ctx); err != nil {
				return clusterError(err)
			}
		}
	}
	paths, err := t.paths(src, dst)
	if err != nil {
		return clusterError(err)
	}
	if output.ForPrograms() {
		err = output.Print(cmd.OutOrStdout(), paths)
	} else {
		err = printPaths(cmd.OutOrStdout(), paths)
	}
	for _, w := range paths {
		if err == nil && !w.Arrives && !w.Leaves {
			err = cli.ErrProblem
		}
	}
	return err
}

// paths returns the path of the packet and the path of its answer. It returns only one of them if
// the user has chosen a direction. It returns only the first if the gateway drops the packet.
func (t *clusterTrace) paths(src, dst string) ([]tracePath, error) {
	from, err := t.findPlace(t.local, src)
	if err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	to, err := t.destination(dst)
	if err != nil {
		return nil, fmt.Errorf("destination: %w", err)
	}
	out, step, err := t.followPacket(from, to)
	if err != nil {
		return nil, err
	}
	if t.query.Direction == "out" || step == nil {
		return []tracePath{out}, nil
	}
	in, err := t.followAnswer(from, to, step)
	if err != nil {
		return nil, err
	}
	if t.query.Direction == "in" {
		return []tracePath{in}, nil
	}
	return []tracePath{out, in}, nil
}

// findPlace finds SRC or DST in cluster c. name is an address or a name.
func (t *clusterTrace) findPlace(c *cluster.Cluster, name string) (place.Place, error) {
	if !strings.Contains(name, "/") {
		addr, err := gateway.ParseTraceAddr(name)
		if err != nil {
			return place.Place{}, cli.Usage("%s: want an address, NAMESPACE/POD, svc/NAME or svc/NAMESPACE/NAME: %w", name, err)
		}
		return place.At(t.ctx, c, addr)
	}
	return place.Find(t.ctx, c, name)
}

// destination finds DST. The result has the address by which this cluster reaches DST. If the other
// cluster is queried, destination resolves a name there, unless it is the name of a Service that
// this cluster imports.
func (t *clusterTrace) destination(name string) (place.Place, error) {
	if place.IsImportedName(name) {
		peer := ""
		if t.remote != nil {
			peer = t.remote.Identity.ClusterID
		}
		return place.Imported(t.ctx, t.local, name, peer)
	}
	if !strings.Contains(name, "/") || t.remote == nil {
		return t.findPlace(t.local, name)
	}
	p, err := place.Find(t.ctx, t.remote, name)
	if err != nil {
		return p, err
	}
	p.Addr, err = inspect.SeenFrom(t.ctx, t.local, t.remote.Identity.ClusterID, p.Addr)
	return p, err
}

// followPacket follows the packet from its source to the tunnel, and through the other cluster if
// that cluster is queried. sent is the step of this cluster's gateway, or nil if that gateway drops
// the packet.
func (t *clusterTrace) followPacket(from, to place.Place) (w tracePath, sent *gateway.TraceStep, err error) {
	w = tracePath{Direction: "out", Protocol: t.query.Protocol, From: from.String(), To: to.String()}
	if err := w.add(inspect.NodeHop(t.ctx, t.local, from.Node)); err != nil {
		return w, nil, err
	}
	if err := w.add(inspect.GatewayHop(t.ctx, t.local)); err != nil {
		return w, nil, err
	}
	step, err := t.engine(&w, t.local, "out", from.Addr, to.Addr)
	if err != nil || step == nil {
		return w.finish(), nil, err
	}
	if err := w.add(inspect.TunnelHop(t.ctx, t.local, step.Peer)); err != nil {
		return w, nil, err
	}
	if t.remote == nil || t.remote.Identity.ClusterID != step.Peer {
		w.Hops = append(w.Hops, pathHop{Hop: health.Hop{Cluster: safetext.Of(nameOrID(step.PeerName, step.Peer)), Name: hopOtherSide, State: health.Unknown,
			Text: "not checked; --remote-context also checks the path in that cluster", Source: "nobody"}})
		return w.finish(), step, nil
	}
	arrived, err := t.followArrival(&w, t.remote, step)
	if err != nil || arrived == nil {
		return w.finish(), step, err
	}
	return w.finish(), step, nil
}

// followArrival follows a packet in cluster c, from the tunnel to the destination's node. sent is
// the step of the gateway that sent the packet. The result is the step of c's gateway, or nil if
// c's gateway drops the packet.
func (t *clusterTrace) followArrival(w *tracePath, c *cluster.Cluster, sent *gateway.TraceStep) (*gateway.TraceStep, error) {
	src, dst, err := addrsAfter(sent)
	if err != nil {
		return nil, err
	}
	step, err := t.engine(w, c, "in", src, dst)
	if err != nil || step == nil {
		return nil, err
	}
	if err := w.add(inspect.GatewayHop(t.ctx, c)); err != nil {
		return nil, err
	}
	if step.Action == "deliver" {
		return step, nil
	}
	_, dst, err = addrsAfter(step)
	if err != nil {
		return nil, err
	}
	place, err := place.At(t.ctx, c, dst)
	if err != nil {
		return nil, err
	}
	if place.Node == "" {
		if hop, vacant, err := inspect.VacantHop(t.ctx, c, dst.Addr()); vacant || err != nil {
			return step, w.add(hop, err)
		}
	}
	return step, w.add(inspect.NodeHop(t.ctx, c, place.Node))
}

// followAnswer follows the answer to a packet that the gateway has sent.
func (t *clusterTrace) followAnswer(from, to place.Place, sent *gateway.TraceStep) (w tracePath, err error) {
	w = tracePath{Direction: "in", Protocol: t.query.Protocol, From: to.String(), To: from.String()}
	src, _, err := addrsAfter(sent)
	if err != nil {
		return w, err
	}
	if own, seen := from.Addr, src; from.Pod == "" && own.Addr() != seen.Addr() {
		w.Hops = append(w.Hops, pathHop{Hop: health.Hop{Cluster: t.local.String(), Name: "gateway", State: health.Works,
			Text: fmt.Sprintf("the sender is not a Pod, so the gateway replaces its address by %v; the answer belongs to the same NAT flow", seen), Source: "rules"}})
		return w.finish(), nil
	}
	if t.remote == nil || t.remote.Identity.ClusterID != sent.Peer {
		if err := w.add(inspect.TunnelHop(t.ctx, t.local, sent.Peer)); err != nil {
			return w, err
		}
		_, err := t.followArrival(&w, t.local, &gateway.TraceStep{NewSrc: to.Addr.String(), NewDst: src.String()})
		if w.finish(); w.Arrives {
			w.Verdict += ", if " + safetext.Of(nameOrID(sent.PeerName, sent.Peer)) + " sends the answer, which was not checked"
		}
		return w, err
	}
	seen, err := t.engineStep(t.remote, "in", src, mustAfterDst(sent))
	if err != nil {
		return w, err
	}
	as, own, err := addrsAfter(seen)
	if err != nil { // the peer's gateway drops the answer
		w.Verdict = "no answer: the packet does not arrive"
		return w, nil //nolint:nilerr // the verdict has the reason
	}
	place, err := place.At(t.ctx, t.remote, own)
	if err != nil {
		return w, err
	}
	if err := w.add(inspect.NodeHop(t.ctx, t.remote, place.Node)); err != nil {
		return w, err
	}
	if err := w.add(inspect.GatewayHop(t.ctx, t.remote)); err != nil {
		return w, err
	}
	step, err := t.engine(&w, t.remote, "out", own, as)
	if err != nil || step == nil {
		return w.finish(), err
	}
	if err := w.add(inspect.TunnelHop(t.ctx, t.remote, step.Peer)); err != nil {
		return w, err
	}
	_, err = t.followArrival(&w, t.local, step)
	return w.finish(), err
}

func mustAfterDst(s *gateway.TraceStep) netip.AddrPort {
	_, dst, _ := addrsAfter(s) // cannot fail: s was parsed before
	return dst
}

// addrsAfter returns the addresses that a packet has when it leaves the gateway.
func addrsAfter(s *gateway.TraceStep) (src, dst netip.AddrPort, err error) {
	if src, err = gateway.ParseTraceAddr(s.NewSrc); err != nil {
		return src, dst, err
	}
	dst, err = gateway.ParseTraceAddr(s.NewDst)
	return src, dst, err
}

// engineStep runs a packet through a NAT engine that has the rules of cluster c's objects.
func (t *clusterTrace) engineStep(c *cluster.Cluster, direction string, src, dst netip.AddrPort) (*gateway.TraceStep, error) {
	gw, _, err := kube.GatewayOf(t.ctx, c.Client, c.Config.Host, c.Identity)
	if err != nil {
		return nil, fmt.Errorf("%s: rules of the gateway: %w", c, err)
	}
	q := t.query
	q.Src, q.Dst, q.Direction = src, dst, direction
	steps, err := gateway.TraceOffline(gateway.Config{Gateway: gw}, q)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c, err)
	}
	return &steps[0], nil
}

// engine adds the step of a cluster's gateway to a path. It returns nil if the gateway drops
// the packet.
func (t *clusterTrace) engine(w *tracePath, c *cluster.Cluster, direction string, src, dst netip.AddrPort) (*gateway.TraceStep, error) {
	step, err := t.engineStep(c, direction, src, dst)
	if err != nil {
		return nil, err
	}
	hop := health.Hop{Cluster: c.String(), Name: "NAT", State: health.Works, Source: "TunnelEndpoints, NatMappings"}
	switch {
	case step.Drop == "no_peer":
		hop.State, hop.Reason, hop.Text = health.Broken, step.Drop, fmt.Sprintf("no peer has %v, so the packet enters no tunnel", dst.Addr())
	case step.Drop != "":
		hop.State, hop.Reason, hop.Text = health.Broken, step.Drop, "dropped: "+step.Text
	default:
		hop.Text = rewrites(step)
	}
	w.Hops = append(w.Hops, pathHop{hop, step})
	if step.Drop != "" {
		return nil, nil
	}
	return step, nil
}

// rewrites describes, in one line, the changes of the addresses.
func rewrites(s *gateway.TraceStep) string {
	var all []string
	if s.NewSrc != s.Src {
		all = append(all, "source "+s.Src+" becomes "+s.NewSrc)
	}
	if s.NewDst != s.Dst {
		all = append(all, "destination "+s.Dst+" becomes "+s.NewDst)
	}
	if len(all) == 0 {
		all = append(all, "both addresses are unchanged")
	}
	return fmt.Sprintf("rule %s: %s", s.Rule, strings.Join(all, ", "))
}

func (w *tracePath) add(h health.Hop, err error) error {
	if err != nil {
		return err
	}
	w.Hops = append(w.Hops, pathHop{Hop: h})
	return nil
}

// finish sets the verdict according to the first hop that is broken or unknown. If the state of a
// node is unknown, finish ignores this hop, because the address may belong to a machine without a
// Pod.
func (w *tracePath) finish() tracePath {
	w.Arrives, w.Verdict = true, "it arrives"
	if w.Direction == "in" {
		w.Verdict = "the answer arrives"
	}
	for _, h := range w.Hops {
		if h.State == health.Works || h.State == health.Limited || h.State == health.Unknown && h.Name == "node" {
			continue
		}
		w.Arrives = false
		if h.Name == hopOtherSide {
			w.Leaves, w.Verdict = true, fmt.Sprintf("it leaves for %s; its path in that cluster was not checked", h.Cluster)
			break
		}
		reason := h.Text
		if h.Reason != "" {
			reason = h.Reason + ": " + h.Text
		}
		switch {
		case h.Name == "tunnel" && h.State == health.Broken:
			w.Verdict = "the peer is down: " + reason
		case h.State == health.Broken:
			w.Verdict = fmt.Sprintf("it ends at %s, %s: %s", h.Cluster, h.Name, reason)
		default:
			w.Verdict = fmt.Sprintf("unknown at %s, %s: %s", h.Cluster, h.Name, reason)
		}
		break
	}
	return *w
}

// printPaths prints the paths for people. Text from clusters was escaped when it was read.
func printPaths(out io.Writer, paths []tracePath) error {
	for i, w := range paths {
		if i > 0 {
			fmt.Fprintln(out)
		}
		what := "packet"
		if w.Direction == "in" {
			what = "answer"
		}
		fmt.Fprintf(out, "%s %s: %s -> %s\n", w.Protocol, what, w.From, w.To)
		for _, h := range w.Hops {
			text := h.Text
			if h.Reason != "" && h.State != health.Works {
				text = h.Reason + ": " + text
			}
			fmt.Fprintf(out, "  %-12s %-8s %-8s %s\n", h.Cluster, h.Name, h.State, text)
		}
		if _, err := fmt.Fprintf(out, "  %s\n", w.Verdict); err != nil {
			return err
		}
	}
	return nil
}

// completePlace completes the names of Pods. For SRC, these are the Pods of this cluster. For DST,
// these are the Pods of the other cluster, if that cluster is queried.
func completePlace(cmd *cobra.Command, local, remote *cluster.Access, args []string, begin string) ([]string, cobra.ShellCompDirective) {
	access := *local
	if len(args) == 1 && otherCluster(local, remote) {
		access = *remote
	}
	c, err := cluster.Connect(access)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
	defer cancel()
	pods, err := place.Pods(ctx, c)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return withPrefix(pods, begin)
}
