package manager

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

// An oldServer is a proxy that makes the API server of all tests look like Kubernetes 1.31 and
// 1.32: it does not serve the kind ServiceCIDR.
type oldServer struct {
	url  string
	fail atomic.Pointer[failure] // a nil pointer: no request fails
}

// A failure answers the requests for a path with a status. The status 0 closes the connection.
type failure struct {
	path   string
	status int
}

func startOldServer(t *testing.T) *oldServer {
	t.Helper()
	transport, err := rest.TransportFor(managertest.Config)
	if err != nil {
		t.Fatal(err)
	}
	target, err := url.Parse(managertest.Config.Host)
	if err != nil {
		t.Fatal(err)
	}
	const group = "/apis/networking.k8s.io/v1"
	proxy := &httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			if path := r.In.URL.Path; path == "/apis" || path == group { // requests the older form of discovery, which is JSON that ModifyResponse can edit
				r.Out.Header.Set("Accept", "application/json")
				r.Out.Header.Del("Accept-Encoding")
			}
		},
		ModifyResponse: func(r *http.Response) error {
			if r.Request.URL.Path != group {
				return nil
			}
			var list metav1.APIResourceList
			if err := json.NewDecoder(r.Body).Decode(&list); err != nil {
				return err
			}
			list.APIResources = slices.DeleteFunc(list.APIResources, func(one metav1.APIResource) bool { return one.Kind == "ServiceCIDR" })
			text, err := json.Marshal(list)
			r.Body = io.NopCloser(bytes.NewReader(text))
			r.ContentLength = int64(len(text))
			r.Header.Set("Content-Length", strconv.Itoa(len(text)))
			return err
		},
	}
	s := new(oldServer)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch fail := s.fail.Load(); {
		case strings.HasPrefix(r.URL.Path, group+"/servicecidrs"):
			http.NotFound(w, r)
		case fail != nil && r.URL.Path == fail.path && fail.status == 0:
			panic(http.ErrAbortHandler)
		case fail != nil && r.URL.Path == fail.path:
			http.Error(w, "the disk of etcd is full", fail.status)
		default:
			proxy.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	s.url = server.URL
	return s
}

func (s *oldServer) client(t *testing.T) client.Client {
	t.Helper()
	scheme, err := newScheme()
	if err != nil {
		t.Fatal(err)
	}
	api, err := client.New(&rest.Config{Host: s.url, QPS: -1}, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return api
}

func (s *oldServer) kubeconfig(t *testing.T) string {
	t.Helper()
	config := clientcmdapi.NewConfig()
	config.Clusters["old"] = &clientcmdapi.Cluster{Server: s.url}
	config.Contexts["old"] = &clientcmdapi.Context{Cluster: "old"}
	config.CurrentContext = "old"
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, file); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestServiceCIDRIsDetectedIfTheKindIsNotServed(t *testing.T) {
	w := bare(t)
	api := startOldServer(t).client(t)
	gather := func() facts.Facts {
		t.Helper()
		own := &facts.Keeper{Cache: api, Direct: api, Store: &managertest.Store{}, Cluster: w.Self, Namespace: w.System,
			Plan: facts.AddressPlan{PodCIDR: netip.MustParsePrefix("10.32.0.0/19")}, Log: slog.New(slog.DiscardHandler)}
		_, err := own.Reconcile(w.Ctx, ctrl.Request{})
		w.OK(err)
		f, err := own.Facts(w.Ctx)
		w.OK(err)
		return f
	}
	if f := gather(); f.ServiceCIDR.IsValid() || !strings.Contains(strings.Join(f.Missing, "\n"), "set --service-cidr") {
		t.Errorf("nothing has it: %v, missing %q", f.ServiceCIDR, f.Missing)
	}
	server := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "kube-apiserver-" + w.Prefix, Labels: map[string]string{"component": "kube-apiserver"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "kube-apiserver", Image: "example.org/kube-apiserver:v1.32.0",
			Command: []string{"kube-apiserver", "--service-cluster-ip-range=10.97.0.0/16"}}}},
	}
	w.Until("namespace kube-system takes Pods", func() bool { return w.API().Create(w.Ctx, server.DeepCopy()) == nil })
	t.Cleanup(func() { w.OK(w.API().Delete(context.Background(), server, client.GracePeriodSeconds(0))) })
	if f := gather(); f.ServiceCIDR.String() != "10.97.0.0/16" || len(f.Missing) != 1 { // the missing fact is the gateway's key
		t.Errorf("flags of the API server: %v, missing %q", f.ServiceCIDR, f.Missing)
	}
	kubeadm := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "kubeadm-config"},
		Data:       map[string]string{"ClusterConfiguration": "networking:\n  serviceSubnet: 10.98.0.0/16\n"},
	}
	w.Create(kubeadm)
	t.Cleanup(func() { w.OK(w.API().Delete(context.Background(), kubeadm)) })
	if f := gather(); f.ServiceCIDR.String() != "10.98.0.0/16" {
		t.Errorf("kubeadm: %v, missing %q", f.ServiceCIDR, f.Missing)
	}
}

// A manager on Kubernetes 1.31 or 1.32 peers like any other, if its configuration has the
// ServiceCIDR.
func TestManagerPeersIfServiceCIDRsAreNotServed(t *testing.T) {
	a, b := twoSidesWith(t, managertest.Connect, func(s *side) { s.old = s.server == managertest.Server })
	for _, s := range []*side{a, b} {
		s.connected()
		s.peer.WaitForReason(isthmus.ConditionReady, isthmus.ReasonConnected)
	}
	if ready := get(t, "http://"+a.health+"/readyz"); ready != "ok\n" {
		t.Errorf("readyz: %q", ready)
	}
	for _, s := range []*side{a, b} {
		s.peer.Delete()
	}
	for _, s := range []*side{a, b} {
		s.Until("the Peering is gone", s.peer.Deleted)
	}
}

// If managers cannot read the cluster's configuration, the leader is not ready and reports the
// reason. The standby is ready, because it has no work.
func TestLeaderIsNotReadyUntilItReadsTheConfiguration(t *testing.T) {
	w := bare(t)
	old := startOldServer(t)
	const configuration = "/api/v1/namespaces/kube-system/configmaps/kubeadm-config"
	old.fail.Store(&failure{path: configuration})
	var health [2]string
	for i := range health {
		health[i] = kubetest.Address(9443)
		t.Cleanup(w.runManager(Options{
			Kubeconfig: old.kubeconfig(t), Namespace: w.System, LeaderElect: true, Cluster: w.Self, HealthAddress: health[i],
			Log: slog.New(slog.DiscardHandler),
		}))
	}
	var ready [2]string
	w.Until("one waits and one is ready", func() bool {
		for i := range health {
			ready[i] = get(t, "http://"+health[i]+"/readyz")
		}
		slices.Sort(ready[:])
		return ready[0] == "ok\n" && strings.Contains(ready[1], "configuration of kubeadm: the API server closes the connection")
	})
	if !strings.HasPrefix(ready[1], "this manager is the leader but cannot start: ") {
		t.Errorf("the one that leads: %q", ready[1])
	}
	old.fail.Store(&failure{configuration, http.StatusInternalServerError})
	w.Until("the one that waits says what the API server answers", func() bool {
		for i := range health {
			ready[i] = get(t, "http://"+health[i]+"/readyz")
		}
		slices.Sort(ready[:])
		return ready[0] == "ok\n" && strings.Contains(ready[1], "configuration of kubeadm: ") && strings.Contains(ready[1], "the disk of etcd is full")
	})
	old.fail.Store(nil)
	w.Until("both are ready", func() bool {
		return get(t, "http://"+health[0]+"/readyz") == "ok\n" && get(t, "http://"+health[1]+"/readyz") == "ok\n"
	})
}
