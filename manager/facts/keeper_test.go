package facts

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

func gatewayService(kind corev1.ServiceType, annotations map[string]string) corev1.Service {
	return corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "isthmus-system", Name: "isthmus-gateway", Annotations: annotations,
			Labels: map[string]string{v1alpha1.LabelGateway: "true"}},
		Spec: corev1.ServiceSpec{Type: kind, Ports: []corev1.ServicePort{
			{Name: "metrics", Port: 5872, NodePort: 30001, Protocol: corev1.ProtocolTCP},
			{Name: "wireguard", Port: 5871, NodePort: 30002, Protocol: corev1.ProtocolUDP},
		}},
	}
}

func TestEndpointIsReadFromTheGatewayService(t *testing.T) {
	balanced := func(ingress ...corev1.LoadBalancerIngress) corev1.Service {
		s := gatewayService(corev1.ServiceTypeLoadBalancer, nil)
		s.Status.LoadBalancer.Ingress = ingress
		return s
	}
	with := func(kind corev1.ServiceType, annotations ...string) corev1.Service {
		m := make(map[string]string)
		for i := 0; i < len(annotations); i += 2 {
			m[annotations[i]] = annotations[i+1]
		}
		return gatewayService(kind, m)
	}
	several := func(s corev1.Service, names ...string) corev1.Service {
		for i, name := range names {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: name, Port: 6000 + int32(i), NodePort: 31000 + int32(i), Protocol: corev1.ProtocolUDP})
		}
		return s
	}
	overTCP := several(with(corev1.ServiceTypeNodePort, v1alpha1.AnnotationGatewayNodeIP, "192.0.2.7"), "wireguard-1", "wireguard-2")
	overTCP.Spec.Ports[2].Protocol = corev1.ProtocolTCP
	noNumber := several(with(corev1.ServiceTypeNodePort, v1alpha1.AnnotationGatewayNodeIP, "192.0.2.7"), "wireguard-1", "wireguard-2")
	noNumber.Spec.Ports[3].NodePort = 0
	unnamed := with(corev1.ServiceTypeNodePort, v1alpha1.AnnotationGatewayNodeIP, "192.0.2.7")
	unnamed.Spec.Ports = []corev1.ServicePort{{Port: 5871, NodePort: 30002, Protocol: corev1.ProtocolUDP}}
	noPort := gatewayService(corev1.ServiceTypeNodePort, map[string]string{v1alpha1.AnnotationGatewayNodeIP: "192.0.2.7"})
	noPort.Spec.Ports = noPort.Spec.Ports[:1]
	noPort.Spec.Ports[0].Protocol = corev1.ProtocolTCP
	const ip, address, port = v1alpha1.AnnotationGatewayNodeIP, v1alpha1.AnnotationOverrideAddress, v1alpha1.AnnotationOverridePort
	for _, c := range []struct {
		name     string
		services []corev1.Service
		host     string
		ports    []uint16
		missing  string // part of the expected sentence
	}{
		{"NodePort with the active gateway's node", []corev1.Service{with(corev1.ServiceTypeNodePort, ip, "192.0.2.7")}, "192.0.2.7", []uint16{30002}, ""},
		{"NodePort without active gateway", []corev1.Service{with(corev1.ServiceTypeNodePort)}, "", []uint16{30002}, "no annotation " + ip},
		{"LoadBalancer with an address", []corev1.Service{balanced(corev1.LoadBalancerIngress{IP: "198.51.100.1", Hostname: "x"})}, "198.51.100.1", []uint16{5871}, ""},
		{"LoadBalancer with a name", []corev1.Service{balanced(corev1.LoadBalancerIngress{Hostname: "lb.example.org"})}, "lb.example.org", []uint16{5871}, ""},
		{"LoadBalancer that is not ready", []corev1.Service{balanced()}, "", []uint16{5871}, "no address yet"},
		{"both overridden", []corev1.Service{with(corev1.ServiceTypeClusterIP, address, "vpn.example.org", port, "443")}, "vpn.example.org", []uint16{443}, ""},
		{"one overridden, the other known", []corev1.Service{with(corev1.ServiceTypeNodePort, ip, "192.0.2.7", port, "443")}, "192.0.2.7", []uint16{443}, ""},
		{"one overridden, the other not known", []corev1.Service{with(corev1.ServiceTypeClusterIP, address, "192.0.2.7")}, "192.0.2.7", nil, "of type ClusterIP"},
		{"port that is none", []corev1.Service{with(corev1.ServiceTypeNodePort, ip, "192.0.2.7", port, "65536")}, "192.0.2.7", nil, `annotation liqo.io/override-port is "65536"; want a UDP port`},
		{"port zero", []corev1.Service{with(corev1.ServiceTypeNodePort, ip, "192.0.2.7", port, "0")}, "192.0.2.7", nil, "want a UDP port"},
		{"address that is none", []corev1.Service{with(corev1.ServiceTypeNodePort, ip, "192.0.2.7", address, " ")}, "", []uint16{30002}, "annotation liqo.io/override-address is empty"},
		{"one port without a name", []corev1.Service{unnamed}, "192.0.2.7", []uint16{30002}, ""},
		{"ports for three tunnels", []corev1.Service{several(with(corev1.ServiceTypeNodePort, ip, "192.0.2.7"), "wireguard-2", "wireguard-1")},
			"192.0.2.7", []uint16{30002, 31001, 31000}, ""},
		{"ports of a load balancer for three tunnels", []corev1.Service{several(balanced(corev1.LoadBalancerIngress{IP: "198.51.100.1"}), "wireguard-1", "wireguard-2")},
			"198.51.100.1", []uint16{5871, 6000, 6001}, ""},
		{"a gap in the tunnels", []corev1.Service{several(with(corev1.ServiceTypeNodePort, ip, "192.0.2.7"), "wireguard-1", "wireguard-3")},
			"192.0.2.7", []uint16{30002, 31000}, ""},
		{"a tunnel over TCP", []corev1.Service{overTCP}, "192.0.2.7", []uint16{30002}, ""},
		{"a tunnel whose port has no number yet", []corev1.Service{noNumber}, "192.0.2.7", []uint16{30002, 31000}, ""},
		{"the ports of three tunnels overridden", []corev1.Service{several(with(corev1.ServiceTypeClusterIP, address, "vpn.example.org", port, "443"), "wireguard-1", "wireguard-2")},
			"vpn.example.org", []uint16{443, 444, 445}, ""},
		{"the ports of three tunnels overridden with too few behind", []corev1.Service{several(with(corev1.ServiceTypeNodePort, ip, "192.0.2.7", port, "65534"), "wireguard-1", "wireguard-2")},
			"192.0.2.7", []uint16{65534, 65535}, ""},
		{"no UDP port", []corev1.Service{noPort}, "192.0.2.7", nil, "is not UDP"},
		{"no Service", nil, "", nil, "no Service with label net.liqo.io/gateway=true"},
		{"two Services", []corev1.Service{with(corev1.ServiceTypeNodePort, ip, "192.0.2.7"), with(corev1.ServiceTypeNodePort, ip, "192.0.2.8")}, "", nil, "want exactly one"},
	} {
		t.Run(c.name, func(t *testing.T) {
			host, ports, missing := endpointOf("isthmus-system", c.services, nil)
			if host != c.host || !slices.Equal(ports, c.ports) || (missing == "") != (c.missing == "") || !strings.Contains(missing, c.missing) {
				t.Errorf("got %q, %d, %q", host, ports, missing)
			}
		})
	}
}

func TestPeersReachANodeAtItsExternalAddress(t *testing.T) {
	const four, six = corev1.IPv4Protocol, corev1.IPv6Protocol
	node := func(addresses ...string) (n corev1.Node) { // prefix e: external address, i: internal address
		for _, a := range addresses {
			kind := corev1.NodeInternalIP
			if a[0] == 'e' {
				kind = corev1.NodeExternalIP
			}
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: kind, Address: a[1:]})
		}
		return n
	}
	other := node("i10.0.0.2", "e198.51.100.2")
	for name, tc := range map[string]struct {
		node     corev1.Node
		families []corev1.IPFamily
		want     string
	}{
		"inner alone":                {node("i10.0.0.1"), nil, "10.0.0.1"},
		"outer as well":              {node("i10.0.0.1", "e198.51.100.1", "e198.51.100.9"), nil, "198.51.100.1"},
		"outer of another family":    {node("i10.0.0.1", "e2001:db8::1"), []corev1.IPFamily{four}, "10.0.0.1"},
		"IPv6 first, a Service of 4": {node("i2001:db8::5", "i10.0.0.1"), []corev1.IPFamily{four}, "10.0.0.1"},
		"a Service of both":          {node("i10.0.0.1", "e2001:db8::1"), []corev1.IPFamily{four, six}, "10.0.0.1"},
		"a Service of 6":             {node("i10.0.0.1", "i2001:db8::5"), []corev1.IPFamily{six}, "2001:db8::5"},
		"no address of the family":   {node("i10.0.0.1"), []corev1.IPFamily{six}, "10.0.0.1"},
		"no name for an address":     {node("i10.0.0.1", "enode-1.example.org"), nil, "10.0.0.1"},
	} {
		inner := tc.node.Status.Addresses[0].Address
		if got := outerAddress(inner, tc.families, []corev1.Node{other, tc.node}); got != tc.want {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
	}
	if got := outerAddress("10.0.0.7", nil, []corev1.Node{other}); got != "10.0.0.7" {
		t.Errorf("of a node that is not known: %s", got)
	}
	s := gatewayService(corev1.ServiceTypeNodePort, map[string]string{v1alpha1.AnnotationGatewayNodeIP: "10.0.0.2"})
	if host, _, missing := endpointOf("isthmus-system", []corev1.Service{s}, []corev1.Node{other}); host != "198.51.100.2" || missing != "" {
		t.Errorf("%s, %s", host, missing)
	}
}

func TestOnlyTunnelsWithAKeyAndAPortAreListed(t *testing.T) {
	keys := func(which ...byte) string {
		texts := make([]string, len(which))
		for i, k := range which {
			texts[i] = managertest.KeyText(k)
		}
		return strings.Join(texts, ",")
	}
	sixteen := make([]byte, 16)
	for i := range sixteen {
		sixteen[i] = byte(10 + i)
	}
	end := func(key byte, port uint16) fabric.TunnelEnd {
		return fabric.TunnelEnd{PublicKey: managertest.Key(key), Port: port}
	}
	var fifteen []fabric.TunnelEnd
	for i, k := range sixteen[:15] {
		fifteen = append(fifteen, end(k, 31000+uint16(i)))
	}
	for _, c := range []struct {
		keys  string
		ports []uint16
		want  []fabric.TunnelEnd
		fewer string
	}{
		{"", []uint16{31001}, nil, ""},
		{keys(2), []uint16{31001}, []fabric.TunnelEnd{end(2, 31001)}, ""},
		{keys(2, 3) + "\n", []uint16{31001, 30000, 32000}, []fabric.TunnelEnd{end(2, 31001), end(3, 30000)}, ""},
		{keys(2, 3), []uint16{31001}, []fabric.TunnelEnd{end(2, 31001)}, "the gateway's Service has no UDP port for tunnel 2, such as one named wireguard-2"},
		{keys(2, 3), nil, nil, "the gateway's Service has no UDP port for tunnel 1, such as one named wireguard-1"},
		{keys(2) + ",x", []uint16{31001, 31002}, []fabric.TunnelEnd{end(2, 31001)}, "Secret ns/wireguard-pubkey: data.tunnels: key 2 is not base64; want 32 bytes in 44 base64 characters"},
		{keys(2, 3, 2), []uint16{31001, 31002, 31003}, []fabric.TunnelEnd{end(2, 31001), end(3, 31002)}, "Secret ns/wireguard-pubkey: data.tunnels: key 3 is listed twice"},
		{keys(1), []uint16{31001}, nil, "Secret ns/wireguard-pubkey: data.tunnels: key 1 is listed twice"},
		{keys(sixteen...), portsFrom(31000, 20), fifteen, "Secret ns/wireguard-pubkey: data.tunnels: key 16 exceeds the limit; want at most 15"},
	} {
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "wireguard-pubkey"}, Data: map[string][]byte{"tunnels": []byte(c.keys)}}
		got, fewer := tunnelsOf(secret, keyring.FieldTunnels, managertest.Key(1), c.ports)
		if !slices.Equal(got, c.want) || fewer != c.fewer {
			t.Errorf("%q with %v: got %v, %q; want %v, %q", c.keys, c.ports, got, fewer, c.want, c.fewer)
		}
	}
}

// A next public key without a gateway behind it would cut off all peers that use it.
func TestNextPublicKeyIsNotPublishedWithoutItsPrivateKey(t *testing.T) {
	w := managertest.New(t)
	private, next := keyring.New(), keyring.New()
	now := time.Now()
	data := keyring.Begin(keyring.Replace(map[string][]byte{}, private, now), next, now)
	ring, _, err := keyring.Read(data)
	w.OK(err)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.System, Name: keyring.SecretName}, Data: keyring.Publish(data, ring, 1, now)}
	w.Create(secret)
	keeper, _, _ := newKeeper(w)
	wantPublished := func(want [32]byte, what string) {
		t.Helper()
		f, err := keeper.gather(w.Ctx)
		if w.OK(err); f.PublicKey != fabric.PublicKeys(want, 1)[0] {
			t.Errorf("%s: another key is told", what)
		}
	}
	wantPublished(next, "both halves")
	delete(secret.Data, keyring.FieldNext)
	w.OK(w.API().Update(w.Ctx, secret))
	wantPublished(private, "a public key alone")
}

func TestPodNetworksOfNodesWithoutAReportAreReserved(t *testing.T) {
	node := func(name string, podCIDRs ...string) corev1.Node {
		return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: podCIDRs}}
	}
	nodes := []corev1.Node{node("reports", "10.99.0.0/24"), node("inside", "10.244.3.0/24"), node("stray", "10.246.1.0/24", "fd00::/64"), node("none"), node("bad", "x"), node("all", "128.0.0.0/1")}
	got, wide := unreported(nodes, map[string]bool{"reports": true}, netip.MustParsePrefix("10.244.0.0/16"))
	if len(wide) != 1 || wide[0].Origin.Name != "all" || wide[0].Field != "spec.podCIDRs" {
		t.Errorf("too wide: %v", wide)
	}
	if want := []ipam.Reached{{Prefix: netip.MustParsePrefix("10.246.1.0/24"), Node: "stray"}}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got, _ := unreported(nodes, nil, netip.Prefix{}); got != nil {
		t.Errorf("without a PodCIDR: %v", got)
	}
}

func TestNodeAddressesAreSortedAndContainNoHostNames(t *testing.T) {
	node := func(addresses ...string) (n corev1.Node) {
		for _, a := range addresses {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Address: a})
		}
		return n
	}
	got := NodeAddresses([]corev1.Node{node("192.0.2.9", "node-1"), node("192.0.2.10", "192.0.2.9", "2001:db8::1")})
	want := []netip.Addr{netip.MustParseAddr("192.0.2.9"), netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::1")}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestKubeadmSubnetsParsesClusterConfiguration(t *testing.T) {
	for text, want := range map[string]string{
		"networking:\n  podSubnet: 10.244.0.0/16\n  serviceSubnet: 10.96.0.0/12\n":                       "[10.244.0.0/16] [10.96.0.0/12]",
		"networking:\n  podSubnet: 10.1.0.0/18,fd00:1::/48\n  serviceSubnet: 10.2.0.0/18,fd00:2::/112\n": "[10.1.0.0/18 fd00:1::/48] [10.2.0.0/18 fd00:2::/112]",
		"networking: {}\n": "[] []",
		"networking:\n  podSubnet: 10.1.0.0/18,nonsense\n  serviceSubnet: 10.2.0.0/18\n": "[] [10.2.0.0/18]",
		"]": "[] []",
		"":  "[] []",
	} {
		pods, services := kubeadmSubnets(text)
		if got := fmt.Sprint(pods, services); got != want {
			t.Errorf("%q: got %s, want %s", text, got, want)
		}
	}
}

func TestNodeHeartbeatsAreIgnored(t *testing.T) {
	node := func(version, address string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", ResourceVersion: version},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}}}}
	}
	before := node("1", "192.0.2.1")
	if addressesChanged.Update(event.UpdateEvent{ObjectOld: before, ObjectNew: node("2", "192.0.2.1")}) {
		t.Error("a heartbeat is a change")
	}
	if !addressesChanged.Update(event.UpdateEvent{ObjectOld: before, ObjectNew: node("2", "192.0.2.2")}) {
		t.Error("another address is no change")
	}
}

func TestHoldEndsWhenANodeGetsAnAddressInTheHeldNetwork(t *testing.T) {
	p := netip.MustParsePrefix
	facts := Facts{PodCIDR: p("10.244.0.0/16"), ServiceCIDR: p("10.96.0.0/12")}
	b := new(managertest.Store)
	k := &Keeper{Store: b, Log: slog.New(slog.DiscardHandler)}
	configure := func() {
		t.Helper()
		if err := k.configure(t.Context(), &facts, nil); err != nil {
			t.Fatal(err)
		}
	}
	configure()
	if _, err := b.Update(t.Context(), func(s ipam.State) (ipam.State, error) {
		s, _, err := s.Allocate(ipam.Request{ID: "b", Pod: p("10.50.0.0/16"), External: p("10.51.0.0/16")})
		return s.Part("b", time.Now()), err
	}); err != nil {
		t.Fatal(err)
	}
	if configure(); len(b.State().NetworksOf("b")) != 2 {
		t.Errorf("nodes refuse %v of a former peer", b.State().NetworksOf("b"))
	}
	facts.Nodes = []netip.Addr{netip.MustParseAddr("10.50.0.7")}
	if configure(); !slices.Equal(b.State().NetworksOf("b"), []netip.Prefix{p("10.51.0.0/16")}) || len(k.conflicts) > 0 {
		t.Errorf("nodes refuse %v of a former peer; conflicts %v", b.State().NetworksOf("b"), k.conflicts)
	}
}
