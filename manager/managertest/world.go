package managertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// A World is one cluster in which a test runs reconcilers, or the whole manager. The names of all
// its objects contain its prefix.
type World struct {
	T      *testing.T
	Other  client.Client // client of another API server; nil: the Server is used
	Ctx    context.Context
	Prefix string // part of the names of all objects
	System string // the installation namespace
	Self   v1alpha1.ClusterIdentity
	Stop   func() // stops the reconcilers, if any
}

// Make returns a World without reconcilers or objects. The caller must call CleanUp.
func Make(t *testing.T, prefix string) *World {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server")
	}
	prefix = fmt.Sprintf("%s-%06x", prefix, rand.N(1<<24))
	return &World{
		T: t, Ctx: context.Background(), Prefix: prefix, System: prefix + "-system", Stop: func() {},
		Self: v1alpha1.ClusterIdentity{ClusterID: prefix + "-self", ClusterName: prefix + "-self"},
	}
}

// New returns a World without reconcilers, with an installation namespace. It is cleaned up when
// the test ends.
func New(t *testing.T) *World {
	t.Helper()
	w := Make(t, "own")
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.System}})
	t.Cleanup(func() {
		w.CleanUp()
		w.DropState()
	})
	return w
}

// Manager returns a controller manager whose cache has the indexes of package peers. The manager is
// not started yet.
func (w *World) Manager(foreignClusters bool) ctrl.Manager {
	w.T.Helper()
	scheme := runtime.NewScheme()
	peers.AddForeignClusters(scheme)
	w.OK(errors.Join(clientgoscheme.AddToScheme(scheme), isthmus.AddToScheme(scheme), v1alpha1.AddToScheme(scheme), mcs.Install(scheme)))
	mgr, err := ctrl.NewManager(Config, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: ptr.To(true)},
	})
	w.OK(err)
	w.OK(peers.AddIndexes(w.Ctx, mgr.GetFieldIndexer(), foreignClusters))
	return mgr
}

// API returns a client without a cache.
func (w *World) API() client.Client {
	if w.Other != nil {
		return w.Other
	}
	return Client
}

// CleanUp stops the reconcilers and deletes the test's objects, ignoring finalizers.
func (w *World) CleanUp() {
	w.Stop()
	w.Ctx = context.Background()
	var peerings isthmus.PeeringList
	w.OK(w.API().List(w.Ctx, &peerings))
	for i := range peerings.Items {
		if o := &peerings.Items[i]; strings.HasPrefix(o.Name, w.Prefix) {
			w.Drop(o)
		}
	}
	var configs v1alpha1.NetworkConfigList
	w.OK(w.API().List(w.Ctx, &configs))
	for i := range configs.Items {
		if o := &configs.Items[i]; strings.HasPrefix(o.Namespace, w.Prefix) {
			w.Drop(o)
		}
	}
	var endpoints v1alpha1.TunnelEndpointList // the next test would rebuild its IPAM state from them
	w.OK(w.API().List(w.Ctx, &endpoints))
	for i := range endpoints.Items {
		if o := &endpoints.Items[i]; strings.HasPrefix(o.Namespace, w.Prefix) {
			w.Drop(o)
		}
	}
	var namespaces corev1.NamespaceList
	w.OK(w.API().List(w.Ctx, &namespaces))
	for i := range namespaces.Items {
		if o := &namespaces.Items[i]; strings.HasPrefix(o.Name, w.Prefix) {
			w.OK(client.IgnoreNotFound(w.API().Delete(w.Ctx, o)))
		}
	}
}

// DropState deletes the IPAM state and the nodes' reports. Otherwise networks that one test
// released would be on hold in the next test.
func (w *World) DropState() {
	w.T.Helper()
	for _, kind := range []client.Object{&v1alpha1.IpamStorage{}, &isthmus.NetworkAllocation{}} {
		w.OK(Client.DeleteAllOf(context.Background(), kind))
	}
}

// Drop deletes an object, ignoring finalizers.
func (w *World) Drop(o client.Object) {
	w.T.Helper()
	w.OK(client.IgnoreNotFound(w.API().Delete(w.Ctx, o)))
	w.OK(client.IgnoreNotFound(w.API().Patch(w.Ctx, o, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))))
}

// OK fails the test if err is not nil.
func (w *World) OK(err error) {
	w.T.Helper()
	if err != nil {
		w.T.Fatal(err)
	}
}

// Create creates an object.
func (w *World) Create(o client.Object) {
	w.T.Helper()
	w.OK(w.API().Create(w.Ctx, o))
}

// Until waits until f returns true. The argument what is part of the error message.
func (w *World) Until(what string, f func() bool) {
	w.T.Helper()
	for deadline := time.Now().Add(time.Minute); !f(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.T.Fatalf("still not: %s", what)
		}
	}
}

// Always fails the test if f returns false during a short period.
func (w *World) Always(what string, f func() bool) {
	w.T.Helper()
	for deadline := time.Now().Add(700 * time.Millisecond); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if !f() {
			w.T.Fatalf("not any more: %s", what)
		}
	}
}

// Gateway creates the objects of a gateway: the Secret with the public key, and the Service with an
// annotation that names the active gateway.
func (w *World) Gateway(nodeIP string) {
	w.T.Helper()
	w.GatewayWith(nodeIP, SomeKey)
}

// GatewayWith creates the objects of a gateway with the given public key.
func (w *World) GatewayWith(nodeIP, key string) {
	w.T.Helper()
	w.Create(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.System, Name: keyring.SecretName, Labels: map[string]string{v1alpha1.LabelKey: "wireguard"}},
		Data:       map[string][]byte{"publicKey": []byte(key), "privateKey": []byte("not ours to read")},
	})
	w.Create(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.System, Name: "isthmus-gateway", Labels: map[string]string{v1alpha1.LabelGateway: "true"},
			Annotations: map[string]string{v1alpha1.AnnotationGatewayNodeIP: nodeIP}},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Name: "wireguard", Port: 5871, Protocol: corev1.ProtocolUDP}}},
	})
}

// Report creates the report of a node's agent, which is deleted when the test ends.
func (w *World) Report(node string, networks []string, resolvers ...string) *isthmus.NodeNetworks {
	w.T.Helper()
	r := &isthmus.NodeNetworks{ObjectMeta: metav1.ObjectMeta{Namespace: w.System, Name: node},
		Spec: isthmus.NodeNetworksSpec{Networks: networks, Resolvers: resolvers}}
	w.Create(r)
	w.T.Cleanup(func() { w.Drop(r) })
	return r
}
