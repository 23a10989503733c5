package fleet

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	peerings "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/postquantum"
)

// TestPresharedKeysAreExchangedAndUsed tests the lifecycle of a preshared key between two clusters
// with two tunnels. At first, cluster b has no preshared keys: its components may not access the
// Secret, as in an older version.
func TestPresharedKeysAreExchangedAndUsed(t *testing.T) {
	tunnels := func(spec lab.ClusterSpec) lab.ClusterSpec {
		spec.Tunnels = 2
		return spec
	}
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{tunnels(inPods(clusterSpec("10.244.0.0/16", 2))), tunnels(clusterSpec("10.244.128.0/18", 2))}})
	a, b := f.Clusters[0], f.Clusters[1]
	restore := withoutPresharedKeys(t, b)
	peer(t, f, a, b)
	from, to := remotePod(t, a), remotePod(t, b)
	at := seen(t, a, b, to.Addr)
	var exchange string

	t.Run("PeerWithoutPresharedKeysConnectsWithoutOne", func(t *testing.T) {
		waitStatus(t, f, a, "none: the peer does not exchange preshared keys")
		waitStatus(t, f, b, "none: the Secret isthmus-system/isthmus-psk")
		_, err := firstPing(t.Context(), from.Host, func() (netip.Addr, error) { return at, nil })
		must(t, err)
	})
	t.Run("QuantumAttackerDecryptsTrafficWithoutPresharedKey", func(t *testing.T) {
		c := correspond(t, a, b, [32]byte{})
		waitStatus(t, f, a, "none: the peer does not exchange preshared keys")
		if n, certain := c.opened(); n != len(c.capture) || !certain {
			t.Errorf("%d of %d messages opened, certain %v: want all", n, len(c.capture), certain)
		}
		for i := range 2 {
			must(t, b.Start(t.Context(), fleet.Gateway(i)))
		}
		waitReady(t, a, b)
		_, err := firstPing(t.Context(), from.Host, func() (netip.Addr, error) { return at, nil })
		must(t, err)
	})
	t.Run("RequiredKeepsTheTunnelDownWithoutPresharedKey", func(t *testing.T) {
		demand(t, a, b, peerings.PostQuantumRequired)
		eventually(t, "a reason that says so", func() error {
			p, err := a.Peering(t.Context(), b)
			if err != nil {
				return err
			}
			for _, condition := range []string{peerings.ConditionConnected, peerings.ConditionReady} {
				if c := meta.FindStatusCondition(p.Status.Conditions, condition); c == nil || c.Reason != peerings.ReasonNoKey || c.Status != "False" {
					return fmt.Errorf("%s is %+v", condition, c)
				}
			}
			text, err := a.Scrape(t.Context(), fleet.Manager)
			if err == nil && !strings.Contains(text, `required="true"} 0`) {
				err = errors.New("no metric says so")
			}
			return err
		})
		eventually(t, "no answer through the tunnel", func() error {
			if _, err := from.PingWith(t.Context(), at, lab.PingOptions{Wait: time.Second}); err == nil {
				return errors.New("a ping was answered")
			}
			return nil
		})
		demand(t, a, b, peerings.PostQuantumPreferred)
		waitReady(t, a, b)
		time.Sleep(10 * time.Second) // until cluster b has noticed that cluster a lost the sessions of the second tunnel
	})
	t.Run("KeyIsIntroducedWithoutPacketLoss", func(t *testing.T) {
		traffic := talk(t, from, to, at)
		restore()
		begin := time.Now()
		must(t, b.Kill(fleet.Manager)) // restarts the manager, because its retry interval has grown
		must(t, b.Start(t.Context(), fleet.Manager))
		exchange = waitPreshared(t, a, b, "")
		t.Logf("a preshared key after %.1f s", time.Since(begin).Seconds())
		waitStatus(t, f, a, "ML-KEM-768")
		waitStatus(t, f, b, "ML-KEM-768")
		traffic.endWithoutLoss(t)
	})
	t.Run("RequiredDoesNotAffectTrafficWithAKey", func(t *testing.T) {
		eventually(t, "no former key that is none", func() error {
			for c, of := range map[*fleet.Cluster]*fleet.Cluster{a: b, b: a} {
				if s := states(t, c)[of.ID]; s.Changing() {
					return fmt.Errorf("%s does not know that %s has the key", c, of)
				}
			}
			return nil
		})
		traffic := talk(t, from, to, at)
		demand(t, a, b, peerings.PostQuantumRequired)
		demand(t, b, a, peerings.PostQuantumRequired)
		time.Sleep(3 * time.Second)
		traffic.endWithoutLoss(t)
		waitReady(t, a, b)
	})
	t.Run("ManagerRecoversFromALostSecret", func(t *testing.T) {
		demand(t, a, b, peerings.PostQuantumPreferred)
		demand(t, b, a, peerings.PostQuantumPreferred)
		traffic := talk(t, from, to, at)
		must(t, a.Kill(fleet.Manager))
		must(t, a.Client.Delete(t.Context(), pskSecret()))
		must(t, a.Start(t.Context(), fleet.Manager))
		exchange = waitPreshared(t, a, b, exchange)
		traffic.endWithoutLoss(t)
	})
	t.Run("StandbyTakesOverWithTheKey", func(t *testing.T) {
		was := active(t, a)
		must(t, a.Kill(fleet.Gateway(was)))
		eventually(t, "the other gateway", func() error {
			if i, err := a.ActiveGateway(t.Context()); err != nil || i == was {
				return fmt.Errorf("gateway %d: %w", i, err)
			}
			return nil
		})
		waitPreshared(t, a, b, "")
		_, err := firstPing(t.Context(), from.Host, func() (netip.Addr, error) { return at, nil })
		must(t, err)
		must(t, a.Start(t.Context(), fleet.Gateway(was)))
	})
	t.Run("EveryStepOfAnExchangeSurvivesACrash", func(t *testing.T) { everyStepOfAnExchange(t, f, a, b, from, to, at) })
	t.Run("NoOutputContainsAKey", func(t *testing.T) { checkNoKeyShown(t, f) })
	t.Run("QuantumAttackerDecryptsNothingWithPresharedKey", func(t *testing.T) { // must be the last subtest: b has no gateway afterwards
		waitPreshared(t, a, b, "")
		c := correspond(t, a, b, states(t, b)[a.ID].Use.Secret)
		waitStatus(t, f, a, "ML-KEM-768")
		if n, certain := c.opened(); n > 0 || certain {
			t.Errorf("%d of %d messages opened, certain %v: want none", n, len(c.capture), certain)
		}
	})
}

func pskSecret() *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.Namespace, Name: postquantum.SecretName}}
}

// withoutPresharedKeys removes the permissions of a cluster's components for the Secret of the
// keys. restore grants them again.
func withoutPresharedKeys(t *testing.T, c *fleet.Cluster) (restore func()) {
	t.Helper()
	before := map[string][]rbacv1.PolicyRule{}
	set := func(name string, rules []rbacv1.PolicyRule) (old []rbacv1.PolicyRule) {
		var role rbacv1.Role
		must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: name}, &role))
		old = slices.Clone(role.Rules)
		if role.Rules = rules; rules == nil {
			role.Rules = slices.DeleteFunc(slices.Clone(old), func(r rbacv1.PolicyRule) bool { return slices.Contains(r.ResourceNames, postquantum.SecretName) })
		}
		must(t, c.Client.Update(t.Context(), &role))
		return old
	}
	for _, name := range []string{"isthmus-manager", "isthmus-gateway"} {
		before[name] = set(name, nil)
	}
	must(t, client.IgnoreNotFound(c.Client.Delete(t.Context(), pskSecret())))
	for _, name := range c.Components() { // restart them, because they may have the keys in memory
		if name == fleet.Manager || strings.HasPrefix(name, "gateway") {
			must(t, c.Kill(name))
			must(t, c.Start(t.Context(), name))
		}
	}
	return func() {
		for name, rules := range before {
			set(name, rules)
		}
	}
}

// demand sets spec.postQuantum of a cluster's Peering with another cluster.
func demand(t *testing.T, at, with *fleet.Cluster, what peerings.PostQuantum) {
	t.Helper()
	p, err := at.Peering(t.Context(), with)
	must(t, err)
	must(t, at.Client.Patch(t.Context(), p, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"postQuantum":"`+string(what)+`"}}`))))
	eventually(t, "the gateway told", func() error {
		if got := endpointOf(t, at, with).Annotations[peerings.AnnotationPostQuantum]; (got != "") != (what == peerings.PostQuantumRequired) {
			return fmt.Errorf("the TunnelEndpoint says %q", got)
		}
		return nil
	})
}

// waitPreshared waits until the gateways of two clusters report that all sessions between them use
// the preshared key of the same exchange, which must not be the exchange before. It returns the
// ID of that exchange.
func waitPreshared(t *testing.T, a, b *fleet.Cluster, before string) (exchange string) {
	t.Helper()
	eventually(t, "a preshared key", func() error {
		one := endpointOf(t, a, b).Status.Connection.PeerConfiguration[v1alpha1.ConfigPreshared]
		other := endpointOf(t, b, a).Status.Connection.PeerConfiguration[v1alpha1.ConfigPreshared]
		if one == "" || one != other || one == before {
			return fmt.Errorf("%s has %q and %s has %q; before it was %q", a, one, b, other, before)
		}
		exchange = one
		return nil
	})
	return exchange
}

// waitStatus waits until `isthmus status -o wide` contains a text about the preshared key.
func waitStatus(t *testing.T, f *fleet.Fleet, at *fleet.Cluster, what string) {
	t.Helper()
	eventually(t, what+" in the status of "+at.Name, func() error {
		out, err := f.Isthmus(t.Context(), "status", "-o", "wide", "--context", at.Name) // status fails when a Peering is not ready
		if !strings.Contains(out, what) {
			return fmt.Errorf("%w:\n%s", err, out)
		}
		return nil
	})
}

// states returns the key exchange states that a cluster stores, by the ID of the peer.
func states(t *testing.T, c *fleet.Cluster) map[string]postquantum.State {
	t.Helper()
	secret, all := pskSecret(), map[string]postquantum.State{}
	must(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(secret), secret))
	for id, data := range secret.Data {
		var s postquantum.State
		must(t, json.Unmarshal(data, &s))
		all[id] = s
	}
	return all
}

// checkNoKeyShown checks that no output of the clusters contains a secret key, neither a current
// key nor one in former.
func checkNoKeyShown(t *testing.T, f *fleet.Fleet, former ...keyring.Ring) {
	t.Helper()
	var private [][32]byte
	for _, c := range f.Clusters {
		former = append(former, ringOf(t, c))
	}
	for _, ring := range former {
		private = append(private, ring.Private, ring.Next, ring.Gateways)
	}
	for _, c := range f.Clusters {
		texts := shownBy(t, f, c)
		secrets := 0
		for _, s := range states(t, c) {
			for _, secret := range s.Secrets() {
				secrets++
				for _, form := range []string{string(secret), base64.StdEncoding.EncodeToString(secret), hex.EncodeToString(secret), fmt.Sprint(secret)} {
					for where, text := range texts {
						if strings.Contains(text, form) {
							t.Errorf("cluster %s: %s has a preshared key", c, where)
						}
					}
				}
			}
		}
		for _, key := range private {
			if key == ([32]byte{}) {
				continue
			}
			for _, form := range []string{string(key[:]), string(keyring.Text(key)), hex.EncodeToString(key[:]), fmt.Sprint(key)} {
				for where, text := range texts {
					if strings.Contains(text, form) {
						t.Errorf("cluster %s: %s has a WireGuard private key", c, where)
					}
				}
			}
		}
		if secrets == 0 {
			t.Errorf("cluster %s has no preshared key", c)
		}
	}
}

// shownBy returns all visible output of a cluster: logs, objects, HTTP pages, and output of
// isthmus.
func shownBy(t *testing.T, f *fleet.Fleet, c *fleet.Cluster) map[string]string {
	t.Helper()
	texts := map[string]string{}
	for _, name := range c.Components() {
		text, err := os.ReadFile(c.Log(name))
		must(t, err)
		texts["log of "+name] = string(text)
		if c.Running(name) {
			texts["metrics of "+name], err = c.Scrape(t.Context(), name)
			must(t, err)
		}
	}
	page := func(what string, h *lab.Host, url string) {
		text, err := h.Get(t.Context(), url)
		must(t, err)
		texts[what] = text
	}
	page("status of the active gateway", c.GatewayHost(active(t, c)), "http://127.0.0.1:5873/status?flows=100")
	for i, n := range c.Nodes {
		page("status of "+fleet.Agent(i), n.Host, "http://127.0.0.1:5875/status")
	}
	for _, list := range []client.ObjectList{&peerings.PeeringList{}, &v1alpha1.NetworkConfigList{}, &v1alpha1.TunnelEndpointList{}, &eventsv1.EventList{}, &corev1.ConfigMapList{}} {
		must(t, c.Client.List(t.Context(), list))
		text, err := json.Marshal(list)
		must(t, err)
		texts[fmt.Sprintf("%T", list)] = string(text)
	}
	for _, args := range [][]string{{"status", "-o", "json"}, {"diagnose"}} {
		texts[strings.Join(args, " ")], _ = f.Isthmus(t.Context(), append(args, "--context", c.Name)...)
	}
	return texts
}
