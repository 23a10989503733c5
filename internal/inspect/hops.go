package inspect

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/safetext"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
)

// clusterHops returns the hops that all peerings of a cluster share. It also returns the active
// manager and the active gateway.
func clusterHops(ctx context.Context, c *cluster.Cluster) (hops []health.Hop, manager, gateway health.Holder, err error) {
	if manager, err = cluster.HolderOf(ctx, c, cluster.ManagerLease, true); err != nil {
		return nil, manager, gateway, err
	}
	if gateway, err = cluster.HolderOf(ctx, c, isthmus.LeaseGateway, true); err != nil {
		return nil, manager, gateway, err
	}
	now, _ := c.Now()
	found, unlisted := components(ctx, c, now)
	mayNot := kubeerr.Forbidden(unlisted)
	if unlisted != nil && !mayNot {
		return nil, manager, gateway, c.Explain("Pods in "+c.Namespace, unlisted)
	}
	manager.EndWithPod(found.Pods, cluster.LeaseText(c, cluster.ManagerLease), false)
	gateway.EndWithPod(found.Pods, cluster.LeaseText(c, isthmus.LeaseGateway), len(found.Gateways()) > 0)
	hops = []health.Hop{
		health.LeaseHop(c.String(), health.HopManager, cluster.LeaseText(c, cluster.ManagerLease), manager, "start `isthmus manager`, or check why its Pods do not run or do not reach the API server"),
		health.LeaseHop(c.String(), health.HopGateway, cluster.LeaseText(c, isthmus.LeaseGateway), gateway, "check why the gateway's Pods do not run or do not reach the API server"),
	}
	if hops[0].State == health.Broken {
		if text := managersRoll(ctx, c, now); text != "" {
			manager.Problem, manager.Rolls = text+": "+manager.Problem, true
			hops[0].State, hops[0].Text, hops[0].Source = health.Limited, "no manager is active right now: "+manager.Problem, "Deployments in "+c.Namespace
		}
	}
	if mayNot {
		return append(hops, health.Hop{Cluster: c.String(), Name: health.HopAgents, State: health.Unknown, Source: "Pods in " + c.Namespace,
			Text: "you are not allowed to list Pods in " + c.Namespace}), manager, gateway, nil
	}
	found.ExplainManager(&hops[0])
	found.CheckGateway(&hops[1], gateway, now)
	wanted := gatewaysWanted(ctx, c)
	if wanted == 0 && health.NoneActive(&hops[1]) {
		hops[1].Text, hops[1].Source = "no gateway is active, because its Deployment has 0 replicas; scale it: kubectl -n "+c.Namespace+" scale deployment -l app.kubernetes.io/name=gateway --replicas=2", "Deployments in "+c.Namespace
	}
	if text := found.NoStandby(gateway.Name, wanted); text != "" && !health.NoneActive(&hops[1]) {
		hops = append(hops, health.Hop{Cluster: c.String(), Name: health.HopStandby, State: health.Limited, Reason: health.ReasonNoStandby, Source: "Pods in " + c.Namespace, Text: text})
	}
	nodes, err := nodeHops(ctx, c, found)
	if err != nil {
		return nil, manager, gateway, err
	}
	hops = append(hops, nodes...)
	health.ExcuseByGateway(hops, &hops[1], now)
	if clocks, differ := clockHop(ctx, c, manager, gateway); differ {
		hops = append(hops, clocks)
	}
	rights, lacking, err := rightsHop(ctx, c)
	if err != nil || rights == nil {
		return hops, manager, gateway, err
	}
	found.ExcuseRights(rights, hops, lacking, cli.ImageTag())
	for i := range hops {
		if h := &hops[i]; h.State == health.Broken && slices.Contains(lacking, health.Accounts[h.Name]) {
			h.State = health.Waits // the component waits for its rights
		}
	}
	return append([]health.Hop{*rights}, hops...), manager, gateway, nil
}

// nodeHops checks that every node that accepts a route agent has one, according to the kubelets.
// Nodes that are not ready get a separate hop. That hop is not broken, because the pods of such a
// node may be reachable if only its kubelet has lost the connection to the API server.
func nodeHops(ctx context.Context, c *cluster.Cluster, found health.Components) ([]health.Hop, error) {
	source := "Nodes, Pods in " + c.Namespace
	var nodes corev1.NodeList
	var sets appsv1.DaemonSetList
	switch err := c.Client.List(ctx, &nodes); {
	case kubeerr.Forbidden(err):
		return []health.Hop{{Cluster: c.String(), Name: health.HopAgents, Source: source, State: health.Unknown, Text: "you are not allowed to list Nodes"}}, nil
	case err != nil:
		return nil, c.Explain("Nodes", err)
	}
	if err := c.Client.List(ctx, &sets, client.InNamespace(c.Namespace)); err != nil && !kubeerr.Forbidden(err) {
		return nil, c.Explain("DaemonSets in "+c.Namespace, err)
	}
	hops := health.AgentHops(c.String(), source, found, health.AgentsOf(nodes.Items, found, sets.Items))
	if limited, found := kernelHop(ctx, c, nodes.Items); found {
		hops = append(hops, limited)
	}
	return hops, nil
}

// kernelHop returns a hop with the missing kernel features that route agents report. It ignores
// reports for nodes that no longer exist. It returns false if no feature is missing. The hop is
// broken if a missing feature makes a node drop packets, and otherwise limited.
func kernelHop(ctx context.Context, c *cluster.Cluster, nodes []corev1.Node) (health.Hop, bool) {
	hop := health.Hop{Cluster: c.String(), Name: health.HopKernels, State: health.Limited, Source: "NodeNetworks in " + c.Namespace}
	var reports isthmus.NodeNetworksList
	if err := c.Client.List(ctx, &reports, client.InNamespace(c.Namespace)); err != nil {
		if meta.IsNoMatchError(err) {
			return hop, false // an older version of Isthmus, whose agents write no reports
		}
		hop.State, hop.Text = health.Unknown, "NodeNetworks cannot be read: "+safetext.Of(kubeerr.Plain("the API server", err).Error())
		return hop, true
	}
	hop.State, hop.Text = health.CheckKernels(reports.Items, nodes)
	return hop, hop.Text != ""
}

// gatewaysWanted returns the number of gateway Pods that the Deployments request, or -1 if it is
// unknown.
func gatewaysWanted(ctx context.Context, c *cluster.Cluster) int {
	var deployments appsv1.DeploymentList // optional: the Pods suffice
	if c.Client.List(ctx, &deployments, client.InNamespace(c.Namespace), client.MatchingLabels{"app.kubernetes.io/name": "gateway"}) != nil || len(deployments.Items) == 0 {
		return -1
	}
	n := 0
	for i := range deployments.Items {
		n += int(ptr.Deref(deployments.Items[i].Spec.Replicas, 1))
	}
	return n
}

// managersRoll returns a sentence if a rollout of the managers is in progress or has just ended,
// and a manager is available to take over. Otherwise it returns "", also if it cannot read the
// Deployment.
func managersRoll(ctx context.Context, c *cluster.Cluster, now time.Time) string {
	var deployments appsv1.DeploymentList // optional, as in gatewaysWanted
	if c.Client.List(ctx, &deployments, client.InNamespace(c.Namespace), client.MatchingLabels{"app.kubernetes.io/name": "manager"}) != nil {
		return ""
	}
	return health.Rolls(deployments.Items, now)
}

// identityExpiry returns the time at which the token of a Peering's identity expires. It returns
// false if the time is unknown, or if the user may not read the token.
func identityExpiry(ctx context.Context, c *cluster.Cluster, p *isthmus.Peering) (time.Time, bool) {
	var secret corev1.Secret
	if err := c.Client.Get(ctx, client.ObjectKey{Namespace: p.Spec.TenantNamespace.Local, Name: p.Spec.IdentitySecretName}, &secret); err != nil {
		return time.Time{}, false
	}
	config, err := clientcmd.Load(secret.Data[isthmus.SecretKubeconfig])
	if err != nil {
		return time.Time{}, false
	}
	for _, user := range config.AuthInfos {
		if expiry, ok := tokenExpiry(user.Token); ok {
			return expiry, true
		}
	}
	return time.Time{}, false
}

// tokenExpiry reads the expiry of a JSON Web Token (RFC 7519, section 4.1.4). It does not
// verify the signature; the API server does.
func tokenExpiry(token string) (time.Time, bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}, false
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return time.Time{}, false
	}
	var claims struct {
		Expires int64 `json:"exp"`
	}
	if json.Unmarshal(text, &claims) != nil || claims.Expires <= 0 {
		return time.Time{}, false
	}
	return time.Unix(claims.Expires, 0).UTC(), true
}

// clockHop compares the times that manager, gateway and kubelets write into their Leases with the
// times at which the API server received them. It skips Leases that the user may not read. It
// returns false if no clock differs.
func clockHop(ctx context.Context, c *cluster.Cluster, manager, gateway health.Holder) (health.Hop, bool) {
	var leases coordinationv1.LeaseList // optional: the Leases of manager and gateway are known already
	_ = c.Client.List(ctx, &leases, client.InNamespace(corev1.NamespaceNodeLease))
	return health.CheckClocks(c.String(), manager, gateway, leases.Items)
}
