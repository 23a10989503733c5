package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// A connectProxy is an HTTP proxy for CONNECT requests. It records their sources and
// destinations.
type connectProxy struct {
	host *lab.Host

	mu   sync.Mutex
	seen map[string]bool // "SOURCE DESTINATION", without ports
}

func (p *connectProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	from, _, err1 := net.SplitHostPort(r.RemoteAddr)
	to, _, err2 := net.SplitHostPort(r.Host)
	if r.Method != http.MethodConnect || errors.Join(err1, err2) != nil {
		http.Error(w, "want CONNECT", http.StatusMethodNotAllowed)
		return
	}
	there, err := p.host.Dial(r.Context(), "tcp", r.Host)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer there.Close()
	here, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer here.Close()
	p.mu.Lock()
	p.seen[from+" "+to] = true
	p.mu.Unlock()
	if _, err := io.WriteString(here, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	done := make(chan struct{}, 2)
	for _, pair := range [][2]net.Conn{{here, there}, {there, here}} {
		go func() {
			_, _ = io.Copy(pair[0], pair[1]) // until either side closes
			done <- struct{}{}
		}()
	}
	<-done
}

func (p *connectProxy) carried(from, to netip.Addr) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen[from.String()+" "+to.String()]
}

// The command and the managers must reach the API servers only through the proxy-url of the
// kubeconfig.
func TestPeeringWorksThroughAProxy(t *testing.T) {
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{clusterSpec("10.244.0.0/16", 1), clusterSpec("10.244.0.0/16", 1)}})
	a, b := f.Clusters[0], f.Clusters[1]
	pairs := [][2]*fleet.Cluster{{a, b}, {b, a}}
	at := netip.AddrPortFrom(routerOf(t, a.Control.Host, b.Control.Addr), 3128)
	proxy := &connectProxy{host: f.Lab.Underlay, seen: map[string]bool{}}
	stop, err := f.Lab.Underlay.Serve(at.String(), proxy)
	must(t, err)
	t.Cleanup(func() { must(t, stop()) })
	for _, p := range pairs {
		wall(t, p[0], p[1])
	}
	config, err := clientcmd.LoadFromFile(f.Kubeconfig)
	must(t, err)
	for _, c := range config.Clusters {
		c.ProxyURL = "http://" + at.String()
	}
	f.Kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	must(t, clientcmd.WriteToFile(*config, f.Kubeconfig))

	peer(t, f, a, b)
	for _, p := range pairs {
		from, to := p[0].Control, p[1].Control
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		if conn, err := from.Dial(ctx, "tcp", strings.TrimPrefix(p[1].Server.URL(), "https://")); err == nil {
			conn.Close()
			t.Errorf("%s has connected to %s past the proxy", from, to)
		}
		cancel()
		if !proxy.carried(from.Addr, to.Addr) {
			t.Errorf("the manager of %s did not use the proxy", p[0])
		}
	}
	if !proxy.carried(at.Addr(), a.Control.Addr) || !proxy.carried(at.Addr(), b.Control.Addr) {
		t.Errorf("isthmus peer did not use the proxy: %v", proxy.seen)
	}
	if _, err := a.Pods[0].Ping(t.Context(), seen(t, a, b, b.Pods[0].Addr)); err != nil {
		t.Error(err)
	}
	var service corev1.Service
	must(t, b.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: "isthmus-gateway"}, &service))
	before := service.DeepCopy()
	service.Annotations[v1alpha1.AnnotationOverrideAddress] = "192.0.2.99" // b's gateway starts the handshake, so the wrong address does no harm
	must(t, b.Client.Patch(t.Context(), &service, client.MergeFrom(before)))
	eventually(t, "the address at a", func() error { return endpointIs(t, a, b, "192.0.2.99") })
	isthmus(t, f, "unpeer", "--context", a.Name, "--remote-context", b.Name)
	for _, c := range f.Clusters {
		must(t, requireGone(t, c, v1alpha1.LabelReplicated, "true"))
	}
}

// routerOf returns a host's next hop towards an address.
func routerOf(t *testing.T, h *lab.Host, to netip.Addr) (router netip.Addr) {
	t.Helper()
	must(t, h.Do(func() error {
		routes, err := netlink.RouteGet(to.AsSlice())
		if err != nil {
			return err
		}
		if len(routes) > 0 {
			router, _ = netip.AddrFromSlice(routes[0].Gw)
			router = router.Unmap()
		}
		if !router.IsValid() {
			return fmt.Errorf("no router from %s to %v: %v", h, to, routes)
		}
		return nil
	}))
	return router
}
