package control

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
)

// A liqo simulates Liqo v0.9.4 in one cluster: the crd-replicator and, unless Isthmus replaces it,
// the network-manager. Its reads, writes, refusals and omissions are those that we recorded from
// Liqo. It shares no code with Isthmus, not even types, and works on the JSON of objects.
type liqo struct {
	id      string
	client  client.Client
	manager *liqoManager // nil: Isthmus is the network-manager

	clients map[string]client.Client // clients of the peers, by resourceVersion of the identity

	mu      sync.Mutex
	trouble map[string]bool // errors that Liqo would have logged, except conflicts
}

// A liqoManager has the configuration of a network-manager, and its IPAM.
type liqoManager struct {
	granted map[string][2]string // allocated networks by peer: its PodCIDR and ExternalCIDR as used here; entries never change

	mu       sync.Mutex
	config   liqoSpec          // the published spec, without the receiver
	remapped map[string]string // networks of peers that are remapped, and their replacements
}

// publish changes the published configuration.
func (m *liqoManager) publish(change func(*liqoSpec)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.config)
}

// remap makes the IPAM replace networks of future peers by others.
func (m *liqoManager) remap(networks map[string]string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.remapped = networks
}

type liqoIdentity struct {
	ClusterID   string `json:"clusterID"`
	ClusterName string `json:"clusterName"`
}

// uniqueName returns the cluster's name as it is used in names of objects.
func (c liqoIdentity) uniqueName() string {
	sum := sha256.Sum256([]byte(c.ClusterID))
	return c.ClusterName + "-" + hex.EncodeToString(sum[:])[:6]
}

type liqoSpec struct {
	Cluster       liqoIdentity      `json:"cluster"`
	PodCIDR       string            `json:"podCIDR"`
	ExternalCIDR  string            `json:"externalCIDR"`
	EndpointIP    string            `json:"endpointIP"`
	BackendType   string            `json:"backendType"`
	BackendConfig map[string]string `json:"backend_config"`
}

type liqoConfig struct {
	metav1.ObjectMeta `json:"metadata"`

	Spec   liqoSpec `json:"spec"`
	Status struct {
		Processed       bool   `json:"processed"`
		PodCIDRNAT      string `json:"podCIDRNAT,omitempty"`
		ExternalCIDRNAT string `json:"externalCIDRNAT,omitempty"`
	} `json:"status"`
}

// A liqoForeign has the fields of a ForeignCluster that a liqo uses.
type liqoForeign struct {
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		ClusterIdentity liqoIdentity `json:"clusterIdentity"`
		PeeringType     string       `json:"peeringType"`
	} `json:"spec"`
	Status struct {
		TenantNamespace struct {
			Local  string `json:"local"`
			Remote string `json:"remote"`
		} `json:"tenantNamespace"`
		PeeringConditions []struct {
			Type   string `json:"type"`
			Status string `json:"status"`
		} `json:"peeringConditions"`
	} `json:"status"`
}

// phase reports whether an incoming or outgoing peering is established, and whether one is enabled,
// established or not.
func (f *liqoForeign) phase() (established, enabled bool) {
	for _, c := range f.Status.PeeringConditions {
		if c.Type == "IncomingPeering" || c.Type == "OutgoingPeering" {
			established = established || c.Status == "Established"
			enabled = enabled || c.Status != "" && c.Status != "None"
		}
	}
	return established, enabled
}

var (
	foreignKind  = schema.GroupVersionKind{Group: "discovery.liqo.io", Version: "v1alpha1", Kind: "ForeignCluster"}
	configKind   = schema.GroupVersionKind{Group: "net.liqo.io", Version: "v1alpha1", Kind: "NetworkConfig"}
	endpointKind = schema.GroupVersionKind{Group: "net.liqo.io", Version: "v1alpha1", Kind: "TunnelEndpoint"}
)

// Finalizers of Liqo's components.
const (
	replicatorFinalizer = "crdReplicator.liqo.io"
	creatorFinalizer    = "tunnelendpointcreator.net.liqo.io"
)

// run does Liqo's work until ctx ends. Liqo reacts to events. run repeats all work all the time,
// which has the same result.
func (l *liqo) run(ctx context.Context) {
	for ctx.Err() == nil {
		foreigns, err := listOf(ctx, l.client, foreignKind)
		l.complain(ctx, err)
		for i := range foreigns {
			f, err := into[liqoForeign](&foreigns[i])
			if err != nil {
				l.complain(ctx, err)
				continue
			}
			if l.manager != nil {
				l.complain(ctx, l.manage(ctx, &foreigns[i], f))
			}
			l.complain(ctx, l.replicate(ctx, &foreigns[i], f))
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// complain records errors that the next round does not resolve.
func (l *liqo) complain(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil || apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) ||
		apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) || apierrors.IsTooManyRequests(err) { // the API server is busy
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.trouble == nil {
		l.trouble = make(map[string]bool)
	}
	l.trouble[err.Error()] = true
}

// complaints returns the recorded errors, sorted, and clears them.
func (l *liqo) complaints() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := slices.Sorted(maps.Keys(l.trouble))
	l.trouble = nil
	return all
}

// replicate does the work of the crd-replicator for one peer.
func (l *liqo) replicate(ctx context.Context, fc *unstructured.Unstructured, f *liqoForeign) error {
	_, enabled := f.phase()
	here, there := f.Status.TenantNamespace.Local, f.Status.TenantNamespace.Remote
	if here == "" || there == "" || f.Spec.PeeringType == "InBand" {
		return nil
	}
	remote, err := l.identity(ctx, here)
	if remote == nil || err != nil {
		return err
	}
	originals, err := listOf(ctx, l.client, configKind, client.MatchingLabels{"liqo.io/replication": "true"}, client.HasLabels{"liqo.io/remoteID"},
		client.InNamespace(here))
	if err != nil {
		return err
	}
	copies, err := listOf(ctx, remote, configKind, client.InNamespace(there), client.MatchingLabels{"liqo.io/originID": l.id, "liqo.io/replicated": "true"})
	if err != nil {
		return fmt.Errorf("copies at %s: %w", f.Spec.ClusterIdentity.ClusterName, err)
	}
	if len(originals)+len(copies) == 0 && !enabled {
		if f.DeletionTimestamp != nil && controllerutil.RemoveFinalizer(fc, replicatorFinalizer) {
			return l.client.Update(ctx, fc)
		}
		return nil
	}
	if f.DeletionTimestamp == nil && controllerutil.AddFinalizer(fc, replicatorFinalizer) {
		return l.client.Update(ctx, fc)
	}
	known := make(map[string]bool)
	for i := range originals {
		original := &originals[i]
		if original.GetLabels()["liqo.io/remoteID"] != f.Spec.ClusterIdentity.ClusterID {
			continue
		}
		known[original.GetName()] = true
		var copied *unstructured.Unstructured
		if at := slices.IndexFunc(copies, func(u unstructured.Unstructured) bool { return u.GetName() == original.GetName() }); at >= 0 {
			copied = &copies[at]
		}
		err = errors.Join(err, l.mirror(ctx, original, copied, remote, there))
	}
	for i := range copies {
		if !known[copies[i].GetName()] {
			err = errors.Join(err, remote.Delete(ctx, &copies[i]))
		}
	}
	return err
}

// mirror takes the next step for one original. copied is nil if there is no copy.
func (l *liqo) mirror(ctx context.Context, original, copied *unstructured.Unstructured, remote client.Client, there string) error {
	switch {
	case original.GetDeletionTimestamp() != nil && copied != nil:
		return remote.Delete(ctx, copied)
	case original.GetDeletionTimestamp() != nil:
		if controllerutil.RemoveFinalizer(original, replicatorFinalizer) {
			return l.client.Update(ctx, original)
		}
		return nil
	case controllerutil.AddFinalizer(original, replicatorFinalizer):
		return l.client.Update(ctx, original)
	case copied == nil:
		labels := original.GetLabels()
		delete(labels, "liqo.io/ownership")
		labels["liqo.io/replication"], labels["liqo.io/replicated"], labels["liqo.io/originID"] = "false", "true", l.id
		copied = &unstructured.Unstructured{Object: map[string]any{"spec": original.Object["spec"]}}
		copied.SetGroupVersionKind(configKind)
		copied.SetName(original.GetName())
		copied.SetNamespace(there)
		copied.SetLabels(labels)
		copied.SetAnnotations(original.GetAnnotations())
		return remote.Create(ctx, copied)
	case !reflect.DeepEqual(copied.Object["spec"], original.Object["spec"]):
		copied.Object["spec"] = original.Object["spec"]
		return remote.Update(ctx, copied)
	case copied.Object["status"] != nil && !reflect.DeepEqual(copied.Object["status"], original.Object["status"]):
		original.Object["status"] = copied.Object["status"]
		return l.client.Status().Update(ctx, original)
	}
	return nil
}

// identity returns a client for the peer with the newest identity in a tenant namespace, or nil if
// there is none yet.
func (l *liqo) identity(ctx context.Context, namespace string) (client.Client, error) {
	var secrets corev1.SecretList
	if err := l.client.List(ctx, &secrets, client.InNamespace(namespace), client.MatchingLabels{"discovery.liqo.io/local-identity": "true"}); err != nil {
		return nil, err
	}
	if len(secrets.Items) == 0 {
		return nil, nil
	}
	newest := slices.MaxFunc(secrets.Items, func(a, b corev1.Secret) int {
		expires := func(s corev1.Secret) int64 {
			seconds, _ := strconv.ParseInt(s.Annotations["discovery.liqo.io/certificate-expire-time"], 10, 64)
			return seconds
		}
		return cmp.Compare(expires(a), expires(b))
	})
	version := string(newest.UID) + newest.ResourceVersion
	if l.clients[version] == nil {
		c, err := client.New(&rest.Config{
			Host: string(newest.Data["apiServerUrl"]), QPS: -1,
			TLSClientConfig: rest.TLSClientConfig{CAData: newest.Data["apiServerCa"], CertData: newest.Data["certificate"], KeyData: newest.Data["private-key"]},
		}, client.Options{})
		if err != nil {
			return nil, err
		}
		l.clients = map[string]client.Client{version: c}
	}
	return l.clients[version], nil
}

// manage does the work of the network-manager for one peer.
func (l *liqo) manage(ctx context.Context, fc *unstructured.Unstructured, f *liqoForeign) error {
	peer, namespace := f.Spec.ClusterIdentity, f.Status.TenantNamespace.Local
	if peer.ClusterID == "" || namespace == "" || f.Spec.PeeringType == "InBand" {
		return nil
	}
	all, err := listOf(ctx, l.client, configKind, client.InNamespace(namespace))
	if err != nil {
		return err
	}
	var local, remote []*unstructured.Unstructured
	for i := range all {
		labels := all[i].GetLabels()
		switch {
		case labels["liqo.io/replication"] == "true" && labels["liqo.io/remoteID"] == peer.ClusterID:
			local = append(local, &all[i])
		case labels["liqo.io/originID"] == peer.ClusterID:
			remote = append(remote, &all[i])
		}
	}
	if len(remote) > 1 {
		return fmt.Errorf("%d NetworkConfigs of cluster %s", len(remote), peer.ClusterID)
	}
	if err := l.create(ctx, fc, f, local); err != nil {
		return err
	}
	for _, nc := range remote {
		if err := l.answer(ctx, nc, fc, peer.ClusterID); err != nil {
			return err
		}
	}
	for _, nc := range local {
		if err := l.process(ctx, nc, remote, fc, peer); err != nil {
			return err
		}
	}
	return nil
}

// create does the work of Liqo's NetworkConfig creator: it creates, corrects or deletes the
// cluster's own NetworkConfig.
func (l *liqo) create(ctx context.Context, fc *unstructured.Unstructured, f *liqoForeign, local []*unstructured.Unstructured) error {
	l.manager.mu.Lock()
	spec := l.manager.config
	l.manager.mu.Unlock()
	spec.Cluster = f.Spec.ClusterIdentity
	wanted, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&spec)
	if err != nil {
		return err
	}
	established, _ := f.phase()
	switch {
	case f.DeletionTimestamp != nil || !established:
		for _, nc := range local {
			if nc.GetDeletionTimestamp() == nil {
				err = errors.Join(err, l.client.Delete(ctx, nc))
			}
		}
		return err
	case len(local) == 0:
		nc := &unstructured.Unstructured{Object: map[string]any{"spec": wanted}}
		nc.SetGroupVersionKind(configKind)
		nc.SetNamespace(f.Status.TenantNamespace.Local)
		nc.SetName(spec.Cluster.uniqueName())
		nc.SetLabels(map[string]string{"liqo.io/replication": "true", "liqo.io/remoteID": spec.Cluster.ClusterID, "liqo.io/ownership": "netcfgCreator"})
		nc.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(fc, foreignKind)})
		return l.client.Create(ctx, nc)
	case local[0].GetDeletionTimestamp() == nil && !reflect.DeepEqual(local[0].Object["spec"], wanted):
		local[0].Object["spec"] = wanted
		return l.client.Update(ctx, local[0])
	}
	return nil
}

// answer processes the NetworkConfig of the peer. A deletion of that NetworkConfig has no effect,
// because Liqo looks for the peer in the wrong namespace.
func (l *liqo) answer(ctx context.Context, nc, fc *unstructured.Unstructured, id string) error {
	if nc.GetDeletionTimestamp() != nil {
		if controllerutil.RemoveFinalizer(nc, creatorFinalizer) {
			return l.client.Update(ctx, nc)
		}
		return nil
	}
	owned := slices.ContainsFunc(nc.GetOwnerReferences(), func(r metav1.OwnerReference) bool { return r.UID == fc.GetUID() })
	if !owned {
		nc.SetOwnerReferences(append(nc.GetOwnerReferences(), metav1.OwnerReference{
			APIVersion: foreignKind.GroupVersion().String(), Kind: foreignKind.Kind, Name: fc.GetName(), UID: fc.GetUID()}))
	}
	if controllerutil.AddFinalizer(nc, creatorFinalizer) || !owned {
		return l.client.Update(ctx, nc)
	}
	config, err := into[liqoConfig](nc)
	if err != nil {
		return err
	}
	pod, external, err := l.manager.grant(id, config.Spec)
	if err != nil {
		return err
	}
	was := config.Status
	config.Status.Processed = true
	config.Status.PodCIDRNAT, config.Status.ExternalCIDRNAT = noneIf(pod == config.Spec.PodCIDR, pod), noneIf(external == config.Spec.ExternalCIDR, external)
	if config.Status == was {
		return nil
	}
	status, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&config.Status)
	if err != nil {
		return err
	}
	nc.Object["status"] = status
	return l.client.Status().Update(ctx, nc)
}

func noneIf(none bool, s string) string {
	if none {
		return "None"
	}
	return s
}

// grant allocates networks as Liqo's IPAM does: a known peer gets its first networks again, even if
// it now advertises others.
func (m *liqoManager) grant(id string, spec liqoSpec) (pod, external string, err error) {
	if g, ok := m.granted[id]; ok {
		return g[0], g[1], nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, network := range []string{spec.PodCIDR, spec.ExternalCIDR} {
		if _, err := netip.ParsePrefix(network); err != nil {
			return "", "", fmt.Errorf("networks of %s: %w", id, err)
		}
	}
	pod, external = cmp.Or(m.remapped[spec.PodCIDR], spec.PodCIDR), cmp.Or(m.remapped[spec.ExternalCIDR], spec.ExternalCIDR)
	m.granted[id] = [2]string{pod, external}
	return pod, external, nil
}

// process makes the TunnelEndpoint from the cluster's own NetworkConfig and the peer's, once both
// are answered. When the own NetworkConfig is deleted, process deletes the TunnelEndpoint.
func (l *liqo) process(ctx context.Context, nc *unstructured.Unstructured, remotes []*unstructured.Unstructured, fc *unstructured.Unstructured, peer liqoIdentity) error {
	endpoints, err := listOf(ctx, l.client, endpointKind, client.InNamespace(nc.GetNamespace()), client.MatchingLabels{"clusterID": peer.ClusterID})
	if err != nil {
		return err
	}
	if nc.GetDeletionTimestamp() != nil {
		delete(l.manager.granted, peer.ClusterID)
		for i := range endpoints {
			err = errors.Join(err, l.client.Delete(ctx, &endpoints[i]))
		}
		if err == nil && controllerutil.RemoveFinalizer(nc, creatorFinalizer) {
			return l.client.Update(ctx, nc)
		}
		return err
	}
	if controllerutil.AddFinalizer(nc, creatorFinalizer) {
		return l.client.Update(ctx, nc)
	}
	local, err := into[liqoConfig](nc)
	if err != nil || !local.Status.Processed || len(remotes) == 0 {
		return err
	}
	remote, err := into[liqoConfig](remotes[0])
	if err != nil || !remote.Status.Processed {
		return err
	}
	spec := map[string]any{
		"clusterIdentity": map[string]any{"clusterID": local.Spec.Cluster.ClusterID, "clusterName": local.Spec.Cluster.ClusterName},
		"localPodCIDR":    local.Spec.PodCIDR, "localNATPodCIDR": local.Status.PodCIDRNAT,
		"localExternalCIDR": local.Spec.ExternalCIDR, "localNATExternalCIDR": local.Status.ExternalCIDRNAT,
		"remotePodCIDR": remote.Spec.PodCIDR, "remoteNATPodCIDR": remote.Status.PodCIDRNAT,
		"remoteExternalCIDR": remote.Spec.ExternalCIDR, "remoteNATExternalCIDR": remote.Status.ExternalCIDRNAT,
		"endpointIP": remote.Spec.EndpointIP, "backendType": remote.Spec.BackendType, "backend_config": map[string]any{},
	}
	for k, v := range remote.Spec.BackendConfig {
		spec["backend_config"].(map[string]any)[k] = v
	}
	if err := liqoGatewayError(spec); err != nil {
		return err
	}
	switch {
	case len(endpoints) == 0:
		te := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
		te.SetGroupVersionKind(endpointKind)
		te.SetNamespace(nc.GetNamespace())
		te.SetName(peer.uniqueName())
		te.SetLabels(map[string]string{"clusterID": peer.ClusterID})
		te.SetOwnerReferences([]metav1.OwnerReference{
			{APIVersion: configKind.GroupVersion().String(), Kind: configKind.Kind, Name: nc.GetName(), UID: nc.GetUID()},
			*metav1.NewControllerRef(fc, foreignKind),
		})
		return l.client.Create(ctx, te)
	case !reflect.DeepEqual(endpoints[0].Object["spec"], any(spec)):
		endpoints[0].Object["spec"] = spec
		return l.client.Update(ctx, &endpoints[0])
	}
	return nil
}

// liqoGatewayError returns the error with which Liqo's gateway or its WireGuard driver would refuse
// a TunnelEndpoint, or nil.
func liqoGatewayError(spec map[string]any) error {
	for _, field := range []string{"localPodCIDR", "localExternalCIDR", "remotePodCIDR", "remoteExternalCIDR"} {
		if _, err := netip.ParsePrefix(spec[field].(string)); err != nil {
			return fmt.Errorf("TunnelEndpoint: %s: %w", field, err)
		}
	}
	for _, field := range []string{"localNATPodCIDR", "localNATExternalCIDR", "remoteNATPodCIDR", "remoteNATExternalCIDR"} {
		nat := spec[field].(string)
		if _, err := netip.ParsePrefix(nat); err != nil && nat != "None" {
			return fmt.Errorf("TunnelEndpoint: %s is %q: %w", field, nat, err)
		}
	}
	config := spec["backend_config"].(map[string]any)
	port, _ := config["port"].(string)
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 || spec["backendType"] != "wireguard" || config["publicKey"] == "" {
		return fmt.Errorf("TunnelEndpoint: backend %v with %v", spec["backendType"], config)
	}
	return nil
}

func listOf(ctx context.Context, c client.Client, kind schema.GroupVersionKind, options ...client.ListOption) ([]unstructured.Unstructured, error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	err := c.List(ctx, list, options...)
	return list.Items, err
}

// into converts an object to T, and drops the fields that T does not have.
func into[T any](u *unstructured.Unstructured) (*T, error) {
	v := new(T)
	return v, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, v)
}
