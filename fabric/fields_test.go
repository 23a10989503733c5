package fabric

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// specFields has a row for each field of a TunnelEndpoint's spec. A new field needs a row, and the
// tests below then report each function that does not handle it: PeerFrom or specOf if its value is
// lost, Peer.check if it accepts any value, GatewayFor if a change of the value has no effect.
var specFields = map[string]struct{ other, wrong string }{
	"spec.clusterIdentity.clusterID":   {"other", "-"},
	"spec.clusterIdentity.clusterName": {"other", "\x1b"},
	"spec.localPodCIDR":                {"10.16.0.0/16", "10.16.0.1/16"},
	"spec.localNATPodCIDR":             {"10.17.0.0/16", "10.17.0.0/24"},
	"spec.localExternalCIDR":           {"10.18.0.0/16", "ten"},
	"spec.localNATExternalCIDR":        {"10.19.0.0/16", ""},
	"spec.remotePodCIDR":               {"10.20.0.0/16", "0.0.0.0/0"},
	"spec.remoteNATPodCIDR":            {"10.21.0.0/16", "none"},
	"spec.remoteExternalCIDR":          {"10.22.0.0/16", "224.0.0.0/16"},
	"spec.remoteNATExternalCIDR":       {"10.23.0.0/16", "127.0.0.0/16"},
	"spec.endpointIP":                  {"gw.example.com", "localhost"},
	"spec.backendType":                 {"", "vxlan"}, // there is no other valid value
	"spec.backend_config.port":         {"5873", "0"},
	"spec.backend_config.publicKey":    {keyText(40), "AAAA"},
	"spec.backend_config.tunnels":      {"5900:" + keyText(41), "5900"},
}

// eachString calls f for each string in a struct, in nested structs and in maps: with its path, its
// value and a function that sets it.
func eachString(t *testing.T, path string, v reflect.Value, f func(path, value string, set func(string))) {
	t.Helper()
	switch v.Kind() {
	case reflect.String:
		f(path, v.String(), v.SetString)
	case reflect.Struct:
		for i := range v.NumField() {
			name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
			eachString(t, path+"."+name, v.Field(i), f)
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			f(path+"."+key.String(), v.MapIndex(key).String(), func(s string) { v.SetMapIndex(key, reflect.ValueOf(s)) })
		}
	default:
		t.Fatalf("%s is of type %v, which this test does not know", path, v.Type())
	}
}

func fullEndpoint() *v1alpha1.TunnelEndpoint {
	te := endpointB()
	te.Spec.BackendConfig[v1alpha1.ConfigTunnels] = "5872:" + keyText(30)
	return te
}

func TestEachFieldOfATunnelEndpointIsConvertedCheckedAndCompared(t *testing.T) {
	base, problems := PeerFrom(fullEndpoint(), originB)
	wantTexts(t, problems)
	if spec := specOf(base); !reflect.DeepEqual(spec, fullEndpoint().Spec) {
		t.Fatalf("read and written again:\n got %+v\nwant %+v; want each field in PeerFrom and in specOf", spec, fullEndpoint().Spec)
	}
	gateway, problems := GatewayFor(Intent{ClusterID: idA, Peers: []Peer{base}})
	wantTexts(t, problems)

	missing := maps.Clone(specFields)
	eachString(t, "spec", reflect.ValueOf(&fullEndpoint().Spec).Elem(), func(path, _ string, _ func(string)) {
		row, ok := specFields[path]
		if !ok {
			t.Errorf("%s has no row in specFields; want one, and then a fix of everything that this test reports", path)
			return
		}
		delete(missing, path)
		with := func(value string) *v1alpha1.TunnelEndpoint {
			te := fullEndpoint()
			eachString(t, "spec", reflect.ValueOf(&te.Spec).Elem(), func(p, _ string, set func(string)) {
				if p == path {
					set(value)
				}
			})
			return te
		}
		if _, problems := PeerFrom(with(row.wrong), originB); !slices.ContainsFunc(problems, func(p Problem) bool { return p.Field == path && p.Origin == originB }) {
			t.Errorf("%s: %q is taken (problems %v); want a problem of this field, from Peer.check or from reading it", path, row.wrong, problems)
		}
		if row.other == "" {
			return
		}
		changed := with(row.other)
		peer, problems := PeerFrom(changed, originB)
		if len(problems) > 0 {
			t.Errorf("%s: %q: %v", path, row.other, problems)
			return
		}
		if spec := specOf(peer); !reflect.DeepEqual(spec, changed.Spec) {
			t.Errorf("%s is lost between reading and writing; want it in PeerFrom and in specOf:\n got %+v\nwant %+v", path, spec, changed.Spec)
		}
		if other, _ := GatewayFor(Intent{ClusterID: idA, Peers: []Peer{peer}}); reflect.DeepEqual(other, gateway) {
			t.Errorf("a change of %s does not change the Gateway, so no gateway would apply it; want it in GatewayPeer", path)
		}
	})
	for path := range missing {
		t.Errorf("%s has a row and is no field", path)
	}
}

func TestTunnelEndpointForSetsEachField(t *testing.T) {
	original := answered(configOf(bravo, "10.244.0.0/16", "10.245.0.0/16", "198.51.100.1", 1), "10.9.0.0/16", "None")
	copied := answered(fromBravo(), "10.246.0.0/18", "10.246.64.0/18")
	copied.Spec.BackendConfig[v1alpha1.ConfigTunnels] = "5872:" + keyText(3)
	spec, problems := TunnelEndpointFor(original, copied, bravo)
	wantTexts(t, problems)
	set := 0
	eachString(t, "spec", reflect.ValueOf(&spec).Elem(), func(path, value string, _ func(string)) {
		if set++; value == "" {
			t.Errorf("%s is empty; want TunnelEndpointFor to set it", path)
		}
	})
	if set != len(specFields) {
		t.Errorf("%d fields, want %d", set, len(specFields))
	}
}

func TestANetworkConfigRoundTrips(t *testing.T) {
	want := claimBravo
	want.Tunnels = []TunnelEnd{{keyOf(3), 5872}, {keyOf(4), 1}}
	spec := NetworkConfigFor(want, alpha)
	eachString(t, "spec", reflect.ValueOf(&spec).Elem(), func(path, value string, _ func(string)) {
		if value == "" {
			t.Errorf("%s is empty; want NetworkConfigFor to set it", path)
		}
	})
	got, problems := ClaimFrom(&v1alpha1.NetworkConfig{Spec: spec}, Origin{})
	wantTexts(t, problems)
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}
