package services

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// If a peer changes its services all the time, they wait behind a single change of another peer.
func TestPeerThatChangesAllServicesDoesNotDelayOtherPeers(t *testing.T) {
	q := priorityqueue.New[reconcile.Request]("test")
	defer q.ShutDown()
	shard := func(tenant string, n, endpoints int) *isthmus.PeerServices {
		p := &isthmus.PeerServices{ObjectMeta: metav1.ObjectMeta{Namespace: tenant}}
		for i := range n {
			p.Spec.Services = append(p.Spec.Services, isthmus.ExportedService{Namespace: tenant, Name: fmt.Sprint(i),
				Subsets: []isthmus.EndpointSubset{{Endpoints: make([]isthmus.ExportedEndpoint, endpoints)}}})
		}
		return p
	}
	const services = 1000
	for name, quiet := range map[string]func(handler.TypedFuncs[*isthmus.PeerServices, reconcile.Request]){
		"a change": func(h handler.TypedFuncs[*isthmus.PeerServices, reconcile.Request]) {
			changed := shard("quiet", 1, 2)
			changed.ResourceVersion = "2"
			h.Update(t.Context(), event.TypedUpdateEvent[*isthmus.PeerServices]{ObjectOld: shard("quiet", 1, 1), ObjectNew: changed}, q)
		},
		"the start of the manager": func(h handler.TypedFuncs[*isthmus.PeerServices, reconcile.Request]) {
			h.Create(t.Context(), event.TypedCreateEvent[*isthmus.PeerServices]{Object: shard("quiet", 1, 1), IsInInitialList: true}, q)
		},
	} {
		h := differing(budgets{})
		h.Create(t.Context(), event.TypedCreateEvent[*isthmus.PeerServices]{Object: shard("busy", services, 1), IsInInitialList: true}, q)
		quiet(h)
		at := 0
		for i := 1; i <= services+1; i++ {
			r, _, _ := q.GetWithPriority()
			if r.Namespace == "quiet" {
				at = i
			}
			q.Done(r)
		}
		if at == 0 || at > tokensInTurn+2 {
			t.Errorf("%s: the service of the quiet peer is number %d; want it after %d of the busy one at most", name, at, tokensInTurn)
		}
	}
}

func TestBudgetsOfPeersAreSeparateAndRefill(t *testing.T) {
	b, now := budgets{}, time.Now()
	large := &isthmus.ExportedService{Subsets: []isthmus.EndpointSubset{{Endpoints: make([]isthmus.ExportedEndpoint, isthmus.MaxExportedEndpoints)}}}
	n := 0
	for b.charge("busy", large, now).After == 0 {
		n++
	}
	if want := tokensBurst / 26; n != want {
		t.Errorf("%d large services are looked at at once; want %d", n, want)
	}
	if o := b.charge("quiet", large, now); o.After != 0 || o.Priority != nil {
		t.Errorf("another peer is charged: %+v", o)
	}
	if o := b.charge("busy", large, now.Add(time.Second)); o.After != 0 || o.Priority == nil {
		t.Errorf("a second later: %+v", o)
	}
	if o := b.charge("busy", large, now.Add(tokensPause+time.Second)); o.After != 0 || o.Priority != nil {
		t.Errorf("after the pause: %+v", o)
	}
}
