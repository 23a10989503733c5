package kube

import (
	"net/netip"
	"reflect"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// notOurs has the fields of a TunnelEndpoint's status that no gateway writes, each with the reason.
var notOurs = map[string]string{
	"TunnelIFaceIndex": "Liqo never writes it",
	"TunnelIFaceName":  "Liqo never writes it",
}

// statusFields calls f for each field of the status and of the structs in it.
func statusFields(path string, v reflect.Value, f func(path string, v reflect.Value)) {
	for i := range v.NumField() {
		field, name := v.Field(i), path+v.Type().Field(i).Name
		if field.Kind() == reflect.Struct {
			statusFields(name+".", field, f)
		} else {
			f(name, field)
		}
	}
}

// statusFor must write every field of the status, with any old value, unless notOurs lists the
// field. So a new field fails this test until statusFor writes it or notOurs lists it.
func TestEachFieldOfTheStatusIsWrittenAndCorrected(t *testing.T) {
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	te := endpoint(1)
	report := Report{Interface: "isthmus.host", Index: 7, NextHop: netip.MustParseAddr("169.254.100.1")}
	peer := PeerReport{ID: "id-1", Status: v1alpha1.Connected, Message: v1alpha1.ConnectedMessage, RTT: 7 * time.Millisecond,
		Endpoint: netip.MustParseAddrPort("192.0.2.9:5871"), PublicKey: "key",
		AllowedIPs: [2]netip.Prefix{netip.MustParsePrefix("10.101.0.0/20"), netip.MustParsePrefix("10.101.128.0/22")}}
	write := func(over v1alpha1.TunnelEndpointStatus) v1alpha1.TunnelEndpointStatus {
		te.Status = over
		return statusFor(&te, netip.MustParseAddr("172.30.1.11"), report, peer, now)
	}
	want := write(v1alpha1.TunnelEndpointStatus{})
	statusFields("", reflect.ValueOf(&want).Elem(), func(path string, v reflect.Value) {
		if empty, reason := v.IsZero(), notOurs[path]; empty != (reason != "") {
			t.Errorf("%s is %v; want statusFor to write it, or a reason in notOurs why not (now %q)", path, v, reason)
		}
	})
	statusFields("", reflect.ValueOf(&want).Elem(), func(path string, _ reflect.Value) {
		if notOurs[path] != "" {
			return
		}
		spoilt := *want.DeepCopy()
		statusFields("", reflect.ValueOf(&spoilt).Elem(), func(p string, v reflect.Value) {
			if p == path {
				v.SetZero()
			}
		})
		if equality.Semantic.DeepEqual(spoilt, want) {
			t.Errorf("without %s nothing differs, so that nobody would write it", path)
		}
		got := write(spoilt)
		for i := range got.Conditions {
			got.Conditions[i].LastTransitionTime = metav1.Time{}
		}
		wanted := *want.DeepCopy()
		for i := range wanted.Conditions {
			wanted.Conditions[i].LastTransitionTime = metav1.Time{}
		}
		if !equality.Semantic.DeepEqual(got, wanted) {
			t.Errorf("%s is not corrected:\n got %+v\nwant %+v", path, got, wanted)
		}
	})
}
