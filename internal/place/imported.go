package place

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/corefile"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// underZone is the suffix of the names of imported Services.
const underZone = ".svc." + corefile.Zone

// IsImportedName reports whether a name, with or without :PORT, belongs to an imported Service.
func IsImportedName(name string) bool {
	bare, _, _ := strings.Cut(name, ":")
	return strings.HasSuffix(strings.TrimSuffix(bare, "."), underZone)
}

// An importedName is the parsed name of an imported Service, or of one endpoint of an imported
// headless Service.
type importedName struct {
	text            string // without the port
	namespace, name string
	host, cluster   string // host name and cluster of the endpoint; empty: any endpoint
	port            uint16 // 0: the name has no port
}

func parseImportedName(text string) (n importedName, err error) {
	if n.text, n.port, err = splitPort(text); err != nil {
		return n, err
	}
	switch parts := strings.Split(strings.TrimSuffix(strings.TrimSuffix(n.text, "."), underZone), "."); len(parts) {
	case 2:
		n.name, n.namespace = parts[0], parts[1]
	case 4:
		n.host, n.cluster, n.name, n.namespace = parts[0], parts[1], parts[2], parts[3]
	default:
		return n, fmt.Errorf("%s: want NAME.NAMESPACE%[2]s, or HOSTNAME.CLUSTER.NAME.NAMESPACE%[2]s", safetext.Of(text), underZone)
	}
	return n, nil
}

// Imported finds a ready endpoint behind the name of an imported Service. It prefers endpoints
// of the given peer, then those of any peer, then those of this cluster. If peer is empty, it
// prefers no peer.
func Imported(ctx context.Context, c *cluster.Cluster, text, peer string) (Place, error) {
	n, err := parseImportedName(text)
	if err != nil {
		return Place{}, err
	}
	what := safetext.Of("ServiceImport " + n.namespace + "/" + n.name)
	var i mcs.ServiceImport
	switch err := c.Client.Get(ctx, client.ObjectKey{Namespace: n.namespace, Name: n.name}, &i); {
	case meta.IsNoMatchError(err):
		return Place{}, fmt.Errorf("%s: this cluster does not share services; run `isthmus install --context %s --services` first", c, c.Context)
	case apierrors.IsNotFound(err):
		return Place{}, notImported(ctx, c, n)
	case err != nil:
		return Place{}, c.Explain(what, err)
	}
	var list discoveryv1.EndpointSliceList
	if err := c.Client.List(ctx, &list, client.InNamespace(n.namespace), client.MatchingLabels{mcs.LabelServiceName: n.name}); err != nil {
		return Place{}, c.Explain("EndpointSlices of "+what, err)
	}
	var peerings isthmus.PeeringList
	if err := c.Client.List(ctx, &peerings); err != nil {
		return Place{}, c.Explain("Peerings", err)
	}
	addr, by, err := n.choose(&i, list.Items, peerings.Items, peer)
	if err != nil {
		return Place{}, fmt.Errorf("%s: %s %w", c, what, err)
	}
	p, err := At(ctx, c, addr)
	p.By = by
	return p, err
}

// notImported returns an error with the reason why there is no ServiceImport.
func notImported(ctx context.Context, c *cluster.Cluster, n importedName) error {
	var all isthmus.PeerServicesList
	if err := c.Client.List(ctx, &all); err != nil {
		return c.Explain("PeerServices", err)
	}
	var peerings isthmus.PeeringList
	if err := c.Client.List(ctx, &peerings); err != nil {
		return c.Explain("Peerings", err)
	}
	var why []string
	for i := range all.Items {
		p := &all.Items[i]
		if !slices.ContainsFunc(p.Spec.Services, func(s isthmus.ExportedService) bool { return s.Namespace == n.namespace && s.Name == n.name }) {
			continue
		}
		from := p.Namespace
		for _, peering := range peerings.Items {
			if peering.Spec.TenantNamespace.Local == p.Namespace {
				from = peering.Name
			}
		}
		text := "the manager has not checked it yet"
		for _, r := range p.Status.Refused {
			if r.Namespace == n.namespace && r.Name == n.name && p.Status.ObservedGeneration == p.Generation {
				text = safetext.Of(r.Reason) + ": " + safetext.Cut(r.Message, safetext.Message)
			}
		}
		why = append(why, "peer "+safetext.Of(from)+" exports it: "+text)
	}
	if len(why) == 0 {
		why = append(why, "no peer exports it to this cluster")
	}
	return fmt.Errorf("%s: Service %s is not imported: %s", c, safetext.Of(n.namespace+"/"+n.name), safetext.FirstFew(why, "; "))
}

// choose selects an endpoint of an imported Service. The result origin is a text with the
// endpoint's cluster and the number of ready endpoints in each cluster.
func (n importedName) choose(i *mcs.ServiceImport, list []discoveryv1.EndpointSlice, peerings []isthmus.Peering, peer string) (addr netip.AddrPort, origin string, err error) {
	var portName *string // name of the endpoints' port
	if i.Spec.Type != mcs.Headless {
		for _, p := range i.Spec.Ports {
			if int32(n.port) == p.Port || n.port == 0 && len(i.Spec.Ports) == 1 {
				portName = &p.Name
			}
		}
		if portName == nil && n.port != 0 {
			return addr, "", fmt.Errorf("has no port %d", n.port)
		}
	}
	type cluster struct {
		ready, all int
		down       string // reason why the peer is not connected; empty: the peer is connected
	}
	clusters := map[string]*cluster{}
	for _, s := range i.Status.Clusters {
		clusters[s.Cluster] = &cluster{}
	}
	var from string
	best := 3 // lowest rank of a ready endpoint: 0 for the given peer, 1 for another peer, 2 for this cluster
	for _, e := range endpointsIn(list, portName, n.port) {
		if n.host != "" && (n.host != e.host || n.cluster != e.cluster) {
			continue
		}
		if clusters[e.cluster] == nil {
			clusters[e.cluster] = &cluster{}
		}
		count, rank := clusters[e.cluster], 2
		for j := range peerings {
			p := &peerings[j]
			if seen, err := netip.ParsePrefix(p.Status.Remote.PodCIDRSeen); err != nil || !seen.Contains(e.addr.Addr()) {
				continue
			}
			if rank = 1; p.Spec.Cluster.ClusterID == peer {
				rank = 0
			}
			if tunnel := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionConnected); tunnel != nil && tunnel.Status != metav1.ConditionTrue {
				count.down = " (not connected: " + safetext.Of(tunnel.Reason) + ")"
			}
		}
		if count.all++; !e.ready {
			continue
		}
		count.ready++
		if rank < best || rank == best && e.addr.Compare(addr) < 0 {
			best, addr, from = rank, e.addr, e.cluster
		}
	}
	var counts []string
	for _, name := range slices.Sorted(maps.Keys(clusters)) {
		count := clusters[name]
		if n.host == "" || n.cluster == name {
			counts = append(counts, fmt.Sprintf("%s %d of %d%s", safetext.Of(name), count.ready, count.all, count.down))
		}
	}
	ready := strings.Join(counts, ", ")
	switch {
	case addr.IsValid():
		return addr, fmt.Sprintf("%s, endpoint of %s; ready endpoints: %s", safetext.Of(n.text), safetext.Of(from), ready), nil
	case n.host != "":
		return addr, "", fmt.Errorf("has no ready endpoint %s of cluster %s; ready endpoints: %s", safetext.Of(n.host), safetext.Of(n.cluster), cmp.Or(ready, "none"))
	}
	return addr, "", fmt.Errorf("has no ready endpoint; ready endpoints: %s", cmp.Or(ready, "none"))
}
