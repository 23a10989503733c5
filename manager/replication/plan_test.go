package replication

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

type edit = func(*v1alpha1.NetworkConfig)

func config(name string, edits ...edit) *v1alpha1.NetworkConfig {
	o := &v1alpha1.NetworkConfig{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		v1alpha1.LabelReplication: "true", v1alpha1.LabelRemoteID: "b",
	}}}
	for _, e := range edits {
		e(o)
	}
	return o
}

var (
	held    edit = func(o *v1alpha1.NetworkConfig) { o.Finalizers = append(o.Finalizers, v1alpha1.FinalizerReplicator) }
	claimed edit = func(o *v1alpha1.NetworkConfig) {
		o.Finalizers = append(o.Finalizers, v1alpha1.FinalizerTunnelEndpointCreator)
	}
	dying      edit = func(o *v1alpha1.NetworkConfig) { o.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }
	strange    edit = func(o *v1alpha1.NetworkConfig) { o.Labels[v1alpha1.LabelRemoteID] = "c" }
	unlabelled edit = func(o *v1alpha1.NetworkConfig) { delete(o.Labels, v1alpha1.LabelReplication) }
	moved      edit = func(o *v1alpha1.NetworkConfig) { o.Spec.EndpointIP = "198.51.100.8" }
	received   edit = func(o *v1alpha1.NetworkConfig) { o.Labels[v1alpha1.LabelReplication] = "false" }
	processed  edit = func(o *v1alpha1.NetworkConfig) { o.Status.Processed = true }
	renumbered edit = func(o *v1alpha1.NetworkConfig) { o.Spec.PodCIDR = "10.200.0.0/16" }
	changed    edit = func(o *v1alpha1.NetworkConfig) { o.Generation++ }
	answered1  edit = func(o *v1alpha1.NetworkConfig) { // answered by Isthmus, for the present generation
		o.Status.Processed = true
		o.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionAccepted, ObservedGeneration: o.Generation}}
	}
)

func TestPlanReturnsTheStepsForEachState(t *testing.T) {
	for name, tc := range map[string]struct {
		original *v1alpha1.NetworkConfig
		copies   []*v1alpha1.NetworkConfig
		want     string
	}{
		"nothing":                     {nil, nil, ""},
		"new":                         {config("n"), nil, "hold n, create n"},
		"held, no copy":               {config("n", held), nil, "create n"},
		"all well":                    {config("n", held), []*v1alpha1.NetworkConfig{config("n", received)}, ""},
		"copy without finalizer here": {config("n"), []*v1alpha1.NetworkConfig{config("n", received)}, "hold n"},
		"spec differs":                {config("n", held, moved), []*v1alpha1.NetworkConfig{config("n", received)}, "update n"},
		"label edited at the peer":    {config("n", held), []*v1alpha1.NetworkConfig{config("n")}, "update n"},
		"edited at the peer":          {config("n", held), []*v1alpha1.NetworkConfig{config("n", received, moved)}, "update n"},
		"status differs":              {config("n", held), []*v1alpha1.NetworkConfig{config("n", received, processed)}, "answer n"},
		"both differ":                 {config("n", held, moved), []*v1alpha1.NetworkConfig{config("n", received, processed)}, "update n, answer n"},
		"answer taken back":           {config("n", held, processed), []*v1alpha1.NetworkConfig{config("n", received)}, "answer n"},
		"networks changed, a Liqo has answered the older ones":       {config("n", held, renumbered), []*v1alpha1.NetworkConfig{config("n", received, processed)}, "remove n"},
		"networks changed, nobody has answered the older ones":       {config("n", held, renumbered), []*v1alpha1.NetworkConfig{config("n", received)}, "update n"},
		"networks changed, an Isthmus has answered the older ones":   {config("n", held, renumbered), []*v1alpha1.NetworkConfig{config("n", received, answered1)}, "update n"},
		"networks changed, the copy has them, and the answer is old": {config("n", held, renumbered), []*v1alpha1.NetworkConfig{config("n", received, answered1, renumbered, changed)}, ""},
		"networks changed, and an Isthmus has answered them":         {config("n", held, renumbered), []*v1alpha1.NetworkConfig{config("n", received, renumbered, changed, answered1)}, "answer n"},
		"networks changed, and a Liqo has answered them":             {config("n", held, renumbered), []*v1alpha1.NetworkConfig{config("n", received, renumbered, processed)}, "answer n"},
		"moved, and the copy was answered before":                    {config("n", held, moved, processed), []*v1alpha1.NetworkConfig{config("n", received, moved, answered1, changed)}, ""},
		"peer deletes the copy":                                      {config("n", held, moved), []*v1alpha1.NetworkConfig{config("n", received, claimed, dying)}, ""},
		"original goes":                                              {config("n", held, dying), []*v1alpha1.NetworkConfig{config("n", received)}, "remove n"},
		"original and copy go":                                       {config("n", held, dying), []*v1alpha1.NetworkConfig{config("n", received, claimed, dying)}, ""},
		"original goes, copy gone":                                   {config("n", held, dying), nil, "release n"},
		"original goes, never held":                                  {config("n", claimed, dying), nil, ""},
		"not held, but the copy exists":                              {config("n", claimed, dying), []*v1alpha1.NetworkConfig{config("n", received)}, "remove n"},
		"for another cluster":                                        {config("n", strange), nil, ""},
		"not to be replicated":                                       {config("n", unlabelled), nil, ""},
		"not any more":                                               {config("n", held, unlabelled), []*v1alpha1.NetworkConfig{config("n", received)}, "remove n"},
		"not any more, and it goes":                                  {config("n", held, unlabelled, dying), nil, "release n"},
		"orphans":                                                    {config("n", held), []*v1alpha1.NetworkConfig{config("z", received), config("a", received), config("y", received, dying), config("n", received)}, "remove a, remove z"},
		"no original at all":                                         {nil, []*v1alpha1.NetworkConfig{config("n", received)}, "remove n"},
	} {
		var got []string
		for _, a := range plan(Target{ID: "b"}, tc.original, byName(tc.copies)) {
			got = append(got, a.step.String()+" "+a.name)
		}
		if s := strings.Join(got, ", "); s != tc.want {
			t.Errorf("%s: %q, want %q", name, s, tc.want)
		}
	}
}

func byName(copies []*v1alpha1.NetworkConfig) map[string]*v1alpha1.NetworkConfig {
	m := map[string]*v1alpha1.NetworkConfig{}
	for _, c := range copies {
		m[c.Name] = c
	}
	return m
}

// From any state, repeated plans lead to a state that needs no plan. No plan publishes an original
// without a finalizer, releases an original while a copy exists, or uses an answer to other
// networks.
func TestRepeatedPlansReachAStateThatNeedsNone(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	pick := func(edits ...edit) (some []edit) {
		for _, e := range edits {
			if rng.IntN(2) == 0 {
				some = append(some, e)
			}
		}
		return some
	}
	for range 5000 {
		var original *v1alpha1.NetworkConfig
		if rng.IntN(5) > 0 {
			original = config("n", pick(held, claimed, dying, strange, unlabelled, moved, renumbered, processed)...)
		}
		var copies []*v1alpha1.NetworkConfig
		for _, name := range []string{"n", "m"} {
			if rng.IntN(2) == 0 {
				copies = append(copies, config(name, pick(claimed, dying, moved, processed, renumbered, received, answered1, changed)...))
			}
		}
		atPeer := byName(copies)
		inputs := fmt.Sprintf("%+v\n%+v", original, atPeer)
		rounds := 0
		for actions := plan(Target{ID: "b"}, original, atPeer); len(actions) > 0; actions = plan(Target{ID: "b"}, original, atPeer) {
			if rounds++; rounds > 5 { // replacing a copy takes one more round
				t.Fatalf("%s\ndoes not end: %v", inputs, actions)
			}
			for _, a := range actions {
				switch a.step {
				case hold:
					held(original)
				case create:
					if !slices.Contains(original.Finalizers, v1alpha1.FinalizerReplicator) {
						t.Fatalf("%s\ncreates what is not held", inputs)
					}
					atPeer[a.name] = config(a.name, received)
					atPeer[a.name].Spec = original.Spec
				case update:
					atPeer[a.name].Spec = original.Spec
					received(atPeer[a.name])
					changed(atPeer[a.name])
				case answer:
					if atPeer[a.name].Spec.PodCIDR != original.Spec.PodCIDR {
						t.Fatalf("%s\nbelieves an answer to other networks", inputs)
					}
					original.Status = atPeer[a.name].Status
				case remove:
					if dying(atPeer[a.name]); len(atPeer[a.name].Finalizers) == 0 {
						delete(atPeer, a.name)
					}
				case release:
					if atPeer[a.name] != nil {
						t.Fatalf("%s\nreleases although there is a copy", inputs)
					}
					original.Finalizers = slices.DeleteFunc(original.Finalizers, func(f string) bool { return f == v1alpha1.FinalizerReplicator })
				}
			}
			maps.DeleteFunc(atPeer, func(_ string, c *v1alpha1.NetworkConfig) bool { // the peer removes its finalizers
				return !c.DeletionTimestamp.IsZero() && rng.IntN(2) == 0
			})
		}
	}
}

// pruning is an API server that stores statuses without their conditions.
type pruning struct {
	client.Client
	patches int
}

func (p *pruning) Status() client.SubResourceWriter { return pruningStatus{p: p} }

type pruningStatus struct {
	client.SubResourceWriter
	p *pruning
}

func (s pruningStatus) Patch(_ context.Context, o client.Object, _ client.Patch, _ ...client.SubResourcePatchOption) error {
	o.(*v1alpha1.NetworkConfig).Status.Conditions = nil
	s.p.patches++
	return nil
}

// If the API server here drops the answer's condition, the answer is copied only once.
func TestAnswerIsCopiedOnceIfItsConditionIsDropped(t *testing.T) {
	api := new(pruning)
	original, c := config("n", held), config("n", received, answered1)
	w := &worker{peer: Target{ID: "b"}, r: &Replicator{opts: Options{Client: api}, pace: defaultPace}, copies: map[string]*v1alpha1.NetworkConfig{"n": c}}
	sync := func() {
		for _, a := range plan(w.peer, original, w.copies) {
			if err := w.do(t.Context(), a, original); err != nil || a.step != answer {
				t.Fatalf("%v: %v", a, err)
			}
		}
	}
	for range 3 {
		sync()
	}
	if api.patches != 1 || !original.Status.Processed {
		t.Errorf("%d patches of the same answer, and here is %+v", api.patches, original.Status)
	}
	original.Status = v1alpha1.NetworkConfigStatus{} // somebody has removed the answer
	sync()
	c.Status.PodCIDRNAT = "10.62.0.0/16"
	sync()
	if api.patches != 3 || original.Status.PodCIDRNAT != c.Status.PodCIDRNAT {
		t.Errorf("%d patches, and here is %+v", api.patches, original.Status)
	}
}

func TestPublishedConditionNamesTheMissingStep(t *testing.T) {
	peer := Target{ID: "b", Cluster: v1alpha1.ClusterIdentity{ClusterID: "b", ClusterName: "bravo"}, LocalNamespace: "here", RemoteNamespace: "there"}
	name := peer.Cluster.UniqueName()
	for _, tc := range []struct {
		original, copy *v1alpha1.NetworkConfig
		listed         bool
		status         metav1.ConditionStatus
		words          string
	}{
		{nil, nil, false, metav1.ConditionUnknown, "not read yet"},
		{nil, nil, true, metav1.ConditionFalse, "no NetworkConfig " + name},
		{config(name), nil, true, metav1.ConditionFalse, "does not exist yet"},
		{config(name, held, moved), config(name), true, metav1.ConditionFalse, "not up to date"},
		{config(name, held, processed), config(name), true, metav1.ConditionTrue, "namespace there at https://b"},
		{config(name, held), config(name, claimed, dying), true, metav1.ConditionFalse, "deleted by the peer"},
		{config(name, held, dying), config(name), true, metav1.ConditionFalse, "waiting for the deletion"},
		{config(name, held, dying), config(name, claimed, dying), true, metav1.ConditionFalse, v1alpha1.FinalizerTunnelEndpointCreator},
		{config(name, held, dying), nil, true, metav1.ConditionFalse, "was deleted"},
		{config(name, held, dying), nil, false, metav1.ConditionFalse, "waiting for the deletion"},
	} {
		v := view{peer: peer, server: "https://b", original: tc.original, copies: map[string]*v1alpha1.NetworkConfig{}, listed: tc.listed}
		if tc.copy != nil {
			v.copies[name] = tc.copy
		}
		got := v.published()
		reason := isthmus.ReasonPublishing
		if tc.status == metav1.ConditionTrue {
			reason = isthmus.ReasonUpToDate
		}
		if got.Status != tc.status || got.Reason != reason || !strings.Contains(got.Message, tc.words) {
			t.Errorf("%+v, want %s with %q", got, tc.status, tc.words)
		}
	}
}
