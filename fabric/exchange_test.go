package fabric

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

var (
	alpha = v1alpha1.ClusterIdentity{ClusterID: idA, ClusterName: "alpha"}
	bravo = v1alpha1.ClusterIdentity{ClusterID: idB, ClusterName: "bravo"}
)

// configOf returns an unanswered NetworkConfig, addressed to another cluster.
func configOf(to v1alpha1.ClusterIdentity, pod, external, endpoint string, key byte) *v1alpha1.NetworkConfig {
	return &v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: to.UniqueName()},
		Spec: v1alpha1.NetworkConfigSpec{
			RemoteCluster: to, PodCIDR: pod, ExternalCIDR: external, EndpointIP: endpoint, BackendType: v1alpha1.BackendWireGuard,
			BackendConfig: v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: keyText(key), v1alpha1.ConfigPort: "5871"},
		},
	}
}

func answered(nc *v1alpha1.NetworkConfig, pod, external string) *v1alpha1.NetworkConfig {
	nc.Status = v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: pod, ExternalCIDRNAT: external}
	return nc
}

// fromBravo returns a NetworkConfig of the peer bravo, whose networks have other prefix lengths
// than ours.
func fromBravo() *v1alpha1.NetworkConfig {
	return configOf(alpha, "10.244.0.0/18", "10.245.0.0/18", "192.0.2.2", 2)
}

var claimBravo = Claim{Pod: pfx("10.244.0.0/18"), External: pfx("10.245.0.0/18"), Endpoint: "192.0.2.2", Port: 5871, PublicKey: keyOf(2)}

func TestClaimFromReadsANetworkConfig(t *testing.T) {
	got, problems := ClaimFrom(fromBravo(), Origin{})
	wantTexts(t, problems)
	if !reflect.DeepEqual(got, claimBravo) {
		t.Errorf("got  %+v\nwant %+v", got, claimBravo)
	}
}

func TestClaimFromRefusesInvalidNetworkConfigs(t *testing.T) {
	type spec = v1alpha1.NetworkConfigSpec
	for name, c := range map[string]struct {
		change func(*spec)
		want   string // field and part of the message
	}{
		"no PodCIDR":                      {func(s *spec) { s.PodCIDR = "" }, "spec.podCIDR: is empty"},
		"all addresses":                   {func(s *spec) { s.PodCIDR = "0.0.0.0/0" }, "spec.podCIDR: 0.0.0.0/0 has a length of 0"},
		"host bits":                       {func(s *spec) { s.PodCIDR = "10.244.0.1/16" }, "spec.podCIDR: \"10.244.0.1/16\" has host bits set"},
		"loopback":                        {func(s *spec) { s.ExternalCIDR = "127.0.0.0/16" }, "spec.externalCIDR: 127.0.0.0/16 overlaps 127.0.0.0/8 (loopback)"},
		"link-local":                      {func(s *spec) { s.PodCIDR = "169.254.0.0/16" }, "spec.podCIDR: 169.254.0.0/16 overlaps 169.254.0.0/16 (link-local)"},
		"multicast":                       {func(s *spec) { s.PodCIDR = "224.0.0.0/8" }, "spec.podCIDR: 224.0.0.0/8 overlaps 224.0.0.0/4 (multicast)"},
		"too long":                        {func(s *spec) { s.PodCIDR = "10.0.0.4/31" }, "spec.podCIDR: 10.0.0.4/31 has a length of 31"},
		"not canonical":                   {func(s *spec) { s.PodCIDR = "FD00::/48" }, "spec.podCIDR: \"FD00::/48\" is not in canonical form"},
		"IPv4-mapped IPv6":                {func(s *spec) { s.PodCIDR = "::ffff:10.0.0.0/104" }, "spec.podCIDR:"},
		"two families":                    {func(s *spec) { s.ExternalCIDR = "fd00::/48" }, "spec.externalCIDR: fd00::/48 is IPv6, but spec.podCIDR is 10.244.0.0/18"},
		"networks that overlap":           {func(s *spec) { s.ExternalCIDR = "10.244.0.0/24" }, "spec.externalCIDR: 10.244.0.0/24 overlaps spec.podCIDR"},
		"megabyte of CIDR":                {func(s *spec) { s.PodCIDR = strings.Repeat("1", 1<<20) }, "spec.podCIDR: \"1111"},
		"no endpoint":                     {func(s *spec) { s.EndpointIP = "" }, "spec.endpointIP: is empty"},
		"loopback endpoint":               {func(s *spec) { s.EndpointIP = "127.0.0.1" }, "spec.endpointIP: 127.0.0.1 is in 127.0.0.0/8"},
		"metadata service":                {func(s *spec) { s.EndpointIP = "168.63.129.16" }, "spec.endpointIP: 168.63.129.16 is in 168.63.129.16/32 (services of Azure's machines)"},
		"broadcast endpoint":              {func(s *spec) { s.EndpointIP = "255.255.255.255" }, "spec.endpointIP: 255.255.255.255 is in"},
		"endpoint with a shell":           {func(s *spec) { s.EndpointIP = "$(reboot)" }, "spec.endpointIP: \"$(reboot)\" is neither"},
		"endpoint with terminal":          {func(s *spec) { s.EndpointIP = "\x1b[2J" }, `spec.endpointIP: "\x1b[2J" is neither`},
		"endpoint that is a URL":          {func(s *spec) { s.EndpointIP = "http://x" }, "spec.endpointIP: \"http://x\" is neither"},
		"localhost":                       {func(s *spec) { s.EndpointIP = "a.localhost" }, "spec.endpointIP: \"a.localhost\" is this host"},
		"other backend":                   {func(s *spec) { s.BackendType = "ipsec" }, "spec.backendType: is \"ipsec\"; want \"wireguard\""},
		"no port":                         {func(s *spec) { delete(s.BackendConfig, "port") }, "spec.backend_config.port: is absent"},
		"port 0":                          {func(s *spec) { s.BackendConfig["port"] = "0" }, "spec.backend_config.port: is \"0\""},
		"port with a sign":                {func(s *spec) { s.BackendConfig["port"] = "+5871" }, "spec.backend_config.port: is \"+5871\""},
		"no key":                          {func(s *spec) { delete(s.BackendConfig, "publicKey") }, "spec.backend_config.publicKey: is absent"},
		"no backend_config":               {func(s *spec) { s.BackendConfig = nil }, "spec.backend_config.port: is absent"},
		"zero key":                        {func(s *spec) { s.BackendConfig["publicKey"] = keyText(0) }, "spec.backend_config.publicKey: is all zero"},
		"key that is not a key":           {func(s *spec) { s.BackendConfig["publicKey"] = "a2V5" }, "spec.backend_config.publicKey: has 3 bytes"},
		"key that is not base64":          {func(s *spec) { s.BackendConfig["publicKey"] = "?" }, "spec.backend_config.publicKey: is not base64"},
		"key of a megabyte":               {func(s *spec) { s.BackendConfig["publicKey"] = strings.Repeat("AAAA", 1<<18) }, "spec.backend_config.publicKey: has 786432 bytes"},
		"tunnels without an entry":        {func(s *spec) { s.BackendConfig["tunnels"] = "" }, "spec.backend_config.tunnels: is empty; want PORT:PUBLICKEY"},
		"a tunnel with port 0":            {func(s *spec) { s.BackendConfig["tunnels"] = "0:" + keyText(3) }, "spec.backend_config.tunnels: tunnel 1 has port \"0\"; want a UDP port"},
		"tunnels of a megabyte":           {func(s *spec) { s.BackendConfig["tunnels"] = strings.Repeat("x", 1<<20) }, "spec.backend_config.tunnels: tunnel 1 is \"xxx"},
		"tunnel with the key of tunnel 0": {func(s *spec) { s.BackendConfig["tunnels"] = "5872:" + keyText(2) }, "spec.backend_config.tunnels: tunnel 1 has the public key of tunnel 0"},
		"everything wrong at once":        {func(s *spec) { *s = spec{} }, "spec.backendType: is \"\""},
	} {
		t.Run(name, func(t *testing.T) {
			nc := fromBravo()
			c.change(&nc.Spec)
			claim, problems := ClaimFrom(nc, Origin{})
			if !reflect.DeepEqual(claim, Claim{}) {
				t.Errorf("a claim with problems: %+v", claim)
			}
			all := strings.Join(texts(problems), "\n")
			if !strings.Contains(all, c.want) {
				t.Errorf("problems:\n%s\nwant one with:\n%s", all, c.want)
			}
			if len(all) > 2000 {
				t.Errorf("the messages have %d bytes", len(all))
			}
		})
	}
}

func TestCheckClaimRefusesConflictingClaims(t *testing.T) {
	receiver := Receiver{
		PublicKey: keyOf(1), Pod: pfx("10.244.0.0/16"), Service: pfx("10.96.0.0/12"), External: pfx("10.245.0.0/16"),
		Nodes: []netip.Addr{ip("172.30.0.1"), ip("172.30.0.2")}, APIServers: []netip.Addr{ip("172.30.0.9")}, Endpoint: "gw.alpha.example", Port: 5871,
		Tunnels: []TunnelEnd{{keyOf(11), 5872}},
	}
	for name, c := range map[string]struct {
		change func(*Claim)
		others Neighbours
		want   []string
	}{
		"nothing": {func(*Claim) {}, Neighbours{}, nil},
		"our key": {func(c *Claim) { c.PublicKey = keyOf(1) }, Neighbours{},
			[]string{"KeyConflict spec.backend_config.publicKey: is the public key of the receiver itself; want that of the sender's gateway"}},
		"the key of an additional tunnel of ours": {func(c *Claim) { c.PublicKey = keyOf(11) }, Neighbours{},
			[]string{"KeyConflict spec.backend_config.publicKey: is the public key of the receiver itself; want that of the sender's gateway"}},
		"our key for an additional tunnel": {func(c *Claim) { c.Tunnels = []TunnelEnd{{keyOf(3), 5872}, {keyOf(1), 5873}, {keyOf(11), 5874}} }, Neighbours{}, []string{
			"KeyConflict spec.backend_config.tunnels: tunnel 2 has a public key of the receiver itself; want one of the sender's gateway",
			"KeyConflict spec.backend_config.tunnels: tunnel 3 has a public key of the receiver itself; want one of the sender's gateway",
		}},
		"another peer's key": {func(*Claim) {}, Neighbours{TakenKeys: [][32]byte{keyOf(2)}},
			[]string{"KeyConflict spec.backend_config.publicKey: is the key of another peer of the receiver; want a different key for each cluster"}},
		"another peer's key for an additional tunnel": {func(c *Claim) { c.Tunnels = []TunnelEnd{{keyOf(3), 5872}, {keyOf(4), 5873}} }, Neighbours{TakenKeys: [][32]byte{keyOf(4)}},
			[]string{"KeyConflict spec.backend_config.tunnels: tunnel 2 has the key of another peer of the receiver; want different keys for each cluster"}},
		"a pod of ours": {func(c *Claim) { c.Endpoint = "10.244.3.4" }, Neighbours{},
			[]string{"BadEndpoint spec.endpointIP: 10.244.3.4 is inside 10.244.0.0/16, the receiver's PodCIDR; want an address outside"}},
		"a Service of ours": {func(c *Claim) { c.Endpoint = "10.96.0.1" }, Neighbours{},
			[]string{"BadEndpoint spec.endpointIP: 10.96.0.1 is inside 10.96.0.0/12, the receiver's ServiceCIDR; want an address outside"}},
		"in our ExternalCIDR": {func(c *Claim) { c.Endpoint = "10.245.0.1" }, Neighbours{},
			[]string{"BadEndpoint spec.endpointIP: 10.245.0.1 is inside 10.245.0.0/16, the receiver's ExternalCIDR; want an address outside"}},
		"a node of ours": {func(c *Claim) { c.Endpoint = "172.30.0.2" }, Neighbours{},
			[]string{"BadEndpoint spec.endpointIP: 172.30.0.2 is a node of the receiver; want the address of the sender's gateway"}},
		"an API server of ours": {func(c *Claim) { c.Endpoint = "172.30.0.9" }, Neighbours{},
			[]string{"BadEndpoint spec.endpointIP: 172.30.0.9 is an API server of the receiver; want the address of the sender's gateway"}},
		"our own gateway": {func(c *Claim) { c.Endpoint = "GW.alpha.example." }, Neighbours{},
			[]string{"BadEndpoint spec.endpointIP: \"GW.alpha.example.:5871\" is the gateway of the receiver itself; want that of the sender"}},
		"an additional tunnel of our own gateway": {func(c *Claim) { c.Endpoint, c.Port = "gw.alpha.example", 5872 }, Neighbours{},
			[]string{"BadEndpoint spec.endpointIP: \"gw.alpha.example:5872\" is the gateway of the receiver itself; want that of the sender"}},
		"an additional tunnel to our own gateway": {func(c *Claim) {
			c.Endpoint, c.Port, c.Tunnels = "gw.alpha.example", 5870, []TunnelEnd{{keyOf(3), 5871}}
		}, Neighbours{},
			[]string{"BadEndpoint spec.endpointIP: \"gw.alpha.example:5871\" is the gateway of the receiver itself; want that of the sender"}},
		"behind the same NAT": {func(c *Claim) {
			c.Endpoint, c.Port, c.Tunnels = "gw.alpha.example", 5873, []TunnelEnd{{keyOf(3), 5874}}
		}, Neighbours{}, nil},
		"inside a tunnel": {func(*Claim) {}, Neighbours{EndpointTunnelled: true},
			[]string{"BadEndpoint spec.endpointIP: 192.0.2.2 is inside a network that the receiver reaches through a tunnel; want an address outside"}},
	} {
		t.Run(name, func(t *testing.T) {
			claim := claimBravo
			c.change(&claim)
			if got := refusalTexts(CheckClaim(claim, receiver, c.others)); !slices.Equal(got, c.want) {
				t.Errorf("got  %q\nwant %q", got, c.want)
			}
		})
	}
	if got := CheckClaim(claimBravo, Receiver{}, Neighbours{}); got != nil {
		t.Errorf("a Receiver without values refuses a claim: %v", got)
	}
}

func refusalTexts(refusals []Refusal) (all []string) {
	for _, r := range refusals {
		all = append(all, r.Reason+" "+r.Error())
	}
	return all
}

func TestCheckAllocationRefusesNetworksThatContainGateways(t *testing.T) {
	for name, c := range map[string]struct {
		pod, external string
		gateways      []netip.Addr
		want          []string
	}{
		"no gateway": {"10.246.0.0/18", "10.246.64.0/18", nil, nil},
		"the peer's own gateway": {"10.246.0.0/18", "192.0.0.0/18", nil,
			[]string{"BadEndpoint spec.endpointIP: 192.0.2.2 is inside 192.0.0.0/18, which the receiver uses for spec.externalCIDR; " +
				"want an address outside, or reserve that network at the receiver"}},
		"another peer's gateway": {"10.246.0.0/18", "10.246.64.0/18", []netip.Addr{ip("10.246.1.1"), ip("10.246.1.2")},
			[]string{"CIDRConflict spec.podCIDR: the receiver would use 10.246.0.0/18 for it, which contains a peer's gateway; " +
				"reserve that network at the receiver"}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := refusalTexts(CheckAllocation(claimBravo, pfx(c.pod), pfx(c.external), c.gateways)); !slices.Equal(got, c.want) {
				t.Errorf("got  %q\nwant %q", got, c.want)
			}
		})
	}
}

// The two sides have networks of different lengths, and each of the four networks may be remapped.
func TestTunnelEndpointForCopiesFieldsOfBothConfigs(t *testing.T) {
	nat := func(remapped bool, network string) string {
		if remapped {
			return network
		}
		return "None"
	}
	for i := range 16 {
		localPod, localExternal, remotePod, remoteExternal := i&1 != 0, i&2 != 0, i&4 != 0, i&8 != 0
		t.Run(fmt.Sprintf("%04b", i), func(t *testing.T) {
			original := answered(configOf(bravo, "10.240.0.0/14", "10.100.0.0/16", "198.51.100.1", 1),
				nat(localPod, "172.16.0.0/14"), nat(localExternal, "172.20.0.0/16"))
			copied := answered(configOf(alpha, "10.64.0.0/18", "10.65.0.0/20", "192.0.2.2", 2),
				nat(remotePod, "10.66.64.0/18"), nat(remoteExternal, "10.67.16.0/20"))
			copied.Spec.BackendConfig["more"] = "than Liqo knows"
			copied.Spec.BackendConfig["tunnels"] = "5872:" + keyText(3)
			original.Spec.BackendConfig["tunnels"] = "5872:" + keyText(5) + ",5873:" + keyText(6) // our own tunnels, which the result must not contain
			got, problems := TunnelEndpointFor(original, copied, bravo)
			wantTexts(t, problems)
			want := v1alpha1.TunnelEndpointSpec{
				ClusterIdentity:       bravo,
				LocalPodCIDR:          "10.240.0.0/14",
				LocalNATPodCIDR:       nat(localPod, "172.16.0.0/14"),
				LocalExternalCIDR:     "10.100.0.0/16",
				LocalNATExternalCIDR:  nat(localExternal, "172.20.0.0/16"),
				RemotePodCIDR:         "10.64.0.0/18",
				RemoteNATPodCIDR:      nat(remotePod, "10.66.64.0/18"),
				RemoteExternalCIDR:    "10.65.0.0/20",
				RemoteNATExternalCIDR: nat(remoteExternal, "10.67.16.0/20"),
				EndpointIP:            "192.0.2.2",
				BackendType:           "wireguard",
				BackendConfig:         v1alpha1.BackendConfig{"port": "5871", "publicKey": keyText(2), "tunnels": "5872:" + keyText(3)},
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
		})
	}
}

func TestTunnelEndpointForRefusesInvalidAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		change func(original, copied *v1alpha1.NetworkConfig)
		want   []string
	}{
		"not answered by the peer": {func(original, _ *v1alpha1.NetworkConfig) { original.Status = v1alpha1.NetworkConfigStatus{} },
			[]string{"NetworkConfig tenant/bravo-924e89: status.processed: is false; want true: the peer has not answered yet"}},
		"not answered by us": {func(_, copied *v1alpha1.NetworkConfig) { copied.Status.Processed = false },
			[]string{"NetworkConfig tenant/alpha-9d9b8a: status.processed: is false; want true: this cluster has not answered yet"}},
		"addressed to another cluster": {func(original, _ *v1alpha1.NetworkConfig) { original.Spec.RemoteCluster.ClusterID = idC },
			[]string{`NetworkConfig tenant/bravo-924e89: spec.cluster.clusterID: is "` + idC + `"; want "` + idB + `", the ID of the peer`}},
		"answer of another length": {func(original, _ *v1alpha1.NetworkConfig) { original.Status.PodCIDRNAT = "10.250.0.0/24" },
			[]string{"NetworkConfig tenant/bravo-924e89: status.podCIDRNAT: 10.250.0.0/24 differs in length from our PodCIDR, 10.244.0.0/16; want a /16"}},
		"answer of another family": {func(original, _ *v1alpha1.NetworkConfig) { original.Status.ExternalCIDRNAT = "fd00::/16" },
			[]string{"NetworkConfig tenant/bravo-924e89: status.externalCIDRNAT: fd00::/16 is IPv6, but our ExternalCIDR is 10.245.0.0/16; want a network of the same family"}},
		"answer for only one network": {func(original, _ *v1alpha1.NetworkConfig) { original.Status.ExternalCIDRNAT = "" },
			[]string{"NetworkConfig tenant/bravo-924e89: status.externalCIDRNAT: is empty; want a CIDR or \"None\""}},
		"answer that is loopback": {func(original, _ *v1alpha1.NetworkConfig) { original.Status.PodCIDRNAT = "127.0.0.0/16" },
			[]string{"NetworkConfig tenant/bravo-924e89: status.podCIDRNAT: 127.0.0.0/16 overlaps 127.0.0.0/8 (loopback); want a network that pods can have"}},
		"one network for both of ours": {func(original, _ *v1alpha1.NetworkConfig) {
			original.Status.PodCIDRNAT, original.Status.ExternalCIDRNAT = "10.9.0.0/16", "10.9.0.0/16"
		}, []string{"NetworkConfig tenant/bravo-924e89: status.externalCIDRNAT: 10.9.0.0/16 overlaps our PodCIDR as the peer uses it, 10.9.0.0/16; want networks that do not overlap"}},
		"the peer's pods remapped onto ours": {func(_, copied *v1alpha1.NetworkConfig) { copied.Status.PodCIDRNAT = "None" },
			[]string{"NetworkConfig tenant/alpha-9d9b8a: spec.podCIDR: 10.244.0.0/18 overlaps our PodCIDR, 10.244.0.0/16; want networks that do not overlap"}},
		"no key": {func(_, copied *v1alpha1.NetworkConfig) { copied.Spec.BackendConfig = nil },
			[]string{
				"NetworkConfig tenant/alpha-9d9b8a: spec.backend_config.port: is absent; want a UDP port from 1 to 65535",
				"NetworkConfig tenant/alpha-9d9b8a: spec.backend_config.publicKey: is absent; want a WireGuard public key in base64"}},
		"a gateway behind its own tunnel": {func(_, copied *v1alpha1.NetworkConfig) { copied.Spec.EndpointIP = "10.246.0.9" },
			[]string{"NetworkConfig tenant/alpha-9d9b8a: spec.endpointIP: 10.246.0.9 is inside 10.246.0.0/18 (the peer's PodCIDR as used here), " +
				"which is reached through the tunnel itself; want an address outside"}},
	} {
		t.Run(name, func(t *testing.T) {
			original := answered(configOf(bravo, "10.244.0.0/16", "10.245.0.0/16", "198.51.100.1", 1), "10.9.0.0/16", "None")
			copied := answered(fromBravo(), "10.246.0.0/18", "10.246.64.0/18")
			if _, problems := TunnelEndpointFor(original, copied, bravo); problems != nil {
				t.Fatal(problems)
			}
			c.change(original, copied)
			spec, problems := TunnelEndpointFor(original, copied, bravo)
			wantTexts(t, problems, c.want...)
			if !reflect.DeepEqual(spec, v1alpha1.TunnelEndpointSpec{}) {
				t.Errorf("a TunnelEndpoint with problems: %+v", spec)
			}
		})
	}
}

func TestSeenByReadsAnAnswer(t *testing.T) {
	nc := answered(fromBravo(), "10.246.0.0/18", "None")
	if pod, external, ok := SeenBy(nc); !ok || pod != pfx("10.246.0.0/18") || external != pfx("10.245.0.0/18") {
		t.Errorf("got %v, %v, %v", pod, external, ok)
	}
	for _, status := range []v1alpha1.NetworkConfigStatus{
		{PodCIDRNAT: "None", ExternalCIDRNAT: "None"},
		{Processed: true},
		{Processed: true, PodCIDRNAT: "10.246.0.0/16", ExternalCIDRNAT: "None"},
		{Processed: true, PodCIDRNAT: "10.246.0.1/18", ExternalCIDRNAT: "None"},
		{Processed: true, PodCIDRNAT: "10.246.0.0/18", ExternalCIDRNAT: "10.246.0.0/18"},
		{Processed: true, PodCIDRNAT: "none", ExternalCIDRNAT: "None"},
	} {
		nc.Status = status
		if pod, external, ok := SeenBy(nc); ok || pod.IsValid() || external.IsValid() {
			t.Errorf("%+v: got %v, %v", status, pod, external)
		}
	}
}

// For two honest clusters with any networks and answers, the remote networks of each are the local
// networks of the other.
func TestTunnelEndpointsOfBothClustersMirrorEachOther(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 5_000 {
		a, b := randomSide(rng, 0), randomSide(rng, 1)
		fromA := configOf(bravo, a.pod.String(), a.external.String(), "198.51.100.1", 1)
		fromB := configOf(alpha, b.pod.String(), b.external.String(), "192.0.2.2", 2)
		for _, side := range []struct {
			nc       *v1alpha1.NetworkConfig
			receiver side
		}{{fromA, b}, {fromB, a}} {
			claim, problems := ClaimFrom(side.nc, Origin{})
			wantTexts(t, problems)
			pod, external := side.receiver.allocate(claim)
			podNAT, externalNAT := AnswerFor(claim, pod, external)
			answered(side.nc, podNAT, externalNAT)
			if gotPod, gotExternal, ok := SeenBy(side.nc); !ok || gotPod != pod || gotExternal != external {
				t.Fatalf("%v, %v were answered as %+v and read as %v, %v", pod, external, side.nc.Status, gotPod, gotExternal)
			}
		}
		atA, problems := TunnelEndpointFor(fromA, fromB, bravo)
		wantTexts(t, problems)
		atB, problems := TunnelEndpointFor(fromB, fromA, alpha)
		wantTexts(t, problems)
		if mirror(atA) != locals(atB) || mirror(atB) != locals(atA) {
			t.Fatalf("at A %+v\nat B %+v", atA, atB)
		}
	}
}

// side is an honest cluster. It remaps into networks of 172.0.0.0/8 or 173.0.0.0/8.
type side struct {
	number        int
	pod, external netip.Prefix
}

// randomSide uses networks of 10.0.0.0/9, so that the networks of two sides often overlap.
func randomSide(rng *rand.Rand, number int) side {
	inside := func(net string) netip.Prefix {
		p := pfx(net)
		bits := p.Bits() + 1 + rng.IntN(12)
		octets := p.Addr().As4()
		octets[1] |= byte(rng.IntN(4)) // few choices, so that networks often collide
		return netip.PrefixFrom(netip.AddrFrom4(octets), bits).Masked()
	}
	return side{number, inside("10.0.0.0/10"), inside("10.64.0.0/10")}
}

// allocate remaps all networks that overlap our own, and sometimes other networks.
func (s side) allocate(c Claim) (pod, external netip.Prefix) {
	remap := func(p netip.Prefix, second byte) netip.Prefix {
		if !p.Overlaps(s.pod) && !p.Overlaps(s.external) {
			return p
		}
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(172 + s.number), second, 0, 0}), p.Bits()).Masked()
	}
	return remap(c.Pod, 0), remap(c.External, 128)
}

type networkTexts [4]string

func mirror(s v1alpha1.TunnelEndpointSpec) networkTexts {
	return networkTexts{s.RemotePodCIDR, s.RemoteNATPodCIDR, s.RemoteExternalCIDR, s.RemoteNATExternalCIDR}
}

func locals(s v1alpha1.TunnelEndpointSpec) networkTexts {
	return networkTexts{s.LocalPodCIDR, s.LocalNATPodCIDR, s.LocalExternalCIDR, s.LocalNATExternalCIDR}
}

// For any NetworkConfig of a peer, the result is a list of problems, or a TunnelEndpoint that
// gateways accept.
func FuzzExchange(f *testing.F) {
	f.Add("10.244.0.0/16", "10.245.0.0/16", "192.0.2.2", "5871", keyText(2), "5872:"+keyText(3)+",1:"+keyText(4), "10.246.0.0/16", "None", "172.16.0.0/16", "None")
	f.Add("0.0.0.0/0", "::/0", "localhost", "-1", keyText(0), "", "", "none", "10.244.0.0/16", "10.244.0.0/16")
	f.Add("10.0.0.0/8", "fd00::/48", "fe80::1%eth0", "65536", "", "5871:"+keyText(0), "None", "None", "None", "None")
	f.Fuzz(func(t *testing.T, pod, external, endpoint, port, key, tunnels, podSeen, externalSeen, podAnswer, externalAnswer string) {
		copied := configOf(alpha, pod, external, endpoint, 2)
		copied.Spec.BackendConfig = v1alpha1.BackendConfig{v1alpha1.ConfigPort: port, v1alpha1.ConfigPublicKey: key}
		if tunnels != "" {
			copied.Spec.BackendConfig[v1alpha1.ConfigTunnels] = tunnels
		}
		answered(copied, podAnswer, externalAnswer)
		original := answered(configOf(bravo, "10.244.0.0/16", "10.245.0.0/16", "198.51.100.1", 1), podSeen, externalSeen)

		claim, problems := ClaimFrom(copied, Origin{})
		if reflect.DeepEqual(claim, Claim{}) != (len(problems) > 0) {
			t.Fatalf("%+v and %v", claim, problems)
		}
		receiver := Receiver{PublicKey: keyOf(1), Pod: pfx("10.244.0.0/16"), Nodes: []netip.Addr{ip("172.30.0.1")}, Endpoint: "198.51.100.1", Port: 5871}
		refusals := CheckClaim(claim, receiver, Neighbours{})

		spec, problems := TunnelEndpointFor(original, copied, bravo)
		if len(problems) > 0 {
			return
		}
		peer, problems := PeerFrom(&v1alpha1.TunnelEndpoint{Spec: spec}, originB)
		if len(problems) > 0 {
			t.Fatalf("PeerFrom refuses %+v: %v", spec, problems)
		}
		if reflect.DeepEqual(claim, Claim{}) {
			t.Fatalf("a TunnelEndpoint from an invalid claim: %+v", spec)
		}
		if len(refusals) > 0 {
			return
		}
		if _, problems := GatewayFor(Intent{ClusterID: idA, PublicKey: keyOf(1), Peers: []Peer{peer}}); len(problems) > 0 {
			t.Fatalf("GatewayFor refuses %+v: %v", spec, problems)
		}
	})
}
