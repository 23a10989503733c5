package v1alpha1

import (
	"reflect"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// If Equal ignored a field, a change of that field would never reach a peer.
func TestEqualComparesEachFieldOfAnExportedService(t *testing.T) {
	for f := range reflect.TypeFor[ExportedService]().Fields() {
		if f.Name == "Subsets" {
			continue
		}
		var a, b ExportedService
		fill(t, reflect.ValueOf(&b).Elem().FieldByIndex(f.Index))
		differ(t, f.Name, a, b)
	}
	for f := range reflect.TypeFor[EndpointSubset]().Fields() {
		a := ExportedService{Subsets: make([]EndpointSubset, 1)}
		b := ExportedService{Subsets: make([]EndpointSubset, 1)}
		fill(t, reflect.ValueOf(&b.Subsets[0]).Elem().FieldByIndex(f.Index))
		differ(t, "Subsets."+f.Name, a, b)
	}
	if (PeerServicesSpec{Services: make([]ExportedService, 1)}).Equal(PeerServicesSpec{}) {
		t.Error("one service is none")
	}
}

func differ(t *testing.T, what string, a, b ExportedService) {
	t.Helper()
	if !b.Equal(b.DeepCopy()) {
		t.Errorf("%s: a copy differs", what)
	}
	if a.Equal(&b) || b.Equal(&a) {
		t.Errorf("%s does not count", what)
	}
}

// fill sets a field to a value other than its zero value.
func fill(t *testing.T, v reflect.Value) {
	t.Helper()
	switch {
	case v.Type() == reflect.TypeFor[metav1.Time]():
		v.Set(reflect.ValueOf(metav1.NewTime(time.Unix(1, 0))))
	case v.Kind() == reflect.String:
		v.SetString("x")
	case v.CanInt():
		v.SetInt(1)
	case v.Kind() == reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	case v.Kind() == reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf("k"), reflect.New(v.Type().Elem()).Elem())
	default:
		t.Fatalf("a field of type %v", v.Type())
	}
}
