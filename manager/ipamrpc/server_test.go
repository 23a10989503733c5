package ipamrpc

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/leaktest"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
)

// All tests of this package share an API server with one IpamStorage. Each test has its own peers
// and endpoints.
var (
	testServer *kubetest.Server
	testClient client.Client
	testStore  *ipamstore.Store
)

func TestMain(m *testing.M) {
	flag.Parse()
	ctrllog.SetLogger(logr.Discard())
	code := 1
	err := func() error {
		if testing.Short() {
			code = m.Run()
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute) // the first run builds the API server
		defer cancel()
		var err error
		if testServer, err = kubetest.Start(ctx, kubetest.Options{Name: "ipamrpc"}); err != nil {
			return err
		}
		defer testServer.Stop()
		if testStore, err = newStore(ctx, testServer); err != nil {
			return err
		}
		code = m.Run()
		return nil
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

func newStore(ctx context.Context, server *kubetest.Server) (*ipamstore.Store, error) {
	c, err := server.Client()
	if err != nil {
		return nil, err
	}
	testClient = c
	for _, kind := range []string{"net.liqo.io_ipamstorages", "net.liqo.io_tunnelendpoints", "net.liqo.io_networkconfigs", "net.liqo.io_natmappings", "isthmus.net_networkallocations"} {
		text, err := os.ReadFile("../../deploy/crds/" + kind + ".yaml")
		if err != nil {
			return nil, err
		}
		var crd apiextensions.CustomResourceDefinition
		if err := yaml.UnmarshalStrict(text, &crd); err != nil {
			return nil, err
		}
		if err := c.Create(ctx, &crd); err != nil {
			return nil, err
		}
	}
	s := ipamstore.New(c, c, "us", slog.New(slog.DiscardHandler))
	for s.Load(ctx) != nil { // until the API server serves the CRDs
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		time.Sleep(20 * time.Millisecond)
	}
	_, err = s.Update(ctx, func(b ipam.State) (ipam.State, error) {
		b, _ = b.Configure(ipam.Config{PodCIDR: pfx("10.244.0.0/16"), ServiceCIDR: pfx("10.96.0.0/12"), ExternalCIDR: pfx("10.245.0.0/24"),
			Nodes: []netip.Addr{netip.MustParseAddr("192.0.2.66"), netip.MustParseAddr("192.0.2.65")}})
		return b, nil
	})
	return s, err
}

func pfx(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// A kubelet is a virtual kubelet, reduced to its requests for addresses. It uses only the names and
// numbers of the service in docs/liqo-v0.md (section 5.1).
type kubelet struct {
	t    *testing.T
	conn *grpc.ClientConn
}

// liqo has the options of a server for Liqo's kubelets.
var liqo = Options{Plain: true, Allow: []netip.Prefix{pfx("10.96.0.1/32"), pfx("10.128.0.0/9")}}

// newKubelet starts a server for the test and connects to it.
func newKubelet(t *testing.T) kubelet {
	t.Helper()
	return dial(t, listen(t, liqo), "127.0.0.1", insecure.NewCredentials())
}

// listen starts a server for the test on top of the shared IPAM state.
func listen(t *testing.T, o Options) (address string) {
	t.Helper()
	return listenWith(t, o, testStore)
}

// listenWith starts a server for the test on top of the given IPAM state.
func listenWith(t *testing.T, o Options, store *ipamstore.Store) (address string) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, listener, o, store, slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return listener.Addr().String()
}

// dial connects to a server from an address of this machine.
func dial(t *testing.T, address, from string, creds credentials.TransportCredentials) kubelet {
	t.Helper()
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return kubelet{t, conn}
}

func (k kubelet) call(method string, in, out proto.Message) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return k.conn.Invoke(ctx, "/ipam/"+method, in, out)
}

func (k kubelet) mapIP(id, ip, want string) {
	k.t.Helper()
	var out MapResponse
	if err := k.call("MapEndpointIP", &MapRequest{ClusterID: id, Ip: ip}, &out); err != nil || out.GetIp() != want {
		k.t.Errorf("map %s for %s: %q %v, want %s", ip, id, out.GetIp(), err, want)
	}
}

func (k kubelet) unmapIP(id, ip string) {
	k.t.Helper()
	if err := k.call("UnmapEndpointIP", &UnmapRequest{ClusterID: id, Ip: ip}, &UnmapResponse{}); err != nil {
		k.t.Errorf("unmap %s for %s: %v", ip, id, err)
	}
}

// peer adds a peer with networks like ours, which sees our networks as podSeen and externalSeen.
func peer(t *testing.T, id, podSeen, externalSeen string) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server")
	}
	_, err := testStore.Update(t.Context(), func(b ipam.State) (ipam.State, error) {
		b, _, err := b.Allocate(ipam.Request{ID: id, Pod: pfx("10.244.0.0/16"), External: pfx("10.245.0.0/24")})
		return b.Answered(id, pfx(podSeen), pfx(externalSeen)), err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := testStore.Update(context.Background(), func(b ipam.State) (ipam.State, error) { return b.Release(id), nil }); err != nil {
			t.Error(err)
		}
	})
}

func TestAVirtualKubeletMapsEndpoints(t *testing.T) {
	k := newKubelet(t)
	peer(t, "bravo", "10.200.0.0/16", "10.201.7.0/24")
	peer(t, "charlie", "10.244.0.0/16", "10.245.0.0/24") // this peer remaps nothing

	k.mapIP("bravo", "10.244.3.4", "10.200.3.4") // a pod
	k.mapIP("charlie", "10.244.3.4", "10.244.3.4")
	k.mapIP("bravo", "169.254.0.1", "10.201.7.1") // the gateway's own address is mapped since the answer
	k.mapIP("charlie", "169.254.0.1", "10.245.0.1")
	k.mapIP("bravo", "198.51.100.1", "10.201.7.2") // a host outside of the cluster
	k.mapIP("bravo", "198.51.100.1", "10.201.7.2")
	k.mapIP("bravo", "::ffff:198.51.100.1", "10.201.7.2")
	k.mapIP("charlie", "198.51.100.1", "10.245.0.2")
	k.mapIP("charlie", "10.96.0.1", "10.245.0.3") // the API server's ClusterIP
	third, _ := testStore.State().AllocationOf("bravo")
	k.mapIP("charlie", third.Pod.Addr().Next().String(), "10.245.0.4") // a pod of bravo, for charlie

	nm, _ := testStore.State().NatMapping("charlie")
	want := v1alpha1.EndpointMap{"169.254.0.1": "10.245.0.1", "198.51.100.1": "10.245.0.2", "10.96.0.1": "10.245.0.3", third.Pod.Addr().Next().String(): "10.245.0.4"}
	if !reflect.DeepEqual(nm.ClusterMappings, want) {
		t.Errorf("NatMapping %v, want %v", nm.ClusterMappings, want)
	}

	k.unmapIP("bravo", "198.51.100.1")
	k.mapIP("bravo", "198.51.100.9", "10.201.7.5") // charlie still uses .2
	k.unmapIP("charlie", "198.51.100.1")
	k.unmapIP("charlie", "198.51.100.1")
	k.unmapIP("charlie", "169.254.0.1") // a peer cannot unmap the gateway's own address
	k.unmapIP("nobody", "198.51.100.1")
	k.mapIP("bravo", "198.51.100.8", "10.201.7.2") // allocated again at once
	k.mapIP("charlie", "169.254.0.1", "10.245.0.1")
}

func TestVirtualKubeletGetsHomeAddressesOfPods(t *testing.T) {
	k := newKubelet(t)
	peer(t, "delta", "10.200.0.0/16", "10.201.7.0/24")
	g, _ := testStore.State().AllocationOf("delta")
	a := g.Pod.Addr().As4()
	var home GetHomePodIPResponse
	if err := k.call("GetHomePodIP", &GetHomePodIPRequest{ClusterID: "delta", Ip: "10.244.3.4"}, &home); err != nil || home.GetHomeIP() != fmt.Sprintf("%d.%d.3.4", a[0], a[1]) {
		t.Errorf("home of 10.244.3.4: %q %v", home.GetHomeIP(), err)
	}
	for ip, want := range map[string]bool{"10.244.255.255": true, "::ffff:10.244.0.1": true, "10.245.0.1": false, "fd00::1": false} {
		var out BelongsResponse
		if err := k.call("BelongsToPodCIDR", &BelongsRequest{Ip: ip}, &out); err != nil || out.GetBelongs() != want {
			t.Errorf("%s belongs: %v %v", ip, out.GetBelongs(), err)
		}
	}
}

func TestInvalidRequestsGetLiqosErrors(t *testing.T) {
	k := newKubelet(t)
	peer(t, "echo", "10.200.0.0/16", "10.201.7.0/24")
	before := testStore.State()
	for _, tc := range []struct {
		method, id, ip, want string
	}{
		{"MapEndpointIP", "echo", "10.244.3", "not an IP address"},
		{"MapEndpointIP", "echo", "", "not an IP address"},
		{"MapEndpointIP", "echo", "fe80::1%eth0", "not an IP address"},
		{"MapEndpointIP", "", "198.51.100.1", "clusterID is empty"},
		{"MapEndpointIP", "nobody", "198.51.100.1", `"nobody" has no network configuration`},
		{"MapEndpointIP", "nobody", "10.244.3.4", `"nobody" has no network configuration`},
		{"MapEndpointIP", "echo", "127.0.0.1", "special range"},
		{"MapEndpointIP", "echo", "169.254.169.254", "special range"},
		{"MapEndpointIP", "echo", "10.245.0.7", "our ExternalCIDR"},
		{"MapEndpointIP", "echo", "fd00::1", "family"},
		{"UnmapEndpointIP", "echo", "x", "not an IP address"},
		{"UnmapEndpointIP", "", "198.51.100.1", "clusterID is empty"},
		{"GetHomePodIP", "echo", "x", "not an IP address"},
		{"GetHomePodIP", "", "10.244.3.4", "clusterID is empty"},
		{"GetHomePodIP", "nobody", "10.244.3.4", "no network configuration"},
		{"GetHomePodIP", "echo", "fd00::1", "family"},
		{"BelongsToPodCIDR", "", "x", "not an IP address"},
		{"MapEndpointIP", strings.Repeat("i", 2000), "198.51.100.1", "no network configuration"},
	} {
		in := proto.Message(&MapRequest{ClusterID: tc.id, Ip: tc.ip}) // all requests have the same field numbers
		if tc.method == "BelongsToPodCIDR" {
			in = &BelongsRequest{Ip: tc.ip}
		}
		err := k.call(tc.method, in, &UnmapResponse{})
		if status.Code(err) != codes.Unknown || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s %.20q %q: %v", tc.method, tc.id, tc.ip, err)
		}
	}
	if err := k.call("MapEndpointIP", &MapRequest{ClusterID: strings.Repeat("i", 1<<20)}, &MapResponse{}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a megabyte: %v", err)
	}
	if err := k.call("MapNetworkEndpoint", &MapRequest{}, &MapResponse{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("a method that is not there: %v", err)
	}
	if changed := testStore.State().Changed(before); len(changed) > 0 {
		t.Errorf("bad questions changed %v", changed)
	}
}

func TestConcurrentKubeletsGetDistinctAddressesUntilExhaustion(t *testing.T) {
	k := newKubelet(t)
	peer(t, "foxtrot", "10.200.0.0/16", "10.201.7.0/24")
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		seen  = make(map[string]string)
		fails int
	)
	for i := range 8 {
		wg.Go(func() {
			for j := range 33 { // 264 requests for 253 addresses
				ip := fmt.Sprintf("203.0.%d.%d", i, j)
				var out MapResponse
				err := k.call("MapEndpointIP", &MapRequest{ClusterID: "foxtrot", Ip: ip}, &out)
				mu.Lock()
				switch other := seen[out.GetIp()]; {
				case err != nil && strings.Contains(err.Error(), "no address is free in our ExternalCIDR, 10.245.0.0/24"):
					fails++
				case err != nil:
					t.Error(err)
				case other != "":
					t.Errorf("%s and %s both have %s", ip, other, out.GetIp())
				default:
					seen[out.GetIp()] = ip
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(seen) != 253 || fails != 11 {
		t.Errorf("%d mapped, %d refused; want 253 and 11", len(seen), fails)
	}
}

func TestExistingMappingsAreAnsweredWithoutTheAPIServer(t *testing.T) {
	k := newKubelet(t)
	peer(t, "golf", "10.200.0.0/16", "10.201.7.0/24")
	k.mapIP("golf", "198.51.100.1", "10.201.7.2")
	if err := testServer.Freeze(); err != nil {
		t.Fatal(err)
	}
	k.mapIP("golf", "198.51.100.1", "10.201.7.2")
	k.mapIP("golf", "10.244.9.9", "10.200.9.9")
	k.unmapIP("golf", "198.51.100.2")
	if err := testServer.Thaw(); err != nil {
		t.Fatal(err)
	}
}

// The field numbers on the wire, by hand: 0x0a is field 1, 0x12 field 2, both strings; 0x08 is
// field 1, a varint.
func TestMessagesUseLiqosFieldNumbers(t *testing.T) {
	for _, tc := range []struct {
		m    proto.Message
		want string
	}{
		{&MapRequest{ClusterID: "c", Ip: "i"}, "\x0a\x01c\x12\x01i"},
		{&MapResponse{Ip: "i"}, "\x0a\x01i"},
		{&UnmapRequest{ClusterID: "c", Ip: "i"}, "\x0a\x01c\x12\x01i"},
		{&UnmapResponse{}, ""},
		{&GetHomePodIPRequest{ClusterID: "c", Ip: "i"}, "\x0a\x01c\x12\x01i"},
		{&GetHomePodIPResponse{HomeIP: "i"}, "\x0a\x01i"},
		{&BelongsRequest{Ip: "i"}, "\x0a\x01i"},
		{&BelongsResponse{Belongs: true}, "\x08\x01"},
	} {
		if got, err := proto.Marshal(tc.m); err != nil || string(got) != tc.want {
			t.Errorf("%T: %x %v, want %x", tc.m, got, err, tc.want)
		}
	}
}

func TestServeEndsWithItsContextAndLeavesNoGoroutines(t *testing.T) {
	if testing.Short() {
		t.Skip("needs an API server")
	}
	ignore := goleak.IgnoreCurrent()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	address := kubetest.Address(6000)
	go func() {
		ended <- Serve(ctx, Options{Address: address, Plain: true}, testStore, slog.New(slog.DiscardHandler))
	}()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("does not end")
	}
	if err := leaktest.Find(ignore); err != nil {
		t.Error(err)
	}

	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if err := Serve(context.Background(), Options{Address: taken.Addr().String(), Plain: true}, testStore, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a port that is taken is no error")
	}
}
