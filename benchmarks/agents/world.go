package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
)

// A size is the size of a simulated cluster.
type size struct{ nodes, pods, peers int } // pods on each node

// A world is one simulated cluster with its API server.
type world struct {
	size
	dir    string
	server *kubetest.Server
	api    client.Client
	etcd   *http.Client
	audit  string // path of the audit log
	born   metav1.Time
	ipam   *ipamstore.Store
}

const namespace = deploy.Namespace

// ownPods is the cluster's PodCIDR. Each node has a /24 of it.
var ownPods = netip.MustParsePrefix("10.128.0.0/11")

func nodeName(i int) string { return fmt.Sprintf("n%d", i) }

// nodeAddr returns the InternalIP of a node. The first node is the measured one.
func nodeAddr(i int) string { return fmt.Sprintf("172.30.%d.%d", (i+1)>>8, (i+1)&255) }

func podAddr(node, i int) string {
	return fmt.Sprintf("10.%d.%d.%d", 128+node>>8, node&255, i+2)
}

// gatewayAddr returns the Pod address of one of the two gateway replicas, on nodes 1 and 2.
func gatewayAddr(i int) string { return podAddr(i+1, 250) }

func gatewayName(i int) string { return fmt.Sprintf("isthmus-gateway-%d", i) }

// remote returns the networks under which this cluster reaches a peer.
func remote(i int) (pod, external string) {
	i += 16
	return fmt.Sprintf("%d.%d.%d.0/20", 100, 64+i>>4&63, i&15<<4), fmt.Sprintf("11.%d.%d.0/20", i>>4, i&15<<4)
}

func newWorld(ctx context.Context, s size, user string) (w *world, err error) {
	w = &world{size: s, born: metav1.NewTime(time.Now().Truncate(time.Second))}
	if w.dir, err = os.MkdirTemp("", "agents-"); err != nil {
		return nil, err
	}
	policy := filepath.Join(w.dir, "policy.yaml")
	w.audit = filepath.Join(w.dir, "audit.log")
	if err := os.WriteFile(policy, fmt.Appendf(nil, auditPolicy, user), 0o600); err != nil {
		return w, err
	}
	w.server, err = kubetest.Start(ctx, kubetest.Options{Name: "large", APIServerArgs: []string{
		"--audit-policy-file=" + policy, "--audit-log-path=" + w.audit, "--audit-log-maxsize=10000", "--max-requests-inflight=2000", "--max-mutating-requests-inflight=1000"}})
	if err != nil {
		return w, err
	}
	w.etcd = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", w.server.Etcd())
	}}}
	if w.api, err = w.server.Client(); err != nil {
		return w, err
	}
	return w, w.fill(ctx)
}

func (w *world) close() error {
	var err error
	if w.server != nil {
		err = w.server.Stop()
	}
	return errors.Join(err, os.RemoveAll(w.dir))
}

// install creates the objects in the manifests of package deploy that match a glob pattern.
func (w *world) install(ctx context.Context, pattern string) error {
	names, err := fs.Glob(deploy.Files, pattern)
	if err != nil {
		return err
	}
	for _, name := range names {
		b, err := deploy.Files.ReadFile(name)
		if err != nil {
			return err
		}
		for doc := range strings.SplitSeq(string(b), "\n---\n") {
			var u unstructured.Unstructured
			if err := yaml.Unmarshal([]byte(doc), &u.Object); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if len(u.Object) == 0 {
				continue
			}
			if err := w.api.Create(ctx, &u); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}

func (w *world) fill(ctx context.Context) error {
	if err := w.install(ctx, "crds/*.yaml"); err != nil {
		return err
	}
	for {
		err := errors.Join(w.api.List(ctx, &v1alpha1.TunnelEndpointList{}), w.api.List(ctx, &v1alpha1.IpamStorageList{}), w.api.List(ctx, &isthmus.NetworkAllocationList{}),
			w.api.Get(ctx, client.ObjectKey{Name: "default"}, &corev1.Namespace{}))
		if err == nil {
			break
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
	if err := w.api.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}); err != nil {
		return err
	}
	if err := w.install(ctx, "rbac/*.yaml"); err != nil {
		return err
	}
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "isthmus-gateway", Labels: map[string]string{v1alpha1.LabelGateway: "true"}},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "wireguard", Port: 5871, Protocol: corev1.ProtocolUDP}}},
	}
	if err := w.api.Create(ctx, service); err != nil {
		return err
	}
	if err := w.store(ctx, w.everything); err != nil {
		return fmt.Errorf("into etcd: %w", err)
	}
	if err := w.api.Create(ctx, w.ipamStorage()); err != nil {
		return err
	}
	w.ipam = ipamstore.New(w.api, w.api, "benchmark", slog.New(slog.DiscardHandler)) // the same code as the manager's
	return w.ipam.Load(ctx)
}

// everything yields the objects to write into etcd, with their keys.
func (w *world) everything(yield func(key string, o client.Object) bool) {
	for n := range w.nodes {
		if !yield("/registry/minions/"+nodeName(n), w.node(n)) {
			return
		}
		for i := range w.pods {
			p := w.pod(n, i)
			if !yield("/registry/pods/default/"+p.Name, p) {
				return
			}
		}
	}
	for i := range 2 {
		p := w.pod(i+1, 250)
		p.Namespace, p.Name = namespace, gatewayName(i)
		p.Labels = map[string]string{"app.kubernetes.io/name": "gateway", "app.kubernetes.io/component": "networking", v1alpha1.LabelGateway: v1alpha1.GatewayStandby}
		if !yield("/registry/pods/"+namespace+"/"+p.Name, p) {
			return
		}
	}
	for i := range w.peers {
		te := w.endpoint(i)
		if !yield("/registry/net.liqo.io/tunnelendpoints/default/"+te.Name, te) {
			return
		}
	}
}

// store writes objects into etcd in the API server's format, a hundred in each transaction.
func (w *world) store(ctx context.Context, all func(func(string, client.Object) bool)) (err error) {
	scheme := kubetest.NewScheme()
	encoder := protobuf.NewSerializer(scheme, scheme)
	type put struct {
		Put struct{ Key, Value []byte } `json:"request_put"`
	}
	var puts []put
	flush := func() error {
		body, err := json.Marshal(map[string]any{"success": puts})
		if err != nil {
			return err
		}
		puts = puts[:0]
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://etcd/v3/kv/txn", bytes.NewReader(bytes.ReplaceAll(bytes.ReplaceAll(body, []byte(`"Key"`), []byte(`"key"`)), []byte(`"Value"`), []byte(`"value"`))))
		if err != nil {
			return err
		}
		answer, err := w.etcd.Do(request)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			var text bytes.Buffer
			_, _ = text.ReadFrom(answer.Body)
			return fmt.Errorf("%s: %.300s", answer.Status, &text)
		}
		return nil
	}
	all(func(key string, o client.Object) bool {
		o.SetUID(uuid.NewUUID())
		o.SetCreationTimestamp(w.born)
		var b bytes.Buffer
		if _, custom := o.(*v1alpha1.TunnelEndpoint); custom {
			err = json.NewEncoder(&b).Encode(o)
		} else {
			err = encoder.Encode(o, &b)
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", key, err)
			return false
		}
		var p put
		p.Put.Key, p.Put.Value = []byte(key), b.Bytes()
		if puts = append(puts, p); len(puts) == 100 {
			err = flush()
		}
		return err == nil
	})
	if err == nil && len(puts) > 0 {
		err = flush()
	}
	return err
}

// managed returns managed fields of a given size. On real objects they are about a third of the
// object, and no component reads them.
func managed(octets int) []metav1.ManagedFieldsEntry {
	text := `{"f:metadata":{"f:labels":{".":{}` + strings.Repeat(`,"f:app.kubernetes.io/name":{}`, octets/30) + `}}}`
	return []metav1.ManagedFieldsEntry{{Manager: "kubelet", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", FieldsType: "FieldsV1",
		FieldsV1: metav1.NewFieldsV1(text)}}
}

func (w *world) node(i int) *corev1.Node {
	cidr := fmt.Sprintf("10.%d.%d.0/24", 128+i>>8, i&255)
	n := &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: nodeName(i), Labels: map[string]string{"kubernetes.io/hostname": nodeName(i)}, ManagedFields: managed(1500)},
		Spec:       corev1.NodeSpec{PodCIDR: cidr, PodCIDRs: []string{cidr}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodeAddr(i)}, {Type: corev1.NodeHostName, Address: nodeName(i)}},
			Capacity: corev1.ResourceList{"cpu": resource.MustParse("8"), "memory": resource.MustParse("32Gi")}},
	}
	for i := range 30 {
		n.Status.Images = append(n.Status.Images, corev1.ContainerImage{Names: []string{fmt.Sprintf("registry.example/team/service-%d@sha256:%064d", i, i)}, SizeBytes: 1 << 26})
	}
	for _, c := range []corev1.NodeConditionType{corev1.NodeReady, corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure} {
		n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: c, Status: corev1.ConditionTrue, LastHeartbeatTime: w.born, Reason: "KubeletReady", Message: "kubelet is posting ready status"})
	}
	return n
}

func (w *world) pod(node, i int) *corev1.Pod {
	p := &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("p%d-%d", node, i), Labels: map[string]string{"app": "service", "pod-template-hash": "5d4f8c7b9"},
			ManagedFields: managed(700)},
		Spec: corev1.PodSpec{NodeName: nodeName(node), RestartPolicy: corev1.RestartPolicyAlways, DNSPolicy: corev1.DNSClusterFirst, SchedulerName: "default-scheduler", SecurityContext: &corev1.PodSecurityContext{},
			Containers: []corev1.Container{{Name: "service", Image: "registry.example/team/service:1.2.3", TerminationMessagePath: "/dev/termination-log", TerminationMessagePolicy: corev1.TerminationMessageReadFile, ImagePullPolicy: corev1.PullIfNotPresent}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: podAddr(node, i), PodIPs: []corev1.PodIP{{IP: podAddr(node, i)}}, HostIP: nodeAddr(node), HostIPs: []corev1.HostIP{{IP: nodeAddr(node)}}},
	}
	for _, c := range []corev1.PodConditionType{corev1.PodReady, corev1.PodInitialized, corev1.ContainersReady, corev1.PodScheduled} {
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: c, Status: corev1.ConditionTrue, LastTransitionTime: w.born})
	}
	return p
}

func (w *world) endpoint(i int) *v1alpha1.TunnelEndpoint {
	pod, external := remote(i)
	id := fmt.Sprintf("%08x-0000-4000-8000-000000000000", i)
	key := sha256.Sum256([]byte(id))
	key[31] &= 0x7f
	return &v1alpha1.TunnelEndpoint{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "TunnelEndpoint"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("peer-%d", i), Labels: map[string]string{"clusterID": id}, ManagedFields: managed(1200)},
		Spec: v1alpha1.TunnelEndpointSpec{
			ClusterIdentity: v1alpha1.ClusterIdentity{ClusterID: id, ClusterName: fmt.Sprintf("peer-%d", i)},
			LocalPodCIDR:    ownPods.String(), LocalNATPodCIDR: v1alpha1.None, LocalExternalCIDR: "10.112.0.0/20", LocalNATExternalCIDR: v1alpha1.None,
			RemotePodCIDR: "10.16.0.0/20", RemoteNATPodCIDR: pod, RemoteExternalCIDR: "10.17.0.0/20", RemoteNATExternalCIDR: external,
			EndpointIP: fmt.Sprintf("198.18.%d.%d", i>>8, i&255), BackendType: v1alpha1.BackendWireGuard,
			BackendConfig: v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: base64.StdEncoding.EncodeToString(key[:]), v1alpha1.ConfigPort: "5871"},
		},
		Status: w.status(i, 0, 20),
	}
}

// status returns the status that the gateway writes for a peer.
func (w *world) status(i, gateway, latency int) v1alpha1.TunnelEndpointStatus {
	pod, external := remote(i)
	now := metav1.NewTime(time.Now().Truncate(time.Second))
	return v1alpha1.TunnelEndpointStatus{GatewayIP: gatewayAddr(gateway), VethIFaceName: "isthmus.vxlan", VethIFaceIndex: 7, VethIP: gatewayAddr(gateway),
		Connection: v1alpha1.Connection{Status: v1alpha1.Connected, StatusMessage: v1alpha1.ConnectedMessage, Latency: v1alpha1.ConnectionLatency{Value: fmt.Sprintf("%dms", latency), Timestamp: &now},
			PeerConfiguration: v1alpha1.PeerConfiguration{v1alpha1.ConfigAllowedIPs: pod + ", " + external, v1alpha1.ConfigPort: "5871"}},
		Conditions: []metav1.Condition{
			{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionTrue, Reason: "Configured", Message: "the gateway does what this object says", LastTransitionTime: w.born},
			{Type: v1alpha1.ConditionConnected, Status: metav1.ConditionTrue, Reason: v1alpha1.CauseConnected, LastTransitionTime: w.born},
		}}
}

func (w *world) ipamStorage() *v1alpha1.IpamStorage {
	b := &v1alpha1.IpamStorage{ObjectMeta: metav1.ObjectMeta{Name: "ipam", Labels: map[string]string{v1alpha1.LabelIpamStorage: "true"}}, Spec: v1alpha1.IpamStorageSpec{
		Prefixes: map[string][]byte{}, Pools: []string{"100.64.0.0/10", "11.0.0.0/8"}, ReservedSubnets: []string{}, EndpointMappings: map[string]v1alpha1.EndpointMapping{},
		NatMappingsConfigured: map[string]v1alpha1.ConfiguredCluster{}, PodCIDR: ownPods.String(), ServiceCIDR: "10.96.0.0/12", ExternalCIDR: "10.112.0.0/20",
		ClusterSubnets: map[string]v1alpha1.Subnets{}}}
	for i := range w.peers {
		id := w.endpoint(i).Spec.ClusterIdentity.ClusterID
		b.Spec.ClusterSubnets[id] = subnets(i)
		b.Spec.NatMappingsConfigured[id] = v1alpha1.ConfiguredCluster{}
	}
	return b
}

func subnets(i int) v1alpha1.Subnets {
	pod, external := remote(i)
	return v1alpha1.Subnets{LocalNATPodCIDR: v1alpha1.None, RemotePodCIDR: pod, LocalNATExternalCIDR: v1alpha1.None, RemoteExternalCIDR: external}
}

// merge applies a JSON merge patch to an object.
func (w *world) merge(ctx context.Context, o client.Object, status bool, patch map[string]any) error {
	b, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	if status {
		return w.api.Status().Patch(ctx, o, client.RawPatch(types.MergePatchType, b))
	}
	return w.api.Patch(ctx, o, client.RawPatch(types.MergePatchType, b))
}
