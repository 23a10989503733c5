package demo

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/natengine"
)

const metricDrops = "isthmus_drops_total"

// mapEndpoint makes an endpoint of cluster b, which is not a pod, reachable from cluster a. It
// requests the mapping from b's manager.
func (s *show) mapEndpoint() error {
	server := s.b.OnPrem
	seen, err := s.b.MapEndpoint(s.ctx, server.Addr, s.a)
	if err != nil {
		return err
	}
	s.printf("%s, %v, is not a pod. The IPAM of b maps it for a, on a request by gRPC like that of Liqo's virtual kubelet: a reaches it at %v.", server, server.Addr, seen)
	from, err := s.a.RemotePod(s.ctx)
	if err != nil {
		return err
	}
	caller, err := s.b.Seen(s.ctx, s.a, from.Addr)
	if err != nil {
		return err
	}
	return s.talk(from.Host, server.Host, seen, caller)
}

// sendUnmapped sends to an address without a mapping, and checks the drop counter of the gateway.
func (s *show) sendUnmapped() error {
	p, err := s.a.Peering(s.ctx, s.b)
	if err != nil {
		return err
	}
	pods, err := netip.ParsePrefix(p.Status.Remote.PodCIDRSeen)
	if err != nil {
		return err
	}
	external, err := netip.ParsePrefix(p.Status.Remote.ExternalCIDRSeen)
	if err != nil {
		return err
	}
	nobody := external.Addr()
	for range 99 {
		nobody = nobody.Next()
	}
	for _, attempt := range []struct {
		dst    netip.Addr
		why    string
		reason natengine.Drop
	}{
		{nobody, "an address of b's ExternalCIDR to which nothing is mapped", natengine.DropNoMapping},
		{pods.Addr(), "the address that the nodes of b share, without a flow of such a node", natengine.DropNoFlow},
	} {
		labels := []string{fmt.Sprintf("direction=%q", natengine.Inbound), fmt.Sprintf("peer=%q", s.a.ID), fmt.Sprintf("reason=%q", attempt.reason)}
		before, err := s.b.Metric(s.ctx, metricDrops, labels...)
		if err != nil {
			return err
		}
		_, err = s.a.Pods[0].PingWith(s.ctx, attempt.dst, lab.PingOptions{Wait: 300 * time.Millisecond})
		if err == nil {
			return fmt.Errorf("%v, %s, answers", attempt.dst, attempt.why)
		}
		after := before
		for end := time.Now().Add(10 * time.Second); after <= before && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			if err := s.ctx.Err(); err != nil {
				return err
			}
			if after, err = s.b.Metric(s.ctx, metricDrops, labels...); err != nil {
				return err
			}
		}
		if after <= before {
			return fmt.Errorf("b's gateway did not count the packet to %v: %s{%s} stays %v", attempt.dst, metricDrops, strings.Join(labels, ","), before)
		}
		s.ok("a-pod1 -> %-12v no answer: %s", attempt.dst, attempt.why)
		s.printf("     counted at b, for peer a: %s{%s,%s} %v -> %v", metricDrops, labels[0], labels[2], before, after)
	}
	return nil
}
