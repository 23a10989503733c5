package ipamrpc

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	grpcpeer "google.golang.org/grpc/peer"

	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
)

// An authority is a certificate authority.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t}
	pair := a.sign("authority of " + t.Name())
	a.cert, a.key = pair.Leaf, pair.PrivateKey.(*ecdsa.PrivateKey)
	return a
}

// sign makes a certificate for servers at 127.0.0.1 and for callers. The first one is the
// certificate of the authority itself.
func (a *authority) sign(name string) tls.Certificate {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		a.t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, BasicConstraintsValid: true,
	}
	by, with := a.cert, a.key
	if by == nil {
		template.IsCA, template.KeyUsage = true, x509.KeyUsageCertSign
		by, with = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by, &key.PublicKey, with)
	if err != nil {
		a.t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

// files writes a certificate of the server, and the certificate of its callers' authority.
func (a *authority) files(dir string, callers *authority) (cert, key, clientCA string) {
	a.t.Helper()
	pair := a.sign("server")
	text, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, key, clientCA = filepath.Join(dir, "cert"), filepath.Join(dir, "key"), filepath.Join(dir, "ca")
	for file, block := range map[string]*pem.Block{
		cert: {Type: "CERTIFICATE", Bytes: pair.Certificate[0]}, key: {Type: "PRIVATE KEY", Bytes: text}, clientCA: {Type: "CERTIFICATE", Bytes: callers.cert.Raw},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	return cert, key, clientCA
}

// caller returns the credentials of a caller with the given certificates.
func (a *authority) caller(shows ...tls.Certificate) credentials.TransportCredentials {
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	return credentials.NewTLS(&tls.Config{RootCAs: roots, Certificates: shows})
}

func (k kubelet) belongs() error {
	return k.call("BelongsToPodCIDR", &BelongsRequest{Ip: "10.244.0.1"}, &BelongsResponse{})
}

func TestServeRequiresCertificatesByDefault(t *testing.T) {
	err := Serve(t.Context(), Options{Address: "127.0.0.1:0"}, nil, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "want certificates") {
		t.Error(err)
	}
}

func TestOnlyCallersWithACertificateOfTheirAuthorityAreAnswered(t *testing.T) {
	servers, callers, strangers := newAuthority(t), newAuthority(t), newAuthority(t)
	dir := t.TempDir()
	config, err := TLS(servers.files(dir, callers))
	if err != nil {
		t.Fatal(err)
	}
	address := listen(t, Options{TLS: config})
	for name, creds := range map[string]credentials.TransportCredentials{
		"no TLS": insecure.NewCredentials(), "no certificate": servers.caller(), "one of another authority": servers.caller(strangers.sign("bravo")),
		"one that signed itself": servers.caller(strangers.sign("x")),
	} {
		if err := dial(t, address, "127.0.0.1", creds).belongs(); err == nil {
			t.Errorf("%s: is answered", name)
		}
	}
	if err := dial(t, address, "127.0.0.1", servers.caller(callers.sign("bravo"))).belongs(); err != nil {
		t.Error(err)
	}
	// A new authority takes effect once it is in the file.
	servers.files(dir, strangers)
	if err := dial(t, address, "127.0.0.1", servers.caller(callers.sign("bravo"))).belongs(); err == nil {
		t.Error("the previous authority is still accepted")
	}
	if err := dial(t, address, "127.0.0.1", servers.caller(strangers.sign("bravo"))).belongs(); err != nil {
		t.Error(err)
	}
	if _, err := TLS(filepath.Join(dir, "none"), filepath.Join(dir, "key"), filepath.Join(dir, "ca")); err == nil {
		t.Error("a missing file is not an error")
	}
	if _, err := TLS(filepath.Join(dir, "cert"), filepath.Join(dir, "key"), filepath.Join(dir, "key")); err == nil {
		t.Error("a key is taken for an authority")
	}
}

func TestOnlyTheRequesterMayUnmap(t *testing.T) {
	servers, callers := newAuthority(t), newAuthority(t)
	config, err := TLS(servers.files(t.TempDir(), callers))
	if err != nil {
		t.Fatal(err)
	}
	plain, certified := listen(t, liqo), listen(t, Options{TLS: config})
	one, other := callers.sign("one"), callers.sign("other")
	for name, k := range map[string][2]kubelet{
		"by address":     {dial(t, plain, "127.0.0.1", insecure.NewCredentials()), dial(t, plain, "127.0.0.2", insecure.NewCredentials())},
		"by certificate": {dial(t, certified, "127.0.0.1", servers.caller(one)), dial(t, certified, "127.0.0.1", servers.caller(other))},
	} {
		t.Run(name, func(t *testing.T) {
			id := "hotel-" + name[3:5]
			peer(t, id, "10.200.0.0/16", "10.201.7.0/24")
			mine, theirs := k[0], k[1]
			unmap := func(k kubelet) error {
				return k.call("UnmapEndpointIP", &UnmapRequest{ClusterID: id, Ip: "203.0.113.80"}, &UnmapResponse{})
			}
			isMapped := func() bool { return testStore.State().Mapped(id, netip.MustParseAddr("203.0.113.80")) }
			mapIt := func(k kubelet) {
				t.Helper()
				if err := k.call("MapEndpointIP", &MapRequest{ClusterID: id, Ip: "203.0.113.80"}, &MapResponse{}); err != nil {
					t.Fatal(err)
				}
			}
			mapIt(mine)
			if err := unmap(theirs); err == nil || !strings.Contains(err.Error(), "another caller") || !isMapped() {
				t.Errorf("somebody else's is unmapped: %v, mapped %v", err, isMapped())
			}
			mapIt(theirs) // both callers have requested the mapping now
			if err := unmap(mine); err != nil || !isMapped() {
				t.Errorf("what another caller has goes: %v, mapped %v", err, isMapped())
			}
			if err := unmap(mine); err == nil || !isMapped() {
				t.Errorf("it is unmapped twice: %v", err)
			}
			if err := unmap(theirs); err != nil || isMapped() {
				t.Errorf("the last one: %v, mapped %v", err, isMapped())
			}
			if err := unmap(mine); err != nil {
				t.Errorf("what is not mapped: %v", err)
			}
		})
	}
}

func TestOnlyTheRequesterMayUnmapAfterARestart(t *testing.T) {
	servers, callers := newAuthority(t), newAuthority(t)
	config, err := TLS(servers.files(t.TempDir(), callers))
	if err != nil {
		t.Fatal(err)
	}
	peer(t, "india", "10.200.0.0/16", "10.201.7.0/24")
	one, other := callers.sign("one"), callers.sign("other")
	first := listen(t, Options{TLS: config})
	dial(t, first, "127.0.0.1", servers.caller(one)).mapIP("india", "203.0.113.81", "10.201.7.2")

	// Another process reads the IPAM state.
	store := ipamstore.New(testClient, testClient, "us", slog.New(slog.DiscardHandler))
	if err := store.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	again := listenWith(t, Options{TLS: config}, store)
	unmap := func(shows tls.Certificate) error {
		return dial(t, again, "127.0.0.1", servers.caller(shows)).call("UnmapEndpointIP", &UnmapRequest{ClusterID: "india", Ip: "203.0.113.81"}, &UnmapResponse{})
	}
	mapped := func() bool { return store.State().Mapped("india", netip.MustParseAddr("203.0.113.81")) }
	if err := unmap(other); err == nil || !strings.Contains(err.Error(), "another caller") || !mapped() {
		t.Errorf("somebody else's is unmapped: %v, mapped %v", err, mapped())
	}
	// No endpoint is mapped until the addresses of our nodes are known.
	own := testStore.State().Own()
	for _, ip := range []string{own.Nodes[0].String(), "203.0.113.81"} {
		if err := dial(t, again, "127.0.0.1", servers.caller(one)).call("MapEndpointIP", &MapRequest{ClusterID: "india", Ip: ip}, &MapResponse{}); err == nil || !strings.Contains(err.Error(), "has not read the nodes") {
			t.Errorf("%s: %v", ip, err)
		}
	}
	if _, err := store.Update(t.Context(), func(b ipam.State) (ipam.State, error) { b, _ = b.Configure(own); return b, nil }); err != nil {
		t.Fatal(err)
	}
	dial(t, again, "127.0.0.1", servers.caller(one)).mapIP("india", "203.0.113.81", "10.201.7.2") // a kubelet repeats its requests when it restarts
	if err := unmap(one); err != nil || mapped() {
		t.Errorf("its own: %v, mapped %v", err, mapped())
	}
	// The requester of a mapping from Liqo's IPAM state is unknown, so any caller may remove the
	// mapping.
	if _, err := store.Update(t.Context(), func(b ipam.State) (ipam.State, error) {
		b, _, err := b.MapEndpoint("india", netip.MustParseAddr("203.0.113.81"))
		return b, err
	}); err != nil || !mapped() {
		t.Fatal(err)
	}
	if err := unmap(other); err != nil || mapped() {
		t.Errorf("of Liqo's IPAM state: %v, mapped %v", err, mapped())
	}
}

// A kubelet that is identified by its address gets a new address when its Pod is recreated.
// Mappings that it requested from the old address must not stay for ever. Mappings of a kubelet
// that still exists must stay.
func TestMappingCanBeRemovedAfterItsRequesterPodIsDeleted(t *testing.T) {
	if testing.Short() {
		t.Skip("needs an API server")
	}
	peer(t, "lima", "10.200.0.0/16", "10.201.7.0/24")
	owners, broken := map[string]string{"10.244.7.7": "pod"}, false
	s := &server{store: testStore, log: slog.New(slog.DiscardHandler), callers: newCallers(), ownerKind: func(_ context.Context, ip netip.Addr) (string, error) {
		if broken {
			return "", errors.New("the API server is away")
		}
		return owners[ip.String()], nil
	}}
	as := func(address string) context.Context {
		return grpcpeer.NewContext(t.Context(), &grpcpeer.Peer{Addr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(address), 4000))})
	}
	mapIt := func(address string) {
		t.Helper()
		if _, err := s.mapEndpointIP(as(address), &MapRequest{ClusterID: "lima", Ip: "203.0.113.82"}); err != nil {
			t.Fatal(err)
		}
	}
	unmap := func(address string) error {
		_, err := s.unmapEndpointIP(as(address), &UnmapRequest{ClusterID: "lima", Ip: "203.0.113.82"})
		return err
	}
	mapped := func() bool { return testStore.State().Mapped("lima", netip.MustParseAddr("203.0.113.82")) }
	mapIt("10.244.7.7")
	if err := unmap("10.244.8.8"); err == nil || !mapped() {
		t.Errorf("that of a Pod that is there: %v, mapped %v", err, mapped())
	}
	owners = map[string]string{"10.244.8.8": "pod"} // the same kubelet in a new Pod
	broken = true
	if err := unmap("10.244.8.8"); err == nil || !mapped() {
		t.Errorf("while nobody knows: %v, mapped %v", err, mapped())
	}
	broken = false
	mapIt("10.244.8.8")
	if err := unmap("10.244.8.8"); err != nil || mapped() {
		t.Errorf("that of a Pod that is gone: %v, mapped %v", err, mapped())
	}
	// The cluster may not know the owner of an address outside of the pods' network.
	mapIt("192.0.2.200")
	if err := unmap("10.244.8.8"); err == nil || !mapped() {
		t.Errorf("that of a host outside: %v, mapped %v", err, mapped())
	}
}

func TestGuardedAddressesAreMappedOnlyIfAllowed(t *testing.T) {
	peer(t, "juliett", "10.200.0.0/16", "10.201.7.0/24")
	peer(t, "kilo", "10.200.0.0/16", "10.201.7.0/24")
	allocation, _ := testStore.State().AllocationOf("kilo")
	guarded := map[string]string{
		"192.0.2.65": "node", "::ffff:192.0.2.66": "node", "10.96.0.1": "a Service", "10.111.255.255": "a Service",
		allocation.Pod.Addr().Next().String(): `a network of cluster "kilo"`, allocation.External.Addr().Next().String(): `a network of cluster "kilo"`,
	}
	refuses := func(k kubelet, ip, want string) {
		t.Helper()
		err := k.call("MapEndpointIP", &MapRequest{ClusterID: "juliett", Ip: ip}, &MapResponse{})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "--ipam-allow") {
			t.Errorf("%s: %v, want %s", ip, err, want)
		}
	}
	before := testStore.State()
	none := dial(t, listen(t, Options{Plain: true}), "127.0.0.1", insecure.NewCredentials())
	for ip, want := range guarded {
		refuses(none, ip, want)
	}
	if changed := testStore.State().Changed(before); len(changed) > 0 {
		t.Errorf("what was refused changed %v", changed)
	}
	some := dial(t, listen(t, Options{Plain: true, Allow: []netip.Prefix{pfx("192.0.2.65/32"), pfx("10.96.0.1/32"), allocation.Pod}}), "127.0.0.1", insecure.NewCredentials())
	refuses(some, "192.0.2.66", "node")
	refuses(some, "10.96.0.2", "a Service")
	refuses(some, allocation.External.Addr().Next().String(), "a network of cluster")
	for i, ip := range []string{"192.0.2.65", "10.96.0.1", allocation.Pod.Addr().Next().String(), "192.0.2.67"} {
		some.mapIP("juliett", ip, fmt.Sprintf("10.201.7.%d", 2+i))
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	address := listen(t, Options{Plain: true})
	idle := func(from string) net.Conn {
		t.Helper()
		conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	// kept reports whether the server keeps the connection open: a gRPC server sends its settings
	// first.
	kept := func(c net.Conn) bool {
		t.Helper()
		if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")); err != nil {
			return false
		}
		_, err := c.Read(make([]byte, 1))
		return err == nil
	}
	var held []net.Conn
	for range maxPerAddress {
		c := idle("127.0.0.1")
		if !kept(c) {
			t.Fatal("a connection within the bounds is closed")
		}
		held = append(held, c)
	}
	if kept(idle("127.0.0.1")) {
		t.Errorf("more than %d connections from one address", maxPerAddress)
	}
	if !kept(idle("127.0.0.2")) {
		t.Error("who holds all that one address may have shuts others out")
	}
	held[0].Close()
	for begin := time.Now(); !kept(idle("127.0.0.1")); time.Sleep(20 * time.Millisecond) {
		if time.Since(begin) > time.Minute {
			t.Fatal("a closed connection still counts")
		}
	}
	// This is the bound for all addresses together.
	for i := 3; i < 3+maxConnections/maxPerAddress; i++ {
		for range maxPerAddress {
			kept(idle(fmt.Sprintf("127.0.0.%d", i)))
		}
	}
	if kept(idle("127.0.1.1")) {
		t.Errorf("more than %d connections", maxConnections)
	}
}

func TestRequestsOfOneCallerAreBounded(t *testing.T) {
	c, now := newCallers(), time.Unix(0, 0)
	admitted := func(name string, n int) (ok int) {
		for range n {
			if c.admit(name, now) == nil {
				ok++
			}
		}
		return ok
	}
	if n := admitted("flood", 10*burst); n != burst {
		t.Errorf("%d at once, want %d", n, burst)
	}
	if admitted("other", 1) != 1 {
		t.Error("another caller waits")
	}
	now = now.Add(time.Second)
	if n := admitted("flood", burst); n != perSecond {
		t.Errorf("%d in a second, want %d", n, perSecond)
	}
	for i := range 2 * maxCallers {
		_ = c.admit(fmt.Sprint(i), now) // the test counts refusals below
	}
	if n := len(c.known); n != maxCallers {
		t.Errorf("%d callers are remembered, want %d", n, maxCallers)
	}
	now = now.Add(time.Hour)
	if admitted("new", 1) != 1 || len(c.known) != 1 {
		t.Errorf("%d callers who were silent are remembered", len(c.known)-1)
	}
}
