package exchange

import (
	"encoding/base64"
	"maps"
	"net/netip"
	"strings"
	"testing"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/managertest"
	"github.com/isthmus-net/isthmus/manager/peers"
)

var bravo = v1alpha1.ClusterIdentity{ClusterID: "bbbbbbbb-2222-4222-8222-222222222222", ClusterName: "bravo"}

func TestNetworkConfigHasTheClustersValuesUnlessOverridden(t *testing.T) {
	key, err := base64.StdEncoding.DecodeString(managertest.SomeKey)
	if err != nil {
		t.Fatal(err)
	}
	all := facts.Facts{
		PodCIDR: netip.MustParsePrefix("10.1.0.0/18"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"), ExternalCIDR: netip.MustParsePrefix("10.2.0.0/18"),
		Endpoint: "192.0.2.1", Port: 31871, PublicKey: [32]byte(key),
	}
	two := func(f *facts.Facts) {
		f.Tunnels = []fabric.TunnelEnd{{PublicKey: managertest.Key(2), Port: 31900}, {PublicKey: managertest.Key(3), Port: 31899}}
	}
	address := "vpn.example.org"
	for _, c := range []struct {
		name           string
		change         func(*facts.Facts)
		overrides      isthmus.Overrides
		endpoint, port string
		tunnels        string
		problem        string
	}{
		{"no overrides", func(*facts.Facts) {}, isthmus.Overrides{}, "192.0.2.1", "31871", "", ""},
		{"with three tunnels", two, isthmus.Overrides{}, "192.0.2.1", "31871", "31900:" + managertest.KeyText(2) + ",31899:" + managertest.KeyText(3), ""},
		{"the port of three tunnels overridden", two, isthmus.Overrides{Port: 443}, "192.0.2.1", "443", "444:" + managertest.KeyText(2) + ",445:" + managertest.KeyText(3), ""},
		{"the last port but one for three tunnels", two, isthmus.Overrides{Port: 65534}, "192.0.2.1", "65534", "65535:" + managertest.KeyText(2), ""},
		{"the last port for three tunnels", two, isthmus.Overrides{Port: 65535}, "192.0.2.1", "65535", "", ""},
		{"address overridden", func(*facts.Facts) {}, isthmus.Overrides{Address: &address}, address, "31871", "", ""},
		{"port overridden", func(*facts.Facts) {}, isthmus.Overrides{Port: 443}, "192.0.2.1", "443", "", ""},
		{"overrides replace an unknown endpoint and port", func(f *facts.Facts) { f.Endpoint, f.Port, f.NoEndpoint = "", 0, "no Service" },
			isthmus.Overrides{Address: &address, Port: 443}, address, "443", "", ""},
		{"an address override does not replace an unknown port", func(f *facts.Facts) { f.Endpoint, f.Port, f.NoEndpoint = "", 0, "no Service" },
			isthmus.Overrides{Address: &address}, "", "", "", "no Service"},
		{"unknown PodCIDR", func(f *facts.Facts) { f.Missing = []string{"PodCIDR: set --pod-cidr"} }, isthmus.Overrides{}, "", "", "", "set --pod-cidr"},
		{"loopback address", func(f *facts.Facts) { f.Endpoint = "127.0.0.1" }, isthmus.Overrides{}, "", "", "", "spec.endpointIP"},
	} {
		t.Run(c.name, func(t *testing.T) {
			facts := all
			c.change(&facts)
			spec, problems := NetworkConfigFor(facts, peers.Peer{Cluster: bravo, Overrides: c.overrides})
			if text := strings.Join(problems, "\n"); (text == "") != (c.problem == "") || !strings.Contains(text, c.problem) {
				t.Fatalf("problems %q, want %q", text, c.problem)
			}
			if c.problem != "" {
				return
			}
			want := v1alpha1.NetworkConfigSpec{
				RemoteCluster: bravo, PodCIDR: "10.1.0.0/18", ExternalCIDR: "10.2.0.0/18", EndpointIP: c.endpoint, BackendType: "wireguard",
			}
			got := spec.BackendConfig
			spec.BackendConfig = nil
			if spec.RemoteCluster != want.RemoteCluster || spec.PodCIDR != want.PodCIDR || spec.ExternalCIDR != want.ExternalCIDR ||
				spec.EndpointIP != want.EndpointIP || spec.BackendType != want.BackendType {
				t.Errorf("got %+v\nwant %+v", spec, want)
			}
			wantBackend := v1alpha1.BackendConfig{"publicKey": managertest.SomeKey, "port": c.port}
			if c.tunnels != "" {
				wantBackend["tunnels"] = c.tunnels
			}
			if !maps.Equal(got, wantBackend) {
				t.Errorf("backend_config is %v, want %v", got, wantBackend)
			}
		})
	}
}

// While an answer to our previous networks is being withdrawn, readers ignore it.
func TestAnswerToPreviousNetworksIsIgnored(t *testing.T) {
	nc := &v1alpha1.NetworkConfig{Status: v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: v1alpha1.None, ExternalCIDRNAT: v1alpha1.None}}
	nc.Annotations = map[string]string{isthmus.AnnotationUnanswered: "true"}
	if got := withoutOldAnswer(nc); got.Status.Processed || !nc.Status.Processed {
		t.Errorf("believed: %+v of %+v", got.Status, nc.Status)
	}
}
