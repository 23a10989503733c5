package nodes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/kubenodes"
	"github.com/isthmus-net/isthmus/internal/kubenodes/probe"
	"github.com/isthmus-net/isthmus/manager/ipamrpc"
)

// The test imitates a multi-cluster service controller. It creates a Service whose endpoints are
// pods of the other cluster, at their addresses in this cluster. In either of its modes, kube-proxy
// translates the addresses first, and then the gateway translates them.
func TestAServiceMayHaveRemotePodsAsEndpoints(t *testing.T) {
	w := shared.get(t)
	for _, pair := range [][2]*kubenodes.Cluster{{w.a, w.b}, {w.b, w.a}} {
		from, to := pair[0], pair[1]
		for _, destination := range to.Nodes {
			t.Run(fmt.Sprintf("of %s on %s", from.Name, destination.Name), func(t *testing.T) {
				service := serviceFor(t, from, to, destination)
				seen, _, err := to.Networks(t.Context(), from)
				must(t, err)
				for _, source := range from.Nodes {
					for _, k := range kinds {
						want, _ := expectedSource(t, w, from, to, k, source)
						for _, protocol := range []string{probe.TCP, probe.UDP} {
							check := func(what string, at netip.AddrPort, want netip.Addr) {
								a, err := send(t.Context(), from, source, k, probe.Request{Protocol: protocol, To: at.Addr(), Port: at.Port(), Size: 500})
								if err != nil || a.From != want || a.Server != podName(pod, destination) || a.Octets != 500 {
									t.Errorf("%s on %s to %s %v, %s: %+v, %v; want to come from %v", k, source.Name, what, at, protocol, a, err, want)
								}
							}
							check("ClusterIP", service.cluster, want)
							// For a NodePort, kube-proxy masquerades all clients except the pods of
							// that node.
							for _, n := range from.Nodes {
								wantAt := seen.Addr()
								if n == source {
									wantAt = want
								}
								check("NodePort", netip.AddrPortFrom(n.Addr, service.node), wantAt)
							}
						}
					}
				}
			})
		}
	}
	w.noPlaintext(t)
}

type service struct {
	cluster netip.AddrPort
	node    uint16
}

// serviceFor creates a Service in one cluster for a pod of another cluster, for TCP and UDP,
// until the test ends.
func serviceFor(t *testing.T, from, to *kubenodes.Cluster, destination *kubenodes.Node) service {
	t.Helper()
	receiver, err := address(t.Context(), to, podName(pod, destination))
	must(t, err)
	there, err := from.Seen(t.Context(), to, receiver)
	must(t, err)
	name := "remote-" + destination.Name
	must(t, from.Apply(t.Context(), fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: default}
spec:
  type: NodePort
  ports:
  - {name: tcp, protocol: TCP, port: %[2]d}
  - {name: udp, protocol: UDP, port: %[2]d}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s, namespace: default, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
ports:
- {name: tcp, protocol: TCP, port: %[2]d}
- {name: udp, protocol: UDP, port: %[2]d}
endpoints:
- {addresses: [%[3]q], conditions: {ready: true}}
`, name, port, there)))
	t.Cleanup(func() {
		of := metav1.ObjectMeta{Namespace: "default", Name: name}
		for _, o := range []client.Object{&discoveryv1.EndpointSlice{ObjectMeta: of}, &corev1.Service{ObjectMeta: of}} {
			if err := from.Client.Delete(context.Background(), o); client.IgnoreNotFound(err) != nil {
				t.Error(err)
			}
		}
	})
	var s corev1.Service
	must(t, from.Client.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: name}, &s))
	ip, err := netip.ParseAddr(s.Spec.ClusterIP)
	must(t, err)
	// The API server may allocate different node ports for TCP and UDP. The test needs one port.
	if s.Spec.Ports[0].NodePort != s.Spec.Ports[1].NodePort {
		s.Spec.Ports[1].NodePort = s.Spec.Ports[0].NodePort
		must(t, from.Client.Update(t.Context(), &s))
	}
	return service{netip.AddrPortFrom(ip, port), uint16(s.Spec.Ports[0].NodePort)}
}

// ipamPort is the port on which the leading manager serves the IPAM.
const ipamPort = 6000

// The IPAM's Service has no selector. In both modes, kube-proxy must route clients in pods and on
// nodes to the address that the manager wrote into the Service's EndpointSlice.
func TestTheIPAMIsReachableThroughItsService(t *testing.T) {
	w := shared.get(t)
	for _, c := range w.set.Clusters {
		var s corev1.Service
		must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: kubenodes.Namespace, Name: "isthmus-ipam"}, &s))
		to := net.JoinHostPort(s.Spec.ClusterIP, strconv.Itoa(ipamPort))
		for _, n := range c.Nodes {
			own, err := address(t.Context(), c, podName(pod, n))
			must(t, err)
			for k, dial := range map[kind]func(context.Context, string) (net.Conn, error){
				pod:  func(ctx context.Context, to string) (net.Conn, error) { return dialFrom(ctx, n, own, to) },
				node: func(ctx context.Context, to string) (net.Conn, error) { return n.Dial(ctx, "tcp", to) },
			} {
				for ip, want := range map[string]bool{own.String(): true, "192.0.2.1": false} {
					got, err := belongsToPods(t.Context(), dial, to, ip)
					if err != nil || got != want {
						t.Errorf("%s on %s asks %s whether %s is a pod's: %v, %v; want %v", k, n.Name, to, ip, got, err, want)
					}
				}
			}
		}
	}
}

// belongsToPods sends an IPAM request, as Liqo's virtual kubelets do. It repeats the request until
// it gets an answer, because kube-proxy may apply the address late.
func belongsToPods(ctx context.Context, dial func(context.Context, string) (net.Conn, error), to, ip string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///"+to, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dial))
	if err != nil {
		return false, err
	}
	defer conn.Close()
	var answer ipamrpc.BelongsResponse
	err = conn.Invoke(ctx, "/ipam/BelongsToPodCIDR", &ipamrpc.BelongsRequest{Ip: ip}, &answer, grpc.WaitForReady(true))
	return answer.GetBelongs(), err
}

// dialFrom connects from a test pod, through a relay that is reached from the pod's node.
func dialFrom(ctx context.Context, n *kubenodes.Node, from netip.Addr, to string) (net.Conn, error) {
	c, err := n.Dial(ctx, "tcp", netip.AddrPortFrom(from, port).String())
	if err != nil {
		return nil, err
	}
	head := "HTTP/1.1 200 OK\r\n\r\n"
	answer := make([]byte, len(head))
	if _, err = fmt.Fprintf(c, "GET /connect?to=%s HTTP/1.1\r\nHost: pod\r\n\r\n", url.QueryEscape(to)); err == nil {
		_, err = io.ReadFull(c, answer)
	}
	if err == nil && string(answer) != head {
		err = fmt.Errorf("pod %v to %s: %q", from, to, answer)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// TCP delivers data unchanged over the complete path, with superpackets of any size.
func TestALargeTransferArrivesUnchanged(t *testing.T) {
	w := shared.get(t)
	size := int64(64 << 20)
	if *all {
		size = 1 << 30
	}
	want, err := probe.SHA256(size)
	must(t, err)
	for _, pair := range [][2]*kubenodes.Cluster{{w.a, w.b}, {w.b, w.a}} {
		from, to := pair[0], pair[1]
		source, destination := byGateway(t, from)[1], byGateway(t, to)[1] // the longest path
		server, err := address(t.Context(), to, podName(pod, destination.Node))
		must(t, err)
		there, err := from.Seen(t.Context(), to, server)
		must(t, err)
		client, err := address(t.Context(), from, podName(pod, source.Node))
		must(t, err)
		from1 := fmt.Sprintf("http://%v/octets?n=%d", netip.AddrPortFrom(there, port), size)
		var got probe.Transfer
		must(t, ask(t.Context(), source.Node, client, http.MethodGet, "/fetch", url.Values{"url": {from1}}, &got))
		if got.Octets != size || got.SHA256 != want {
			t.Errorf("%s to %s: %d octets with hash %s, want %d with %s", to.Name, from.Name, got.Octets, got.SHA256, size, want)
		}
		t.Logf("%s to %s: %d octets in %.1f s", to.Name, from.Name, got.Octets, got.Seconds)
	}
	w.noPlaintext(t)
}
