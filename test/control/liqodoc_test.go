package control

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"testing"

	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// manifests returns the files that docs/liqo.md shows, by name.
func manifests(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../docs/liqo.md")
	if err != nil {
		t.Fatal(err)
	}
	files := make(map[string]string)
	files["end.json"] = string(regexp.MustCompile(`--subresource=status --type=merge -p '(.*)'`).FindSubmatch(text)[1])
	for _, m := range regexp.MustCompile("(?s)```yaml\n# ([a-z-]+[.]yaml)\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		files[m[1]] = m[2]
	}
	if got := slices.Sorted(maps.Keys(files)); !slices.Equal(got, []string{"at-liqo.yaml", "begin.yaml", "end.json", "here.yaml"}) {
		t.Fatalf("docs/liqo.md has the files %v", got)
	}
	return files
}

// parsed returns the objects in a file, after envsubst.
func parsed(t *testing.T, file string, env map[string]string) (all []*unstructured.Unstructured) {
	t.Helper()
	text := os.Expand(file, func(name string) string {
		value, ok := env[name]
		if !ok {
			t.Fatalf("docs/liqo.md does not say what $%s is", name)
		}
		return value
	})
	for _, one := range bytes.Split([]byte(text), []byte("\n---\n")) {
		u := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict(one, &u.Object); err != nil {
			t.Fatalf("%v\n%s", err, one)
		}
		all = append(all, u)
	}
	return all
}

// apply applies objects as kubectl apply does, and also applies the status of an object.
func (s *site) apply(objects []*unstructured.Unstructured) {
	s.t.Helper()
	for _, o := range objects {
		status := o.Object["status"]
		if err := s.client.Create(s.t.Context(), o); err != nil {
			s.t.Fatalf("%s: %s %s: %v", s.name, o.GetKind(), o.GetName(), err)
		}
		if status == nil {
			continue
		}
		s.eventually("status of "+o.GetKind(), func() (string, bool) {
			if err := s.client.Get(s.t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
				return err.Error(), false
			}
			o.Object["status"] = status
			err := s.client.Status().Update(s.t.Context(), o) // may conflict with a write of the replicator's finalizer
			return fmt.Sprint(err), err == nil
		})
	}
}

// remove deletes objects as kubectl delete does, and waits until they are gone.
func (s *site) remove(objects ...*unstructured.Unstructured) {
	s.t.Helper()
	for _, o := range slices.Backward(objects) {
		s.eventually("an end of "+o.GetKind()+" "+o.GetName(), func() (string, bool) {
			err := s.client.Delete(s.t.Context(), o.DeepCopy())
			return fmt.Sprint(err), apierrors.IsNotFound(err)
		})
	}
}

// TestDocumentedPeeringWithLiqoWorks follows docs/liqo.md twice, from the start to Ready and back.
func TestDocumentedPeeringWithLiqoWorks(t *testing.T) {
	t.Parallel()
	files := manifests(t)
	a := newSites(t, "10.244.0.0/16")[0]
	b := newLiqoSite(t)
	manager := &liqoManager{granted: map[string][2]string{}, config: liqoSpec{
		PodCIDR: b.podCIDR, ExternalCIDR: "10.129.0.0/17", EndpointIP: "203.0.113.2", BackendType: "wireguard",
		BackendConfig: map[string]string{"publicKey": liqoKey, "port": "5871"},
	}}
	play(t, &liqo{id: b.id, client: b.client, manager: manager})
	a.startManager()
	cert, key, err := a.server.ClientCert(b.id, "liqo.io")
	if err != nil {
		t.Fatal(err)
	}
	text := base64.StdEncoding.EncodeToString
	env := map[string]string{
		"OUR_ID": a.id, "OUR_NAME": a.name, "LIQO_ID": b.id, "LIQO_NAME": b.name, "PEERING": b.cluster().UniqueName(),
		"LIQO_TENANT": a.tenant(b), "OUR_TENANT": b.tenant(a), "OUR_SERVER": a.server.URL(), "LIQO_SERVER": b.server.URL(),
		"OUR_CA": text(a.server.CA()), "LIQO_CA": text(b.server.CA()), "LIQO_CERT": text(cert), "LIQO_KEY": text(key),
	}
	for range 2 { // the second round proves that the first one left nothing behind
		atLiqo := parsed(t, files["at-liqo.yaml"], env)
		b.apply(atLiqo)
		env["TOKEN"] = b.token(t, b.tenant(a), "isthmus-peer")
		here := parsed(t, files["here.yaml"], env)
		a.apply(here)
		begin := parsed(t, files["begin.yaml"], env)
		b.apply(begin)
		waitAgreedWithLiqo(a, b, manager)
		a.waitReady(b)

		peering := here[len(here)-1]
		a.remove(peering)
		foreigns := slices.DeleteFunc(slices.Clone(begin), func(o *unstructured.Unstructured) bool { return o.GetKind() != "ForeignCluster" })
		for _, fc := range foreigns {
			if err := b.client.Status().Patch(t.Context(), fc, client.RawPatch(types.MergePatchType, []byte(files["end.json"]))); err != nil {
				t.Fatal(err)
			}
		}
		b.remove(foreigns...)
		b.remove(atLiqo...)
		a.remove(here[:len(here)-1]...)
		a.waitClean()
		for _, s := range []*site{a, b} {
			for _, kind := range []schema.GroupVersionKind{configKind, endpointKind} {
				all, err := listOf(t.Context(), s.client, kind)
				if err != nil || len(all) > 0 {
					t.Errorf("%s has %d objects of kind %s left, %v", s.name, len(all), kind.Kind, err)
				}
			}
		}
	}
}

// token returns a token of a ServiceAccount, as kubectl create token does.
func (s *site) token(t *testing.T, namespace, account string) string {
	t.Helper()
	hours := int64(2160 * 3600)
	ask := &authv1.TokenRequest{Spec: authv1.TokenRequestSpec{ExpirationSeconds: &hours}}
	owner := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: account}}
	if err := s.client.SubResource("token").Create(t.Context(), owner, ask); err != nil {
		t.Fatal(err)
	}
	return ask.Status.Token
}
