package gather

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/install"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/postquantum"
)

var must = expect.NoError

// unpack returns the files of an archive by their names inside its folder.
func unpack(t *testing.T, archive []byte) map[string]string {
	t.Helper()
	plain, err := gzip.NewReader(bytes.NewReader(archive))
	must(t, err)
	files := map[string]string{}
	for r := tar.NewReader(plain); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		must(t, err)
		text, err := io.ReadAll(r)
		must(t, err)
		_, name, ok := strings.Cut(h.Name, "/")
		if !ok || strings.Contains(name, "..") || !strings.HasPrefix(h.Name, "isthmus-") {
			t.Errorf("file %s", h.Name)
		}
		files[name] = string(text)
	}
}

// planted holds the secrets that the test puts into objects, in the same places as users do.
type planted struct{ private, public, token, client, password string }

func plant(t *testing.T, c client.Client) (p planted, all map[string][]byte) {
	t.Helper()
	seed := make([]byte, 32)
	_, _ = rand.Read(seed)
	seed[0] &= 248
	seed[31] = seed[31]&127 | 64 // the form that wg genkey produces
	key, err := ecdh.X25519().NewPrivateKey(seed)
	must(t, err)
	random := func(n int) string {
		b := make([]byte, n)
		_, _ = rand.Read(b)
		return base64.RawURLEncoding.EncodeToString(b)
	}
	p = planted{
		private: base64.StdEncoding.EncodeToString(key.Bytes()), public: base64.StdEncoding.EncodeToString(key.PublicKey().Bytes()),
		token: "eyJhbGciOiJSUzI1NiJ9." + random(60) + "." + random(64), password: "pa55-" + random(9),
		client: "-----BEGIN PRIVATE KEY-----\n" + base64.StdEncoding.EncodeToString([]byte(random(40))) + "\n-----END PRIVATE KEY-----\n",
	}
	kubeconfig, err := clientcmd.Write(clientcmdapi.Config{
		Clusters:  map[string]*clientcmdapi.Cluster{"x": {Server: "https://192.0.2.1:6443"}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"u": {Token: p.token, ClientKeyData: []byte(p.client), Password: p.password, Username: "me"}},
	})
	must(t, err)
	here := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: deploy.Namespace, Name: name} }
	exchange := postquantum.State{Use: postquantum.Key{ID: "of today"}}
	_, _ = rand.Read(exchange.Use.Secret[:])
	exchange.Use.Secret[0] |= 1 // not in the form of a WireGuard key
	stored, err := json.Marshal(exchange)
	must(t, err)
	preshared := exchange.Use.Secret[:]
	last := here("last")
	last.Annotations = map[string]string{corev1.LastAppliedConfigAnnotation: `{"data":{"password":"` + p.password + `"}}`, "note": "it is " + p.password}
	for _, o := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-oslo"}},
		&corev1.Secret{ObjectMeta: here("isthmus-key"), Data: map[string][]byte{"privateKey": []byte(p.private), "publicKey": []byte(p.public)}},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-oslo", Name: "isthmus-identity"}, Data: map[string][]byte{"kubeconfig": kubeconfig}},
		&corev1.ConfigMap{ObjectMeta: here("kubeconfig"), Data: map[string]string{"config": string(kubeconfig), "packed": base64.StdEncoding.EncodeToString(kubeconfig)}},
		&corev1.ConfigMap{ObjectMeta: here("keys"), Data: map[string]string{"a": "key " + p.private, "b": hex.EncodeToString(key.Bytes()), "c": p.client}},
		&corev1.Secret{ObjectMeta: here(postquantum.SecretName), Data: map[string][]byte{"oslo": stored}},
		&corev1.ConfigMap{ObjectMeta: here("preshared"), Data: map[string]string{
			"a": "psk " + base64.StdEncoding.EncodeToString(preshared), "b": hex.EncodeToString(preshared), "c": string(stored)}},
		&corev1.ConfigMap{ObjectMeta: last},
		&corev1.Event{ObjectMeta: here("said"), InvolvedObject: corev1.ObjectReference{Namespace: deploy.Namespace, Kind: "Pod", Name: "x"}, Message: "Bearer " + p.token},
		&corev1.Pod{ObjectMeta: here("gateway"), Spec: corev1.PodSpec{ServiceAccountName: deploy.GatewayServiceAccount, Containers: []corev1.Container{
			{Name: "gateway", Image: "isthmus:v1", Env: []corev1.EnvVar{{Name: "A", Value: p.password}}}}}},
		&v1alpha1.TunnelEndpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "liqo-tenant-oslo", Name: "oslo"}, Spec: v1alpha1.TunnelEndpointSpec{
			ClusterIdentity: v1alpha1.ClusterIdentity{ClusterID: "oslo", ClusterName: "oslo"}, BackendType: v1alpha1.BackendWireGuard,
			BackendConfig: map[string]string{v1alpha1.ConfigPublicKey: p.public, v1alpha1.ConfigPort: "5871"},
			EndpointIP:    "192.0.2.7", LocalPodCIDR: "10.1.0.0/16", LocalNATPodCIDR: "None", LocalExternalCIDR: "10.2.0.0/20", LocalNATExternalCIDR: "None",
			RemotePodCIDR: "10.3.0.0/18", RemoteNATPodCIDR: "None", RemoteExternalCIDR: "10.4.0.0/20", RemoteNATExternalCIDR: "None",
		}},
		&isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Name: "oslo"}, Spec: isthmus.PeeringSpec{
			Cluster:            v1alpha1.ClusterIdentity{ClusterID: "oslo", ClusterName: "oslo"},
			TenantNamespace:    isthmus.TenantNamespace{Local: "liqo-tenant-oslo", Remote: "liqo-tenant-paris"},
			IdentitySecretName: "isthmus-identity",
		}},
	} {
		if err := c.Create(t.Context(), o); err != nil {
			t.Fatalf("%T %s: %v", o, o.GetName(), err)
		}
	}
	return p, map[string][]byte{"the WireGuard key": []byte(p.private), "its octets": key.Bytes(), "the token": []byte(p.token), "the client's key": []byte(p.client),
		"the password": []byte(p.password), "the kubeconfig": kubeconfig, "the preshared key": preshared, "its text": []byte(base64.StdEncoding.EncodeToString(preshared))}
}

// An archive contains everything that a bug report needs and the person may read, and no secret
// in any form.
func TestAnArchiveIsCompleteAndHasNoSecret(t *testing.T) {
	if testing.Short() {
		t.Skip("needs an API server")
	}
	kube, err := kubetest.Build(t.Context(), os.Stderr)
	must(t, err)
	server, err := kubetest.Start(t.Context(), kubetest.Options{Name: "gather", Dir: kube})
	must(t, err)
	t.Cleanup(func() { server.Stop() })
	file := filepath.Join(t.TempDir(), "kubeconfig")
	must(t, server.WriteKubeconfig(file))
	c, err := cluster.Connect(cluster.Access{Kubeconfig: file})
	must(t, err)
	must(t, install.Run(t.Context(), c, install.Options{Identity: v1alpha1.ClusterIdentity{ClusterName: "paris", ClusterID: "paris-1"},
		Values: chart.Values{"workloads": false}, Report: func(string) {}}))
	p, secrets := plant(t, c.Client)

	gathered := func(t *testing.T, c *cluster.Cluster) map[string]string {
		t.Helper()
		var archive bytes.Buffer
		if _, err := Write(t.Context(), c, &archive, Options{Version: "v1", LogLines: 100, Report: func(string) {}}); err != nil {
			t.Fatal(err)
		}
		files := unpack(t, archive.Bytes())
		for name, text := range files {
			for what, secret := range secrets {
				for _, form := range []string{string(secret), hex.EncodeToString(secret), base64.StdEncoding.EncodeToString(secret), base64.RawURLEncoding.EncodeToString(secret)} {
					if strings.Contains(text, form) {
						t.Errorf("%s has %s", name, what)
					}
				}
			}
		}
		return files
	}
	files := gathered(t, c)
	for name, want := range map[string][]string{
		"summary.md":                            {"cluster paris", "paris-1", "## Diagnosis", "no manager is active", "| gateway |", "pods/gateway/status.json: "},
		"status.yaml":                           {"name: oslo"},
		"diagnosis.yaml":                        {"hop: manager"},
		"secrets.yaml":                          {"name: isthmus-key", "name: privateKey", "octets: 44"},
		"objects/peering.yaml":                  {"kind: Peering", "name: oslo"},
		"objects/isthmus-system/configmap.yaml": {"name: keys", "[REDACTED]"},
		"objects/tunnelendpoint.yaml":           {"publicKey: " + p.public},
		"objects/isthmus-system/role.yaml":      {"isthmus-manager"},
	} {
		text, ok := files[name]
		if !ok {
			t.Errorf("no %s", name)
			continue
		}
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s lacks %q:\n%.3000s", name, w, text)
			}
		}
		if strings.Contains(text, "managedFields") || strings.Contains(text, "last-applied") {
			t.Errorf("%s has what nobody reads", name)
		}
	}

	t.Run("with few permissions", func(t *testing.T) {
		must(t, c.Client.Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "little"}, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"namespaces", "configmaps"}, Verbs: []string{"get", "list"}},
			{APIGroups: []string{isthmus.GroupVersion.Group}, Resources: []string{"peerings"}, Verbs: []string{"list"}},
		}}))
		must(t, c.Client.Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "little"},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "little"},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "reader"}}}))
		config, err := clientcmd.LoadFromFile(file)
		must(t, err)
		for _, user := range config.AuthInfos {
			user.Impersonate = "reader"
		}
		limited := filepath.Join(t.TempDir(), "kubeconfig")
		must(t, clientcmd.WriteToFile(*config, limited))
		c, err := cluster.Connect(cluster.Access{Kubeconfig: limited})
		must(t, err)
		// The password is also in an annotation of a ConfigMap. gather recognizes it there only if
		// the person may read the Secret.
		delete(secrets, "the password")
		delete(secrets, "the preshared key")
		delete(secrets, "its text") // the same password in base64
		files := gathered(t, c)
		for _, want := range []string{"Secrets in isthmus-system", "cannot list resource", "Pods in isthmus-system"} {
			if !strings.Contains(files["summary.md"], want) {
				t.Errorf("summary.md does not say %q:\n%s", want, files["summary.md"])
			}
		}
		if !strings.Contains(files["objects/peering.yaml"], "name: oslo") {
			t.Errorf("what could be read is not there: %v", fmt.Sprint(len(files)))
		}
	})
}

func TestAnUnreachableClusterIsAnError(t *testing.T) {
	config := clientcmdapi.NewConfig()
	config.Clusters["x"] = &clientcmdapi.Cluster{Server: "https://127.0.0.1:1"}
	config.Contexts["x"] = &clientcmdapi.Context{Cluster: "x"}
	config.CurrentContext = "x"
	file := filepath.Join(t.TempDir(), "kubeconfig")
	must(t, clientcmd.WriteToFile(*config, file))
	c, err := cluster.Connect(cluster.Access{Kubeconfig: file})
	must(t, err)
	if _, err := Write(t.Context(), c, io.Discard, Options{Report: func(string) {}}); !errors.Is(err, cluster.ErrUnreachable) {
		t.Errorf("%v", err)
	}
}
