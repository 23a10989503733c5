package fleet

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/postquantum"
)

// A keyExchange is an exchange of a preshared key. The side with the lower cluster ID sends the
// ML-KEM key, and the side with the higher one answers.
type keyExchange struct {
	lower, higher *fleet.Cluster
	before        string // ID of the exchange that produced the current key
	sent          string // first half of the ML-KEM key of that exchange
}

// A stage is a step of an exchange. It is visible in an object of one side.
type stage struct {
	name   string
	higher bool // the object is at the higher side
	list   client.ObjectList
	is     func(keyExchange, client.Object) bool
	fault  string // the crash to test without -long: one of the constants above
}

// stored detects a stage in the Secret in which a side stores its state.
func stored(is func(keyExchange, postquantum.State) bool) func(keyExchange, client.Object) bool {
	return func(x keyExchange, o client.Object) bool {
		secret, ok := o.(*corev1.Secret)
		if !ok || secret.Name != postquantum.SecretName {
			return false
		}
		for _, id := range []string{x.lower.ID, x.higher.ID} {
			var s postquantum.State
			if data := secret.Data[id]; data != nil && json.Unmarshal(data, &s) == nil && is(x, s) {
				return true
			}
		}
		return false
	}
}

// published detects a stage in the NetworkConfig that a side publishes.
func published(is func(x keyExchange, config v1alpha1.BackendConfig) bool) func(keyExchange, client.Object) bool {
	return func(x keyExchange, o client.Object) bool {
		nc, ok := o.(*v1alpha1.NetworkConfig)
		return ok && nc.Labels[v1alpha1.LabelReplication] == "true" && is(x, nc.Spec.BackendConfig)
	}
}

const (
	lowerManager  = "the manager of the lower side"
	higherManager = "the manager of the higher side"
	gatewayOfA    = "the active gateway, whose standby takes over"
)

// stages lists all stages of an exchange in order.
var stages = []stage{
	{"the key is stored", false, &corev1.SecretList{}, stored(func(x keyExchange, s postquantum.State) bool { return s.ID != x.before && s.Seed != nil }), lowerManager},
	{"the key is published", false, &v1alpha1.NetworkConfigList{}, published(func(x keyExchange, c v1alpha1.BackendConfig) bool { return c["kem0"] != x.sent }), gatewayOfA},
	{"the answer is stored", true, &corev1.SecretList{}, stored(func(_ keyExchange, s postquantum.State) bool { return s.Pending != nil }), higherManager},
	{"the answer is published", true, &v1alpha1.NetworkConfigList{}, published(func(x keyExchange, c v1alpha1.BackendConfig) bool {
		return c["kemFor"] != "" && c["kemFor"] != x.before
	}), lowerManager},
	{"the lower side uses the new key", false, &corev1.SecretList{}, stored(func(x keyExchange, s postquantum.State) bool { return s.Use.ID != x.before }), lowerManager},
	{"the key is confirmed", false, &v1alpha1.NetworkConfigList{}, published(func(x keyExchange, c v1alpha1.BackendConfig) bool { return c["kem0"] != x.sent && c["kemTag"] != "" }), gatewayOfA},
	{"the higher side uses the new key", true, &corev1.SecretList{}, stored(func(x keyExchange, s postquantum.State) bool { return s.Use.ID != x.before }), higherManager},
	{"the sessions use the new key", false, &v1alpha1.TunnelEndpointList{}, func(x keyExchange, o client.Object) bool {
		te, ok := o.(*v1alpha1.TunnelEndpoint)
		id := ""
		if ok {
			id = te.Status.Connection.PeerConfiguration[v1alpha1.ConfigPreshared]
		}
		return id != "" && id != x.before
	}, gatewayOfA},
	{"the former key is erased", false, &corev1.SecretList{}, stored(func(x keyExchange, s postquantum.State) bool { return s.Use.ID != x.before && !s.Changing() }), higherManager},
}

// await starts to wait for a stage and returns. As soon as the stage is visible, a goroutine calls
// do. The returned function waits for that call and returns its error.
func (s stage) await(t *testing.T, x keyExchange, do func() error) func() error {
	t.Helper()
	at := x.lower
	if s.higher {
		at = x.higher
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	now := s.list.DeepCopyObject().(client.ObjectList)
	must(t, at.Client.List(ctx, now))
	events, err := at.Client.Watch(ctx, s.list, &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: now.GetResourceVersion()}})
	must(t, err)
	came := make(chan error, 1)
	go func() {
		defer cancel()
		defer events.Stop()
		for e := range events.ResultChan() {
			if o, ok := e.Object.(client.Object); ok && e.Type != watch.Deleted && s.is(x, o) {
				came <- do()
				return
			}
		}
		came <- errors.New("it did not come")
	}()
	return func() error { return <-came }
}

// networkConfig returns the only NetworkConfig with the given labels.
func networkConfig(t *testing.T, at *fleet.Cluster, labels client.MatchingLabels) *v1alpha1.NetworkConfig {
	t.Helper()
	var list v1alpha1.NetworkConfigList
	must(t, at.Client.List(t.Context(), &list, labels))
	if len(list.Items) != 1 {
		t.Fatalf("%s has %d NetworkConfigs with %v", at, len(list.Items), labels)
	}
	return &list.Items[0]
}

// begin makes the lower side start an exchange. For that, it changes an answer that the lower side
// has already accepted: the one in its copy of the other side's NetworkConfig.
func (x keyExchange) begin(t *testing.T) {
	t.Helper()
	answer := networkConfig(t, x.lower, client.MatchingLabels{v1alpha1.LabelOriginID: x.higher.ID})
	was := states(t, x.lower)[x.higher.ID].ID
	eventually(t, "a new exchange", func() error {
		patch := `{"spec":{"backend_config":{"kemTag":"` + base64.StdEncoding.EncodeToString(make([]byte, 32)) + `"}}}`
		must(t, x.lower.Client.Patch(t.Context(), answer, client.RawPatch(types.MergePatchType, []byte(patch))))
		for range 20 { // the higher side's manager restores the answer, possibly before the lower side reads the change
			if states(t, x.lower)[x.higher.ID].ID != was {
				return nil
			}
		}
		return errors.New("there is none")
	})
}

// waitSettled waits until both sides and their sessions use the key of one exchange other than
// x.before, and no state of the exchange is left. It returns the ID of that exchange.
func (x keyExchange) waitSettled(t *testing.T) (id string) {
	t.Helper()
	id = waitPreshared(t, x.lower, x.higher, x.before)
	eventually(t, "one key at both sides", func() error {
		one, other := states(t, x.lower)[x.higher.ID], states(t, x.higher)[x.lower.ID]
		if one.Use != other.Use || one.Use.ID != id {
			return fmt.Errorf("the sessions have %q, %s has %q and %s %q", id, x.lower, one.Use.ID, x.higher, other.Use.ID)
		}
		if one.Changing() || other.Changing() || one.Seed != nil || other.Pending != nil {
			return errors.New("there is something left of the exchange")
		}
		return nil
	})
	return id
}

// everyStepOfAnExchange lets each component crash at each stage. The exchange must complete, and
// the sessions with the previous key must carry the traffic meanwhile.
func everyStepOfAnExchange(t *testing.T, f *fleet.Fleet, a, b *fleet.Cluster, from, to *lab.Pod, at netip.Addr) {
	x := keyExchange{lower: a, higher: b}
	if b.ID < a.ID {
		x.lower, x.higher = b, a
	}
	for _, s := range stages {
		for _, fault := range []string{lowerManager, higherManager, gatewayOfA} {
			if fault != s.fault && !*long {
				continue
			}
			t.Run(s.name+"/"+fault, func(t *testing.T) {
				x.before = ""
				x.before = x.waitSettled(t)
				x.sent = networkConfig(t, x.lower, client.MatchingLabels{v1alpha1.LabelReplication: "true"}).Spec.BackendConfig["kem0"]
				c, name := x.lower, fleet.Manager
				switch fault {
				case higherManager:
					c = x.higher
				case gatewayOfA:
					c, name = a, fleet.Gateway(active(t, a))
				}
				traffic := talk(t, from, to, at)
				came := s.await(t, x, func() error { return c.Kill(name) })
				x.begin(t)
				if err := came(); err != nil {
					t.Fatal(err)
				}
				if name == fleet.Manager {
					must(t, c.Start(t.Context(), name))
				} else {
					eventually(t, "the other gateway", func() error {
						if i, err := a.ActiveGateway(t.Context()); err != nil || fleet.Gateway(i) == name {
							return fmt.Errorf("gateway %d: %w", i, err)
						}
						return nil
					})
				}
				x.waitSettled(t)
				if name == fleet.Manager {
					traffic.endWithoutLoss(t)
					return
				}
				if o := traffic.end(t); o.outage > takeover {
					t.Errorf("pings were lost over %v; want at most %v", o.outage, takeover)
				}
				must(t, c.Start(t.Context(), name))
			})
		}
	}
	waitStatus(t, f, a, "ML-KEM-768")
	waitStatus(t, f, b, "ML-KEM-768")
}
