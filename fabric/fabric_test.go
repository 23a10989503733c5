package fabric

import (
	"encoding/base64"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

const (
	idA = "aaaaaaaa-1111-4111-8111-111111111111"
	idB = "bbbbbbbb-2222-4222-8222-222222222222"
	idC = "cccccccc-3333-4333-8333-333333333333"
)

func keyOf(b byte) (key [32]byte) {
	for i := range key {
		key[i] = b
	}
	return key
}

func keyText(b byte) string {
	key := keyOf(b)
	return base64.StdEncoding.EncodeToString(key[:])
}

// endpointB is the TunnelEndpoint for the peer B in cluster A, if both clusters use 10.244.0.0/16
// (docs/liqo-v0.md, section 7.2).
func endpointB() *v1alpha1.TunnelEndpoint {
	return &v1alpha1.TunnelEndpoint{
		ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-bravo-924e89", Name: "bravo-924e89"},
		Spec: v1alpha1.TunnelEndpointSpec{
			ClusterIdentity:       v1alpha1.ClusterIdentity{ClusterID: idB, ClusterName: "bravo"},
			LocalPodCIDR:          "10.244.0.0/16",
			LocalNATPodCIDR:       "10.246.0.0/16",
			LocalExternalCIDR:     "10.245.0.0/16",
			LocalNATExternalCIDR:  "10.247.0.0/16",
			RemotePodCIDR:         "10.244.0.0/16",
			RemoteNATPodCIDR:      "10.246.0.0/16",
			RemoteExternalCIDR:    "10.245.0.0/16",
			RemoteNATExternalCIDR: "10.247.0.0/16",
			EndpointIP:            "192.0.2.2",
			BackendType:           "wireguard",
			BackendConfig:         v1alpha1.BackendConfig{"port": "5871", "publicKey": keyText(2)},
		},
	}
}

var originB = Origin{"peers.yaml", "TunnelEndpoint", "liqo-tenant-bravo-924e89", "bravo-924e89"}

func pfx(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func ip(s string) netip.Addr    { return netip.MustParseAddr(s) }

func texts(problems []Problem) []string {
	var s []string
	for _, p := range problems {
		s = append(s, p.Error())
	}
	return s
}

func wantTexts(t *testing.T, problems []Problem, want ...string) {
	t.Helper()
	if got := texts(problems); !slices.Equal(got, want) {
		t.Errorf("problems:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestPeerFromReadsATunnelEndpoint(t *testing.T) {
	te := endpointB()
	te.CreationTimestamp = metav1.NewTime(time.Unix(1700000000, 0))
	te.Spec.LocalNATExternalCIDR = "None"
	te.Spec.RemoteNATPodCIDR = "10.9.0.0/16"
	got, problems := PeerFrom(te, originB)
	wantTexts(t, problems)
	want := Peer{
		ID:        idB,
		Name:      "bravo",
		Local:     Networks{pfx("10.244.0.0/16"), pfx("10.246.0.0/16"), pfx("10.245.0.0/16"), pfx("10.245.0.0/16")},
		Remote:    Networks{pfx("10.244.0.0/16"), pfx("10.9.0.0/16"), pfx("10.245.0.0/16"), pfx("10.247.0.0/16")},
		Endpoint:  "192.0.2.2",
		Port:      5871,
		PublicKey: keyOf(2),
		Origin:    originB,
		Created:   1700000000,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestPeerFromAcceptsUnusualValidTunnelEndpoints(t *testing.T) {
	type spec = v1alpha1.TunnelEndpointSpec
	for name, change := range map[string]func(*spec){
		// These networks may be equal, because each side chooses for itself (docs/liqo-v0.md,
		// section 7.5).
		"Pa@B equal to Pb@A": func(s *spec) { s.LocalNATPodCIDR, s.RemoteNATPodCIDR = "10.246.0.0/16", "10.246.0.0/16" },
		"Xa@B equal to Pb@A": func(s *spec) { s.LocalNATExternalCIDR, s.RemoteNATPodCIDR = "10.248.0.0/16", "10.248.0.0/16" },
		"Pa@B equal to Xb@A": func(s *spec) { s.LocalNATPodCIDR, s.RemoteNATExternalCIDR = "10.248.0.0/16", "10.248.0.0/16" },
		"Xa@B equal to Xb@A": func(s *spec) {},
		"Pa@B inside Pb@A": func(s *spec) {
			s.LocalPodCIDR, s.LocalNATPodCIDR = "10.244.0.0/20", "10.246.16.0/20"
		},
		"Xa@B equal to Pa": func(s *spec) { s.LocalNATExternalCIDR = "10.244.0.0/16" },
		"nothing remapped": func(s *spec) {
			s.LocalNATPodCIDR, s.LocalNATExternalCIDR, s.RemoteNATPodCIDR, s.RemoteNATExternalCIDR = "None", "None", "None", "None"
			s.RemotePodCIDR, s.RemoteExternalCIDR = "10.200.0.0/16", "10.201.0.0/16"
		},
		"remapped onto itself": func(s *spec) { s.LocalNATPodCIDR = "10.244.0.0/16" },
		"prefix lengths that differ between the sides": func(s *spec) {
			s.RemotePodCIDR, s.RemoteNATPodCIDR = "10.0.0.0/12", "172.16.0.0/12"
		},
		"the shortest and the longest prefix": func(s *spec) {
			s.RemotePodCIDR, s.RemoteNATPodCIDR = "10.0.0.0/8", "11.0.0.0/8"
			s.RemoteExternalCIDR, s.RemoteNATExternalCIDR = "10.0.0.0/30", "12.0.0.4/30"
		},
		"class E": func(s *spec) { s.RemoteNATPodCIDR = "240.9.0.0/16" },
		"IPv6": func(s *spec) {
			s.LocalPodCIDR, s.LocalNATPodCIDR, s.LocalExternalCIDR, s.LocalNATExternalCIDR = "fd00:1::/48", "fd00:2::/48", "fd00:3::/112", "None"
			s.RemotePodCIDR, s.RemoteNATPodCIDR, s.RemoteExternalCIDR, s.RemoteNATExternalCIDR = "fd00:1::/48", "fd00:4::/48", "fd00:5::/126", "None"
		},
		"IPv6 endpoint":             func(s *spec) { s.EndpointIP = "2001:db8::1" },
		"DNS name":                  func(s *spec) { s.EndpointIP = "a1b2_c3.eu-west-1.elb.Example.com." },
		"DNS name of one label":     func(s *spec) { s.EndpointIP = "gateway" },
		"unknown backend parameter": func(s *spec) { s.BackendConfig["keepalive"] = "25" },
		"cluster ID that is no UUID": func(s *spec) {
			s.ClusterIdentity.ClusterID = "b"
		},
		"no cluster name": func(s *spec) { s.ClusterIdentity.ClusterName = "" },
	} {
		t.Run(name, func(t *testing.T) {
			te := endpointB()
			change(&te.Spec)
			peer, problems := PeerFrom(te, originB)
			wantTexts(t, problems)
			gw, problems := GatewayFor(Intent{ClusterID: idA, PublicKey: keyOf(1), Peers: []Peer{peer}})
			wantTexts(t, problems)
			engineAccepts(t, gw)
		})
	}
}

func TestPeerFromRefusesInvalidTunnelEndpoints(t *testing.T) {
	type spec = v1alpha1.TunnelEndpointSpec
	const networkWant = "; want an address, a slash and a length, such as 10.244.0.0/16"
	const idWant = "; want at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit"
	const endpointWant = "; want the IP address or DNS name of the peer's gateway"
	for _, test := range []struct {
		change func(*spec)
		want   []string
	}{
		{func(s *spec) { s.ClusterIdentity.ClusterID = "" }, []string{"spec.clusterIdentity.clusterID: is empty" + idWant}},
		{func(s *spec) { s.ClusterIdentity.ClusterID = "b/c" }, []string{`spec.clusterIdentity.clusterID: "b/c" has an invalid character` + idWant}},
		{func(s *spec) { s.ClusterIdentity.ClusterID = "-b" }, []string{`spec.clusterIdentity.clusterID: "-b" has an invalid character` + idWant}},
		{func(s *spec) { s.ClusterIdentity.ClusterID = "b\x1b[2J" }, []string{`spec.clusterIdentity.clusterID: "b\x1b[2J" has an invalid character` + idWant}},
		{func(s *spec) { s.ClusterIdentity.ClusterID = strings.Repeat("b", 64) }, []string{`spec.clusterIdentity.clusterID: "` + strings.Repeat("b", 64) + `" has 64 characters` + idWant}},
		{func(s *spec) { s.ClusterIdentity.ClusterName = "b\nravo" }, []string{`spec.clusterIdentity.clusterName: "b\nravo" has a character that cannot be printed; want at most 253 printable characters`}},
		{func(s *spec) { s.ClusterIdentity.ClusterName = strings.Repeat("ä", 127) }, []string{`spec.clusterIdentity.clusterName: "` + strings.Repeat("ä", 50) + `"... has 254 bytes; want at most 253 printable characters`}},

		{func(s *spec) { s.LocalPodCIDR = "" }, []string{"spec.localPodCIDR: is empty; want a CIDR such as 10.244.0.0/16"}},
		{func(s *spec) { s.LocalPodCIDR = "None" }, []string{`spec.localPodCIDR: "None" is not a CIDR` + networkWant}},
		{func(s *spec) { s.LocalPodCIDR = "10.244.0.0" }, []string{`spec.localPodCIDR: "10.244.0.0" is not a CIDR` + networkWant}},
		{func(s *spec) { s.RemotePodCIDR = "10.1.2.3/16" }, []string{`spec.remotePodCIDR: "10.1.2.3/16" has host bits set; want 10.1.0.0/16`}},
		{func(s *spec) { s.RemoteNATPodCIDR = "10.1.2.3/16" }, []string{`spec.remoteNATPodCIDR: "10.1.2.3/16" has host bits set; want 10.1.0.0/16`}},
		{func(s *spec) { s.RemoteNATPodCIDR = "FD00::/48" }, []string{`spec.remoteNATPodCIDR: "FD00::/48" is not in canonical form; want fd00::/48`}},
		{func(s *spec) { s.LocalNATPodCIDR = "" }, []string{`spec.localNATPodCIDR: is empty; want a CIDR or "None"`}},
		{func(s *spec) { s.LocalNATExternalCIDR = "" }, []string{`spec.localNATExternalCIDR: is empty; want a CIDR or "None"`}},
		{func(s *spec) { s.RemoteNATPodCIDR = "" }, []string{`spec.remoteNATPodCIDR: is empty; want a CIDR or "None"`}},
		{func(s *spec) { s.RemoteNATExternalCIDR = "none" }, []string{`spec.remoteNATExternalCIDR: "none" is not a CIDR` + networkWant}},
		{func(s *spec) { s.LocalNATPodCIDR = "10.246.0.0/17" }, []string{"spec.localNATPodCIDR: 10.246.0.0/17 differs in length from spec.localPodCIDR, 10.244.0.0/16; want a /16"}},
		{func(s *spec) { s.LocalNATPodCIDR = "fd00::/16" }, []string{"spec.localNATPodCIDR: fd00::/16 is IPv6, but spec.localPodCIDR is 10.244.0.0/16; want a network of the same family"}},
		{func(s *spec) { s.RemotePodCIDR, s.RemoteNATPodCIDR = "fd00::/48", "None" }, []string{"spec.remotePodCIDR: fd00::/48 is IPv6, but spec.localPodCIDR is 10.244.0.0/16; want networks of one family"}},
		{func(s *spec) { s.RemoteNATPodCIDR = "0.0.0.0/0" }, []string{"spec.remoteNATPodCIDR: 0.0.0.0/0 has a length of 0; want one from 8 to 30"}},
		{func(s *spec) { s.RemotePodCIDR, s.RemoteNATPodCIDR = "10.1.2.4/31", "None" }, []string{"spec.remotePodCIDR: 10.1.2.4/31 has a length of 31; want one from 8 to 30"}},
		{func(s *spec) { s.RemotePodCIDR, s.RemoteNATPodCIDR = "fc00::/7", "None" }, []string{"spec.remotePodCIDR: fc00::/7 has a length of 7; want one from 16 to 126"}},
		{func(s *spec) { s.RemoteNATPodCIDR = "0.1.0.0/16" }, []string{"spec.remoteNATPodCIDR: 0.1.0.0/16 overlaps 0.0.0.0/8 (this network, RFC 1122); want a network that pods can have"}},
		{func(s *spec) { s.RemoteNATPodCIDR = "127.0.0.0/16" }, []string{"spec.remoteNATPodCIDR: 127.0.0.0/16 overlaps 127.0.0.0/8 (loopback); want a network that pods can have"}},
		{func(s *spec) { s.RemoteNATPodCIDR = "169.254.0.0/16" }, []string{"spec.remoteNATPodCIDR: 169.254.0.0/16 overlaps 169.254.0.0/16 (link-local); want a network that pods can have"}},
		{func(s *spec) { s.RemotePodCIDR, s.RemoteNATPodCIDR = "169.0.0.0/8", "11.0.0.0/8" }, []string{"spec.remotePodCIDR: 169.0.0.0/8 overlaps 169.254.0.0/16 (link-local); want a network that pods can have"}},
		{func(s *spec) { s.RemoteNATPodCIDR = "239.1.0.0/16" }, []string{"spec.remoteNATPodCIDR: 239.1.0.0/16 overlaps 224.0.0.0/4 (multicast); want a network that pods can have"}},
		{func(s *spec) { s.RemoteNATPodCIDR = "255.255.0.0/16" }, []string{"spec.remoteNATPodCIDR: 255.255.0.0/16 overlaps 255.255.255.255/32 (limited broadcast); want a network that pods can have"}},
		{func(s *spec) { s.RemotePodCIDR, s.RemoteNATPodCIDR = "::/64", "None" }, []string{"spec.remotePodCIDR: ::/64 overlaps ::/8 (unspecified, loopback, IPv4-mapped and NAT64, RFC 4291 and 6052); want a network that pods can have"}},
		{func(s *spec) { s.RemotePodCIDR, s.RemoteNATPodCIDR = "::ffff:10.1.0.0/112", "None" }, []string{"spec.remotePodCIDR: ::ffff:10.1.0.0/112 overlaps ::/8 (unspecified, loopback, IPv4-mapped and NAT64, RFC 4291 and 6052); want a network that pods can have"}},
		{func(s *spec) { s.RemotePodCIDR, s.RemoteNATPodCIDR = "100::/64", "None" }, []string{"spec.remotePodCIDR: 100::/64 overlaps 100::/64 (discard-only, RFC 6666); want a network that pods can have"}},
		{func(s *spec) { s.RemotePodCIDR, s.RemoteNATPodCIDR = "fe80::/64", "None" }, []string{"spec.remotePodCIDR: fe80::/64 overlaps fe80::/10 (link-local); want a network that pods can have"}},
		{func(s *spec) { s.RemotePodCIDR, s.RemoteNATPodCIDR = "ff02::/64", "None" }, []string{"spec.remotePodCIDR: ff02::/64 overlaps ff00::/8 (multicast); want a network that pods can have"}},

		{func(s *spec) { s.LocalExternalCIDR, s.LocalNATExternalCIDR = "10.244.8.0/24", "10.9.8.0/24" }, []string{"spec.localExternalCIDR: 10.244.8.0/24 overlaps spec.localPodCIDR, 10.244.0.0/16; want networks that do not overlap"}},
		{func(s *spec) { s.LocalNATExternalCIDR = "10.246.0.0/16" }, []string{"spec.localNATExternalCIDR: 10.246.0.0/16 overlaps spec.localNATPodCIDR, 10.246.0.0/16; want networks that do not overlap"}},
		{func(s *spec) { s.LocalNATExternalCIDR, s.LocalNATPodCIDR = "10.244.0.0/16", "None" }, []string{"spec.localNATExternalCIDR: 10.244.0.0/16 overlaps spec.localPodCIDR, 10.244.0.0/16; want networks that do not overlap"}},
		{func(s *spec) { s.LocalNATExternalCIDR, s.LocalNATPodCIDR = "None", "10.245.0.0/16" }, []string{"spec.localExternalCIDR: 10.245.0.0/16 overlaps spec.localNATPodCIDR, 10.245.0.0/16; want networks that do not overlap"}},
		{func(s *spec) { s.RemoteNATExternalCIDR = "10.246.0.0/16" }, []string{"spec.remoteNATExternalCIDR: 10.246.0.0/16 overlaps spec.remoteNATPodCIDR, 10.246.0.0/16; want networks that do not overlap"}},
		{func(s *spec) { s.RemoteNATPodCIDR = "10.244.0.0/16" }, []string{"spec.remotePodCIDR: 10.244.0.0/16 overlaps spec.localPodCIDR, 10.244.0.0/16; want networks that do not overlap"}},
		{func(s *spec) { s.RemoteNATPodCIDR = "None" }, []string{"spec.remotePodCIDR: 10.244.0.0/16 overlaps spec.localPodCIDR, 10.244.0.0/16; want networks that do not overlap"}},
		{func(s *spec) { s.RemoteNATPodCIDR = "10.245.0.0/16" }, []string{"spec.remoteNATPodCIDR: 10.245.0.0/16 overlaps spec.localExternalCIDR, 10.245.0.0/16; want networks that do not overlap"}},
		{func(s *spec) { s.RemoteNATExternalCIDR = "10.244.0.0/16" }, []string{"spec.remoteNATExternalCIDR: 10.244.0.0/16 overlaps spec.localPodCIDR, 10.244.0.0/16; want networks that do not overlap"}},
		{func(s *spec) { s.RemoteNATExternalCIDR = "None" }, []string{"spec.remoteExternalCIDR: 10.245.0.0/16 overlaps spec.localExternalCIDR, 10.245.0.0/16; want networks that do not overlap"}},

		{func(s *spec) { s.EndpointIP = "" }, []string{"spec.endpointIP: is empty" + endpointWant}},
		{func(s *spec) { s.EndpointIP = "192.0.2.300" }, []string{`spec.endpointIP: "192.0.2.300" ends in a number, but is not an IP address` + endpointWant}},
		{func(s *spec) { s.EndpointIP = "gateway.0x7f" }, []string{`spec.endpointIP: "gateway.0x7f" ends in a number, but is not an IP address` + endpointWant}},
		{func(s *spec) { s.EndpointIP = "192.0.2.2:5871" }, []string{`spec.endpointIP: "192.0.2.2:5871" is neither an IP address nor a DNS name` + endpointWant}},
		{func(s *spec) { s.EndpointIP = "-a.example" }, []string{`spec.endpointIP: "-a.example" is neither an IP address nor a DNS name` + endpointWant}},
		{func(s *spec) { s.EndpointIP = "a..example" }, []string{`spec.endpointIP: "a..example" is neither an IP address nor a DNS name` + endpointWant}},
		{func(s *spec) { s.EndpointIP = "." }, []string{`spec.endpointIP: "." is neither an IP address nor a DNS name` + endpointWant}},
		{func(s *spec) { s.EndpointIP = strings.Repeat("a.", 127) + "a" }, []string{`spec.endpointIP: "` + strings.Repeat("a.", 50) + `"... is longer than 253 characters` + endpointWant}},
		{func(s *spec) { s.EndpointIP = "gw.LOCALHOST" }, []string{`spec.endpointIP: "gw.LOCALHOST" is this host` + endpointWant}},
		{func(s *spec) { s.EndpointIP = "127.0.0.1" }, []string{"spec.endpointIP: 127.0.0.1 is in 127.0.0.0/8 (loopback)" + endpointWant}},
		{func(s *spec) { s.EndpointIP = "0.0.0.0" }, []string{"spec.endpointIP: 0.0.0.0 is in 0.0.0.0/8 (this network, RFC 1122)" + endpointWant}},
		{func(s *spec) { s.EndpointIP = "224.0.0.1" }, []string{"spec.endpointIP: 224.0.0.1 is in 224.0.0.0/4 (multicast)" + endpointWant}},
		{func(s *spec) { s.EndpointIP = "fe80::1%eth0" }, []string{`spec.endpointIP: "fe80::1%eth0" has an IPv6 zone` + endpointWant}},
		{func(s *spec) { s.EndpointIP = "::ffff:192.0.2.2" }, []string{`spec.endpointIP: "::ffff:192.0.2.2" is an IPv4 address in IPv6 form; want 192.0.2.2`}},
		{func(s *spec) { s.EndpointIP = "10.246.0.9" }, []string{"spec.endpointIP: 10.246.0.9 is inside 10.246.0.0/16 (spec.remoteNATPodCIDR), which is reached through the tunnel itself; want an address outside"}},
		{func(s *spec) { s.EndpointIP = "10.247.0.9" }, []string{"spec.endpointIP: 10.247.0.9 is inside 10.247.0.0/16 (spec.remoteNATExternalCIDR), which is reached through the tunnel itself; want an address outside"}},

		{func(s *spec) { s.BackendType = "ipsec" }, []string{`spec.backendType: is "ipsec"; want "wireguard"`}},
		{func(s *spec) { s.BackendConfig = nil }, []string{
			"spec.backend_config.port: is absent; want a UDP port from 1 to 65535",
			"spec.backend_config.publicKey: is absent; want a WireGuard public key in base64",
		}},
		{func(s *spec) { s.BackendConfig["port"] = "0" }, []string{`spec.backend_config.port: is "0"; want a UDP port from 1 to 65535`}},
		{func(s *spec) { s.BackendConfig["port"] = "65536" }, []string{`spec.backend_config.port: is "65536"; want a UDP port from 1 to 65535`}},
		{func(s *spec) { s.BackendConfig["port"] = "05871" }, []string{`spec.backend_config.port: is "05871"; want a UDP port from 1 to 65535`}},
		{func(s *spec) { s.BackendConfig["port"] = "+5871" }, []string{`spec.backend_config.port: is "+5871"; want a UDP port from 1 to 65535`}},
		{func(s *spec) { s.BackendConfig["publicKey"] = "" }, []string{"spec.backend_config.publicKey: has 0 bytes; want 32 bytes in 44 base64 characters"}},
		{func(s *spec) { s.BackendConfig["publicKey"] = "hello" }, []string{"spec.backend_config.publicKey: is not base64; want 32 bytes in 44 base64 characters"}},
		{func(s *spec) { s.BackendConfig["publicKey"] = keyText(2)[:40] }, []string{"spec.backend_config.publicKey: has 30 bytes; want 32 bytes in 44 base64 characters"}},
		{func(s *spec) { s.BackendConfig["publicKey"] = keyText(2) + "\n" }, []string{"spec.backend_config.publicKey: is not base64; want 32 bytes in 44 base64 characters"}},
		{func(s *spec) { s.BackendConfig["publicKey"] = strings.Repeat("A", 42) + "B=" }, []string{"spec.backend_config.publicKey: is not base64; want 32 bytes in 44 base64 characters"}},
		{func(s *spec) { s.BackendConfig["publicKey"] = keyText(0) }, []string{"spec.backend_config.publicKey: is all zero; want a key"}},

		// All faults at once: each is reported exactly once.
		{func(s *spec) { *s = spec{} }, []string{
			"spec.backendType: is \"\"; want \"wireguard\"",
			"spec.backend_config.port: is absent; want a UDP port from 1 to 65535",
			"spec.backend_config.publicKey: is absent; want a WireGuard public key in base64",
			"spec.clusterIdentity.clusterID: is empty" + idWant,
			"spec.endpointIP: is empty" + endpointWant,
			"spec.localExternalCIDR: is empty; want a CIDR such as 10.244.0.0/16",
			`spec.localNATExternalCIDR: is empty; want a CIDR or "None"`,
			`spec.localNATPodCIDR: is empty; want a CIDR or "None"`,
			"spec.localPodCIDR: is empty; want a CIDR such as 10.244.0.0/16",
			"spec.remoteExternalCIDR: is empty; want a CIDR such as 10.244.0.0/16",
			`spec.remoteNATExternalCIDR: is empty; want a CIDR or "None"`,
			`spec.remoteNATPodCIDR: is empty; want a CIDR or "None"`,
			"spec.remotePodCIDR: is empty; want a CIDR such as 10.244.0.0/16",
		}},
	} {
		t.Run(test.want[0], func(t *testing.T) {
			te := endpointB()
			test.change(&te.Spec)
			peer, problems := PeerFrom(te, originB)
			for i := range test.want {
				test.want[i] = "peers.yaml: TunnelEndpoint liqo-tenant-bravo-924e89/bravo-924e89: " + test.want[i]
			}
			wantTexts(t, problems, test.want...)
			if !reflect.DeepEqual(peer, Peer{}) {
				t.Errorf("refused, yet it returns %+v", peer)
			}
		})
	}
}

func natMappingB() *v1alpha1.NatMapping {
	return &v1alpha1.NatMapping{
		ObjectMeta: metav1.ObjectMeta{Name: "natmapping-x7k2p"},
		Spec: v1alpha1.NatMappingSpec{
			ClusterID:       idB,
			PodCIDR:         "10.246.0.0/16",
			ExternalCIDR:    "10.247.0.0/16",
			ClusterMappings: v1alpha1.EndpointMap{"169.254.0.1": "10.247.0.1", "172.30.0.9": "10.247.0.2", "10.244.3.3": "10.247.0.3"},
		},
	}
}

var originMapB = Origin{File: "peers.yaml", Kind: "NatMapping", Name: "natmapping-x7k2p"}

func TestMappingsFromReadsANatMapping(t *testing.T) {
	id, mappings, problems := MappingsFrom(natMappingB(), originMapB)
	wantTexts(t, problems)
	want := []Mapping{{ip("169.254.0.1"), ip("10.247.0.1")}, {ip("172.30.0.9"), ip("10.247.0.2")}, {ip("10.244.3.3"), ip("10.247.0.3")}}
	if id != idB || !slices.Equal(mappings, want) {
		t.Errorf("got %s %v, want %s %v", id, mappings, idB, want)
	}
}

func TestMappingsFromRefusesInvalidEntries(t *testing.T) {
	type spec = v1alpha1.NatMappingSpec
	entry := func(real, seen string) func(*spec) {
		return func(s *spec) { s.ClusterMappings = v1alpha1.EndpointMap{real: seen, "172.30.0.9": "10.247.0.2"} }
	}
	for _, test := range []struct {
		change func(*spec)
		want   string
		kept   int // number of entries that are still used
	}{
		{func(s *spec) { s.ClusterID = "" }, "spec.clusterID: is empty; want at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit", 0},
		{func(s *spec) { s.PodCIDR = "10.246.0.1/16" }, `spec.podCIDR: "10.246.0.1/16" has host bits set; want 10.246.0.0/16`, 0},
		{func(s *spec) { s.ExternalCIDR = "None" }, `spec.externalCIDR: "None" is not a CIDR; want an address, a slash and a length, such as 10.244.0.0/16`, 0},
		{func(s *spec) { s.ExternalCIDR = "169.254.0.0/16" }, "spec.externalCIDR: 169.254.0.0/16 overlaps 169.254.0.0/16 (link-local); want a network that pods can have", 0},
		{entry("host", "10.247.0.9"), `spec.clusterMappings["host"]: key "host" is not an IP address; want one such as 10.0.0.1`, 1},
		{entry("172.30.0.8", "010.247.0.9"), `spec.clusterMappings["172.30.0.8"]: value "010.247.0.9" is not an IP address; want one such as 10.0.0.1`, 1},
		{entry("fe80::1%eth0", "10.247.0.9"), `spec.clusterMappings["fe80::1%eth0"]: key "fe80::1%eth0" is not an IP address; want one such as 10.0.0.1`, 1},
		{entry("172.30.0.8", "10.248.0.9"), `spec.clusterMappings["172.30.0.8"]: 10.248.0.9 is outside spec.externalCIDR, 10.247.0.0/16; want an address inside`, 1},
		{entry("127.0.0.1", "10.247.0.9"), `spec.clusterMappings["127.0.0.1"]: key: 127.0.0.1 is in 127.0.0.0/8 (loopback); want an address that is reachable from our pod network`, 1},
		{entry("169.254.169.254", "10.247.0.9"), `spec.clusterMappings["169.254.169.254"]: key: 169.254.169.254 is in 169.254.0.0/16 (link-local); want an address that is reachable from our pod network`, 1},
		{entry("224.0.0.1", "10.247.0.9"), `spec.clusterMappings["224.0.0.1"]: key: 224.0.0.1 is in 224.0.0.0/4 (multicast); want an address that is reachable from our pod network`, 1},
	} {
		t.Run(test.want, func(t *testing.T) {
			nm := natMappingB()
			test.change(&nm.Spec)
			_, mappings, problems := MappingsFrom(nm, originMapB)
			wantTexts(t, problems, "peers.yaml: NatMapping natmapping-x7k2p: "+test.want)
			if len(mappings) != test.kept {
				t.Errorf("kept %v, want %d entries", mappings, test.kept)
			}
		})
	}
}

func TestAttachAssignsMappingsByClusterID(t *testing.T) {
	origin := func(name string) Origin { return Origin{Kind: "NatMapping", Name: name} }
	m := func(real, seen string) Mapping { return Mapping{ip(real), ip(seen)} }
	sets := []MappingSet{
		{idC, []Mapping{m("172.30.0.9", "10.9.0.2")}, origin("c")},
		{idB, []Mapping{m("172.30.0.8", "10.9.0.9")}, origin("late")},
		{idB, []Mapping{m("172.30.0.9", "10.9.0.3"), m("172.30.0.8", "10.9.0.2")}, origin("early")},
	}
	peers := []Peer{{ID: idB}, {ID: idA, Mappings: sets[0].Mappings}}
	for range 2 {
		got, waiting, problems := Attach(peers, sets)
		wantTexts(t, problems, `NatMapping late: spec.clusterID: cluster "`+idB+`" already has its mappings in NatMapping early; want one NatMapping for each cluster`)
		if want := []Waiting{{idC, origin("c")}}; !slices.Equal(waiting, want) {
			t.Errorf("waiting %v, want %v", waiting, want)
		}
		want := []Peer{{ID: idB, Mappings: []Mapping{m("172.30.0.8", "10.9.0.2"), m("172.30.0.9", "10.9.0.3")}, MappingsOrigin: origin("early")}, {ID: idA}}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
		slices.Reverse(sets)
	}
}

func TestProblemTextNamesObjectAndField(t *testing.T) {
	for want, p := range map[string]Problem{
		"f.yaml: Kind ns/n: spec.x: is wrong": {Origin{"f.yaml", "Kind", "ns", "n"}, "spec.x", "is wrong"},
		"Kind n: is wrong":                    {Origin{Kind: "Kind", Name: "n"}, "", "is wrong"},
		"f.yaml: x: is wrong":                 {Origin{File: "f.yaml"}, "x", "is wrong"},
		"f.yaml: Kind: is wrong":              {Origin{File: "f.yaml", Kind: "Kind"}, "", "is wrong"},
		"is wrong":                            {Message: "is wrong"},
	} {
		if got := p.Error(); got != want {
			t.Errorf("%+v prints %q, want %q", p, got, want)
		}
	}
}

func TestFirstHostIsTheAddressAfterTheNetworkAddress(t *testing.T) {
	for in, want := range map[string]string{
		"10.247.0.0/16": "10.247.0.1",
		"10.247.9.9/16": "10.247.0.1",
		"10.0.0.4/30":   "10.0.0.5",
		"10.0.0.4/31":   "10.0.0.5",
		"fd00::/64":     "fd00::1",
	} {
		if got := FirstHost(pfx(in)); got != ip(want) {
			t.Errorf("FirstHost(%s) = %v, want %s", in, got, want)
		}
	}
	for _, p := range []netip.Prefix{{}, pfx("10.0.0.4/32"), pfx("255.255.255.255/32"), pfx("::1/128")} {
		if got := FirstHost(p); got.IsValid() {
			t.Errorf("FirstHost(%v) = %v, want none", p, got)
		}
	}
}
