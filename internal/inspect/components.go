package inspect

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/safetext"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
)

// components reads the Pods of the components, and other objects that describe them. It returns an
// error if the user may not read the Pods. It leaves out other objects that the user may not read.
func components(ctx context.Context, c *cluster.Cluster, now time.Time) (found health.Components, err error) {
	var pods corev1.PodList
	if err := c.Client.List(ctx, &pods, client.InNamespace(c.Namespace)); err != nil {
		return found, err
	}
	found.Pods = pods.Items
	var services corev1.ServiceList
	if c.Client.List(ctx, &services, client.InNamespace(c.Namespace), client.MatchingLabels{v1alpha1.LabelGateway: "true"}) == nil {
		found.Services = []string{}
		for i := range services.Items {
			found.Services = append(found.Services, safetext.Of(services.Items[i].Name))
		}
	}
	found.Broken, found.Refuses = make(map[string]*isthmus.BrokenOverlay), make(map[string]string)
	var reports isthmus.NodeNetworksList // optional: the agents' Pods suffice
	_ = c.Client.List(ctx, &reports, client.InNamespace(c.Namespace))
	connected := sync.OnceValue(func() bool { return anyConnected(ctx, c, now) })
	for i := range reports.Items {
		r := &reports.Items[i]
		if o := r.Spec.BrokenOverlay; o != nil && (!o.Back || connected()) {
			found.Broken[r.Name] = o
		}
		for _, p := range r.Spec.Problems {
			if health.Severity(p) == 0 {
				found.Refuses[r.Name] = safetext.Of(p.Reason) + ": " + safetext.Cut(p.Message, safetext.Message)
			}
		}
	}
	var warnings, over corev1.EventList // optional: Events only add detail
	about := client.MatchingFields{"type": corev1.EventTypeWarning, "involvedObject.kind": "Pod"}
	if c.Client.List(ctx, &warnings, client.InNamespace(c.Namespace), about) == nil {
		about = client.MatchingFields{"type": corev1.EventTypeNormal, "reason": isthmus.EventApplied, "involvedObject.kind": "Pod"}
		if c.Client.List(ctx, &over, client.InNamespace(c.Namespace), about) == nil {
			found.Events = health.LastWarnings(warnings.Items, over.Items, found.Pods, now)
		}
	}
	return found, nil
}

// anyConnected reports whether packets have gone both ways between this cluster and a peer for at
// least AgentsLag. If it returns false, an outage between the clusters may be the reason why a node
// received no packets.
func anyConnected(ctx context.Context, c *cluster.Cluster, now time.Time) bool {
	var list isthmus.PeeringList
	return c.Client.List(ctx, &list) == nil && slices.ContainsFunc(list.Items, func(p isthmus.Peering) bool { return health.ConnectedBefore(&p, now.Add(-health.AgentsLag)) })
}
