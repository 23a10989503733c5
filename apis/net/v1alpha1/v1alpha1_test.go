package v1alpha1_test

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

func goldens(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden documents: %v", err)
	}
	return files
}

func scheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	s := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(s); err != nil {
		t.Fatal(err)
	}
	return s
}

// decode reads a document strictly: unknown and duplicate fields are errors.
func decode(t *testing.T, text []byte) runtime.Object {
	t.Helper()
	codecs := serializer.NewCodecFactory(scheme(t), serializer.EnableStrict)
	obj, _, err := codecs.UniversalDeserializer().Decode(text, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return obj
}

// The documents in testdata are output of `kubectl get -o yaml` from Liqo v0.9.4. The Go types must
// not lose, add or respell anything.
func TestGoldenDocumentsRoundTripUnchanged(t *testing.T) {
	kinds := map[string]bool{}
	for _, file := range goldens(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			obj := decode(t, text)
			kinds[obj.GetObjectKind().GroupVersionKind().Kind] = true
			out, err := yaml.Marshal(obj)
			if err != nil {
				t.Fatal(err)
			}
			if string(out) != string(text) {
				t.Errorf("came out as\n%s", out)
			}
		})
	}
	for _, kind := range []string{"NetworkConfig", "TunnelEndpoint", "NatMapping", "IpamStorage"} {
		if !kinds[kind] {
			t.Errorf("no golden document for %s", kind)
		}
	}
}

func TestGoldenDocumentsRoundTripThroughUnstructured(t *testing.T) {
	for _, file := range goldens(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var want map[string]any
			if err := yaml.Unmarshal(text, &want); err != nil {
				t.Fatal(err)
			}
			content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(decode(t, text))
			if err != nil {
				t.Fatal(err)
			}
			out, err := json.Marshal(content)
			if err != nil {
				t.Fatal(err)
			}
			var have map[string]any
			if err := json.Unmarshal(out, &have); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(have, want) {
				t.Errorf("came out as\n%s", out)
			}
		})
	}
}

func TestDeepCopyIsEqualAndSharesNothing(t *testing.T) {
	for _, file := range goldens(t) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		obj := decode(t, text)
		dup := obj.DeepCopyObject()
		if !reflect.DeepEqual(obj, dup) {
			t.Fatalf("%s: the copy differs", file)
		}
		scribble(reflect.ValueOf(dup).Elem())
		if !reflect.DeepEqual(obj, decode(t, text)) {
			t.Errorf("%s: writing to the copy changed the original", file)
		}
	}
}

// scribble overwrites all memory that a copy could share with its original: elements of maps and
// slices, and targets of pointers.
func scribble(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				scribble(v.Field(i))
			}
		}
	case reflect.Pointer:
		if !v.IsNil() {
			v.Elem().SetZero()
		}
	case reflect.Slice:
		for i := range v.Len() {
			scribble(v.Index(i))
			v.Index(i).SetZero()
		}
	case reflect.Map:
		for _, k := range v.MapKeys() {
			if e := v.MapIndex(k); e.Kind() == reflect.Slice || e.Kind() == reflect.Struct {
				dup := reflect.New(e.Type()).Elem()
				dup.Set(e)
				scribble(dup)
			}
			v.SetMapIndex(k, reflect.Value{})
		}
	}
}

// A Liqo gateway rejects a TunnelEndpoint whose NAT fields are empty. If nobody set them, they are
// still written, so that the fault shows.
func TestFieldsThatLiqoNeverOmitsAreWrittenWhenEmpty(t *testing.T) {
	for want, obj := range map[string]any{
		`"status":{"processed":false,"conditions"`: v1alpha1.NetworkConfig{Status: v1alpha1.NetworkConfigStatus{Conditions: []metav1.Condition{{}}}},
		`"localNATPodCIDR":""`:                     v1alpha1.TunnelEndpoint{},
		`"clusterMappings":{}`:                     v1alpha1.NatMapping{Spec: v1alpha1.NatMappingSpec{ClusterMappings: v1alpha1.EndpointMap{}}},
	} {
		if out, err := json.Marshal(obj); err != nil || !strings.Contains(string(out), want) {
			t.Errorf("want %s in %s (%v)", want, out, err)
		}
	}
}

// Liqo's client writes null for a measurement that was never made.
func TestNullTimestampIsReadAsAbsent(t *testing.T) {
	te := decode(t, []byte(`{"apiVersion":"net.liqo.io/v1alpha1","kind":"TunnelEndpoint","metadata":{"creationTimestamp":null},
		"status":{"connection":{"latency":{"timestamp":null}}}}`)).(*v1alpha1.TunnelEndpoint)
	if te.Status.Connection.Latency.Timestamp != nil {
		t.Errorf("timestamp is %v", te.Status.Connection.Latency.Timestamp)
	}
}

func TestGoldenDocumentsUseTheConstants(t *testing.T) {
	read := func(file string) runtime.Object {
		text, err := os.ReadFile("testdata/" + file + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		return decode(t, text)
	}
	const bravo, alpha = "bbbbbbbb-2222-4222-8222-222222222222", "aaaaaaaa-1111-4111-8111-111111111111"
	local := read("networkconfig-local").(*v1alpha1.NetworkConfig)
	remote := read("networkconfig-remote").(*v1alpha1.NetworkConfig)
	te := read("tunnelendpoint-connected").(*v1alpha1.TunnelEndpoint)
	nm := read("natmapping").(*v1alpha1.NatMapping)
	ipam := read("ipamstorage").(*v1alpha1.IpamStorage)
	for _, c := range []struct {
		what       string
		have, want any
	}{
		{"labels of the original", local.Labels, map[string]string{
			v1alpha1.LabelReplication: "true", v1alpha1.LabelRemoteID: bravo, v1alpha1.LabelOwnership: v1alpha1.OwnershipNetworkConfigCreator}},
		{"labels of the copy", remote.Labels, map[string]string{
			v1alpha1.LabelReplication: "false", v1alpha1.LabelReplicated: "true", v1alpha1.LabelRemoteID: alpha, v1alpha1.LabelOriginID: bravo}},
		{"labels of the TunnelEndpoint", te.Labels, map[string]string{v1alpha1.LabelClusterID: bravo}},
		{"labels of the NatMapping", nm.Labels, map[string]string{v1alpha1.LabelClusterID: bravo, v1alpha1.LabelNatMapping: "true"}},
		{"labels of the IpamStorage", ipam.Labels, map[string]string{v1alpha1.LabelIpamStorage: "true"}},
		{"finalizers of the original", local.Finalizers, []string{v1alpha1.FinalizerReplicator, v1alpha1.FinalizerTunnelEndpointCreator}},
		{"finalizers of the TunnelEndpoint", te.Finalizers, []string{
			v1alpha1.FinalizerGateway, "liqo-route.172.30.0.1.net.liqo.io", "liqo-route.172.30.0.2.net.liqo.io"}},
		{"answer", remote.Status.PodCIDRNAT, v1alpha1.None},
		{"connection", te.Status.Connection.Status, v1alpha1.Connected},
		{"message", te.Status.Connection.StatusMessage, v1alpha1.ConnectedMessage},
		{"allowed IPs", te.Status.Connection.PeerConfiguration[v1alpha1.ConfigAllowedIPs], "10.246.0.0/16, 10.247.0.0/16"},
		{"backend", te.Spec.BackendType, v1alpha1.BackendWireGuard},
		{"port", te.Spec.BackendConfig[v1alpha1.ConfigPort], "5871"},
	} {
		if !reflect.DeepEqual(c.have, c.want) {
			t.Errorf("%s: have %v, want %v", c.what, c.have, c.want)
		}
	}
	sum := sha256.Sum256([]byte(bravo))
	if want := "bravo-" + hex.EncodeToString(sum[:])[:6]; local.Name != want || te.Name != want {
		t.Errorf("names are %s and %s, want %s", local.Name, te.Name, want)
	}
}
