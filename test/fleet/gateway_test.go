package fleet

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	peerings "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/test/internal/hosts"
)

// takeover is the longest permitted interruption when the active gateway of a side dies; the Lease
// lasts 7 s. With -long, which needs a machine without other load, only half of it is permitted.
const takeover = 30 * time.Second

// The nodes use strict reverse path filters. If a takeover changes the path in only one direction,
// these filters drop packets.
func TestTrafficRecoversFromGatewayFaults(t *testing.T) {
	f := up(t, lab.Spec{RPFilter: lab.RPFilterStrict, Clusters: []lab.ClusterSpec{
		inPods(clusterSpec("10.244.0.0/16", 3)), clusterSpec("10.240.0.0/12", 2),
	}})
	a, b := f.Clusters[0], f.Clusters[1]
	peer(t, f, a, b)

	for _, end := range []struct {
		name  string
		do    func(c *fleet.Cluster, component string) error
		frees bool // the gateway releases the Lease, so the standby need not wait until it expires
	}{
		{"ActiveKilledStandbyTakesOver", (*fleet.Cluster).Kill, false},
		{"ActiveStoppedStandbyTakesOver", (*fleet.Cluster).Stop, true},
	} {
		t.Run(end.name, func(t *testing.T) {
			was := active(t, a)
			during := startTraffic(t, a, b)
			begin, before := time.Now(), lease(t, a)
			must(t, end.do(a, fleet.Gateway(was)))
			if after := lease(t, a); end.frees && *after.HolderIdentity == *before.HolderIdentity {
				t.Errorf("the gateway has ended and the Lease is still its own: %+v", after)
			}
			from, to := podOn(t, a, len(a.Nodes)-1), podOn(t, b, 1)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			var through int
			_, err := firstPing(ctx, from.Host, func() (netip.Addr, error) {
				var err error
				if through, err = a.ActiveGateway(ctx); err != nil || through == was {
					return netip.Addr{}, fmt.Errorf("active: %d, %w", through, err)
				}
				return a.Seen(ctx, b, to.Addr)
			})
			must(t, err)
			t.Logf("%s -> %s answers again through %s %.2f s after the end of the gateway on %s", from, to, a.Nodes[through], time.Since(begin).Seconds(), a.Nodes[was])
			time.Sleep(time.Second)
			most := takeover
			if *long {
				most /= 2
			}
			if *long && end.frees {
				most /= 2
			}
			for _, o := range during.end(t) {
				if o.outage > most {
					t.Errorf("pings were lost over %v; want at most %v", o.outage, most)
				}
			}
			podsToPods(t, a, b)
			must(t, a.Start(t.Context(), fleet.Gateway(was)))
			time.Sleep(time.Second)
			if now := active(t, a); now != through {
				t.Errorf("the gateway that came back is active; want it to stand by for %s", a.Nodes[through])
			}
			podsToPods(t, b, a)
		})
	}

	t.Run("ActivesOfBothSidesKilledAtOnce", func(t *testing.T) {
		// Neither side knows the other's new address at first, so neither can start a handshake.
		was := map[*fleet.Cluster]int{a: active(t, a), b: active(t, b)}
		during := startTraffic(t, a, b)
		begin := time.Now()
		for c, i := range was {
			must(t, c.Kill(fleet.Gateway(i)))
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := firstPing(ctx, a.Pods[0].Host, func() (netip.Addr, error) { return a.Seen(ctx, b, b.Pods[0].Addr) })
		must(t, err)
		t.Logf("%s -> %s answers %.2f s later", a.Pods[0], b.Pods[0], time.Since(begin).Seconds())
		time.Sleep(time.Second)
		for _, o := range during.end(t) {
			if o.outage > takeover {
				t.Errorf("pings were lost over %v; want at most %v", o.outage, takeover)
			}
		}
		for c, i := range was {
			must(t, c.Start(t.Context(), fleet.Gateway(i)))
		}
		podsToPods(t, a, b)
	})

	t.Run("NothingReportsReadyWithoutAGateway", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		go a.Kubelets(ctx)
		begin := time.Now()
		must(t, a.Kill(fleet.Gateway(0)))
		must(t, a.Kill(fleet.Gateway(1)))
		// Even before the Lease expires and the manager reports the outage, `isthmus status` must
		// report GatewaySilent, because of the Pods' phases.
		for {
			if out, err := f.Isthmus(ctx, "status", "--context", a.Name); err != nil && strings.Contains(out, "GatewaySilent") {
				t.Logf("after %.1f s:\n%s", time.Since(begin).Seconds(), out)
				break
			}
			must(t, ctx.Err())
			time.Sleep(100 * time.Millisecond)
		}
		for {
			p, err := a.Peering(ctx, b)
			must(t, err)
			if c := meta.FindStatusCondition(p.Status.Conditions, peerings.ConditionReady); c.Status == metav1.ConditionUnknown && c.Reason == peerings.ReasonGatewaySilent {
				t.Logf("the manager says after %.1f s: %s", time.Since(begin).Seconds(), c.Message)
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		out, err := f.Isthmus(ctx, "status", "--context", a.Name)
		if err == nil || !strings.Contains(out, "unknown") || !strings.Contains(out, "no gateway is active") {
			t.Errorf("status: %v\n%s", err, out)
		}
		must(t, a.Start(ctx, fleet.Gateway(0)))
		must(t, a.Start(ctx, fleet.Gateway(1)))
		must(t, a.WaitReady(ctx, b, patience))
		podsToPods(t, a, b)
	})

	t.Run("OnlyGatewayStaysActiveWithoutAPIServer", func(t *testing.T) {
		was := active(t, a)
		standby := 1 - was
		must(t, a.Stop(fleet.Gateway(standby)))
		phase(t, a, standby, corev1.PodSucceeded) // tells the active gateway that the standby has not taken over
		during := startTraffic(t, a, b)
		heal := cut(t, a, a.Nodes[was])
		time.Sleep(outage())
		heal()
		time.Sleep(time.Second)
		during.endWithoutLoss(t)
		if now := active(t, a); now != was {
			t.Errorf("active: %s; want %s", a.Nodes[now], a.Nodes[was])
		}
		phase(t, a, standby, corev1.PodRunning)
		must(t, a.Start(t.Context(), fleet.Gateway(standby)))
	})

	t.Run("ActiveStaysActiveIfOnlyTheAPIServerIsUnreachable", func(t *testing.T) {
		was := active(t, a)
		during := startTraffic(t, a, b)
		heal := cut(t, a, a.Nodes[was])
		time.Sleep(max(outage(), 15*time.Second)) // longer than the Lease, which lasts 7 s
		waitResponse(t, a, was, 5872, "/readyz", "ok, active")
		waitResponse(t, a, 1-was, 5872, "/readyz", "ok, standby for "+fleet.Gateway(was))
		heal()
		time.Sleep(time.Second)
		during.endWithoutLoss(t)
		if now := active(t, a); now != was {
			t.Errorf("active: %s; want %s", a.Nodes[now], a.Nodes[was])
		}
	})

	t.Run("ActiveStopsIfTheStandbyIsUnreachableToo", func(t *testing.T) {
		hosts.Need(t, "nft")
		was := active(t, a)
		during := startTraffic(t, a, b)
		reasons := reasonsOfTunnels(t, a, b)
		heal := cut(t, a, a.Nodes[was])
		filter(t, a.GatewayHost(was), "add chain ip fault on { type filter hook output priority 0; }; add rule ip fault on udp dport 5870 drop")
		begin := time.Now()
		eventually(t, "the standby's turn", func() error {
			if now := active(t, a); now == was {
				return fmt.Errorf("active: %s", a.Nodes[now])
			}
			return nil
		})
		t.Logf("the standby took over after %.1f s", time.Since(begin).Seconds())
		waitResponse(t, a, was, 5872, "/readyz", "503", "not sending: ")
		filter(t, a.GatewayHost(was), "")
		heal()
		begin = time.Now()
		eventually(t, "one active gateway", func() error {
			text, err := a.GatewayHost(was).Get(t.Context(), "http://127.0.0.1:5872/readyz")
			if err == nil && !strings.HasPrefix(text, "ok, standby") {
				err = fmt.Errorf("%s: %s", a.Nodes[was], text)
			}
			return err
		})
		stood := time.Since(begin)
		t.Logf("the one that was cut off stood down %.1f s after it was not any more", stood.Seconds())
		if stood > 30*time.Second { // the gateway sends a request every 2 s, with a timeout of 2.5 s
			t.Errorf("it stood down after %v", stood)
		}
		waitReady(t, a, b)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		from, to := podOn(t, a, 2), podOn(t, b, 1)
		took, err := firstPing(ctx, from.Host, func() (netip.Addr, error) { return a.Seen(ctx, b, to.Addr) })
		must(t, err)
		t.Logf("%s -> %s answers %.2f s later", from, to, took.Seconds())
		for _, reason := range reasons() {
			if !slices.Contains(unansweredReasons, reason) {
				t.Errorf("a tunnel's reason was %s", reason)
			}
		}
		time.Sleep(time.Second)
		during.end(t)
		podsToPods(t, a, b)
	})

	t.Run("ActiveDiesDuringAPIServerOutage", func(t *testing.T) {
		if !*long {
			t.Skip("takes long: -long runs it")
		}
		was := active(t, a)
		must(t, a.Server.Freeze())
		must(t, a.Kill(fleet.Gateway(was)))
		time.Sleep(outage())
		must(t, a.Server.Thaw())
		begin := time.Now()
		from, to := podOn(t, a, 2), podOn(t, b, 1)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := firstPing(ctx, from.Host, func() (netip.Addr, error) { return a.Seen(ctx, b, to.Addr) })
		must(t, err)
		t.Logf("%s -> %s answers %.2f s after the API server is back", from, to, time.Since(begin).Seconds())
		must(t, a.Start(t.Context(), fleet.Gateway(was)))
		podsToPods(t, a, b)
	})

	t.Run("KeyIsReplaced", func(t *testing.T) {
		during := startTraffic(t, a, b)
		key, err := ecdh.X25519().GenerateKey(rand.Reader)
		must(t, err)
		var secret corev1.Secret
		must(t, a.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: "wireguard-pubkey"}, &secret))
		text := func(b []byte) []byte { return []byte(base64.StdEncoding.EncodeToString(b)) }
		secret.Data = map[string][]byte{"privateKey": text(key.Bytes()), "publicKey": text(key.PublicKey().Bytes())}
		begin := time.Now()
		must(t, a.Client.Update(t.Context(), &secret))
		from, to := podOn(t, a, 2), podOn(t, b, 1)
		back := func() (netip.Addr, error) { return a.Seen(t.Context(), b, to.Addr) }
		eventually(t, "the peer's knowing the new key", func() error {
			var list v1alpha1.TunnelEndpointList
			if err := b.Client.List(t.Context(), &list); err != nil {
				return err
			}
			for _, te := range list.Items {
				if has := te.Spec.BackendConfig["publicKey"]; has != string(secret.Data["publicKey"]) {
					return fmt.Errorf("it has %s", has)
				}
			}
			return nil
		})
		t.Logf("the peer knows the key after %.2f s", time.Since(begin).Seconds())
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err = firstPing(ctx, from.Host, back)
		must(t, err)
		t.Logf("first ping with the new key after %.2f s", time.Since(begin).Seconds())
		begin = time.Now()
		for i := range 2 {
			must(t, a.Stop(fleet.Gateway(i)))
			must(t, a.Start(t.Context(), fleet.Gateway(i)))
		}
		again, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err = firstPing(again, from.Host, back)
		must(t, err)
		t.Logf("and %.2f s after both gateways were restarted, one after the other", time.Since(begin).Seconds())
		waitReady(t, a, b)
		time.Sleep(time.Second)
		during.end(t)
		podsToPods(t, a, b)
	})
}

// outage returns the duration of a fault that must not affect traffic.
func outage() time.Duration {
	if *long {
		return time.Minute
	}
	return 9 * time.Second // longer than the Lease
}

// lease returns the Lease of the gateways.
func lease(t *testing.T, c *fleet.Cluster) coordinationv1.LeaseSpec {
	t.Helper()
	var l coordinationv1.Lease
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: peerings.LeaseGateway}, &l))
	if l.Spec.HolderIdentity == nil {
		l.Spec.HolderIdentity = new(string)
	}
	return l.Spec
}

// phase sets the phase of the gateway's Pod on node i, as a kubelet would.
func phase(t *testing.T, c *fleet.Cluster, i int, phase corev1.PodPhase) {
	t.Helper()
	var p corev1.Pod
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: fleet.Gateway(i)}, &p))
	p.Status.Phase = phase
	must(t, c.Client.Status().Update(t.Context(), &p))
}

// cut makes the API server unreachable from a node, by dropping the responses.
func cut(t *testing.T, c *fleet.Cluster, n *lab.Node) (heal func()) {
	t.Helper()
	blackhole := netlink.Route{Dst: netlink.NewIPNet(n.Addr.AsSlice()), Type: unix.RTN_BLACKHOLE}
	must(t, c.Control.Do(func() error { return netlink.RouteAdd(&blackhole) }))
	healed := false
	heal = func() {
		if !healed {
			healed = true
			must(t, c.Control.Do(func() error { return netlink.RouteDel(&blackhole) }))
		}
	}
	t.Cleanup(heal)
	return heal
}

// unansweredReasons are reasons of a tunnel that do not refer to networks or keys.
var unansweredReasons = []string{v1alpha1.CauseConnected, v1alpha1.CauseConnecting, v1alpha1.CauseProbeUnanswered, v1alpha1.CauseAnswersLost, v1alpha1.CausePeerSilent, peerings.ReasonGatewaySilent}

// reasonsOfTunnels records the reasons of the condition Connected on both sides until end is
// called, which returns them.
func reasonsOfTunnels(t *testing.T, a, b *fleet.Cluster) (end func() []string) {
	ctx, stop := context.WithCancel(t.Context())
	all := map[string]bool{}
	var group sync.WaitGroup
	group.Go(func() {
		for tick := time.NewTicker(200 * time.Millisecond); ctx.Err() == nil; <-tick.C {
			for _, side := range [][2]*fleet.Cluster{{a, b}, {b, a}} {
				p, err := side[0].Peering(ctx, side[1])
				if err != nil {
					continue // end has canceled the request, or the API server is unreachable
				}
				if c := meta.FindStatusCondition(p.Status.Conditions, peerings.ConditionConnected); c != nil {
					all[c.Reason] = true
				}
			}
		}
	})
	return func() []string {
		stop()
		group.Wait()
		t.Logf("reasons of the tunnels: %v", slices.Sorted(maps.Keys(all)))
		return slices.Sorted(maps.Keys(all))
	}
}
