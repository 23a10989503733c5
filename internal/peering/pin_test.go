package peering

import (
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
	"github.com/isthmus-net/isthmus/internal/install"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

func TestACopiedClusterIdentityIsRefused(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "pin")
	must(t, peerUp(t, p))
	p.Reported()
	name, here := p.B.Identity.UniqueName(), p.B.Identity.TenantNamespace()
	var peering isthmus.Peering
	must(t, p.A.Client.Get(t.Context(), client.ObjectKey{Name: name}, &peering))
	if a := peering.Annotations; a[isthmus.AnnotationPeerUID] != p.B.UID || !strings.HasPrefix(a[isthmus.AnnotationPeerAuthority], "sha256:") {
		t.Errorf("annotations %v", a)
	}
	honest, err := clustertest.AsPeer(t.Context(), p.B, p.A.Identity.TenantNamespace())
	must(t, err)
	mayList := func() error {
		return honest.List(t.Context(), &v1alpha1.NetworkConfigList{}, client.InNamespace(here))
	}
	must(t, mayList())

	// A third cluster that pretends to be b.
	server, err := kubetest.Start(t.Context(), kubetest.Options{Name: "c", Controllers: true})
	must(t, err)
	t.Cleanup(func() { must(t, server.Stop()) })
	file := filepath.Join(t.TempDir(), "c.kubeconfig")
	must(t, server.WriteKubeconfig(file))
	twin := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: file})
	must(t, install.Run(t.Context(), twin, install.Options{Identity: p.B.Identity, Values: clustertest.WithoutWorkloads, Report: func(string) {}}))
	m := &clustertest.Manager{Cluster: twin, Name: "pin", Dead: map[string]string{}}
	m.Renew(t)
	go m.Run(t.Context())

	before := objectVersions(t, p)
	_, err = Peer(t.Context(), p.A, twin, PeerOptions{Timeout: clustertest.Patient, Report: p.Report})
	if err == nil {
		t.Fatal("the twin was accepted")
	}
	clustertest.Contains(t, err.Error(), "pin-a: context c is a cluster with the name and ID pin-b (pin-B-0000), but Peering "+name+" was created with another cluster of that name and ID", "UID "+twin.UID+", not "+p.B.UID, "certificate authority sha256:", "--replace")
	if changed := diff(before, objectVersions(t, p)); changed != nil || p.Reported() != "" {
		t.Errorf("the refusal changed %v", changed)
	}
	must(t, mayList())

	// If a person chooses to replace b, b loses its rights.
	_, err = Peer(t.Context(), p.A, twin, PeerOptions{Replace: true, Timeout: clustertest.Patient, Report: p.Report})
	must(t, err)
	clustertest.Contains(t, p.Reported(), "pin-a: the rights of the previous pin-b are revoked", "pin-a: got a new identity at pin-b, valid until ", twin.UID)
	for begin := time.Now(); !apierrors.IsUnauthorized(mayList()); time.Sleep(100 * time.Millisecond) {
		if time.Since(begin) > clustertest.Patient {
			t.Fatal("the identity of the replaced cluster still works")
		}
	}
	if _, err = Peer(t.Context(), p.A, p.B, PeerOptions{Timeout: clustertest.Patient, Report: p.Report}); err == nil || !strings.Contains(err.Error(), "--replace") {
		t.Errorf("the one before comes back: %v", err)
	}
}

func TestANewAuthorityIsAcceptedFromTheSameCluster(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "authority")
	must(t, peerUp(t, p))
	account := client.ObjectKey{Namespace: p.B.Identity.TenantNamespace(), Name: peerAccount}
	var was, is corev1.ServiceAccount
	must(t, p.A.Client.Get(t.Context(), account, &was))

	config, err := clientcmd.LoadFromFile(clustertest.Kubeconfigs.B)
	must(t, err)
	other, err := os.ReadFile(clustertest.Kubeconfigs.A)
	must(t, err)
	added, err := clientcmd.Load(other)
	must(t, err)
	server := config.Clusters[config.Contexts[config.CurrentContext].Cluster]
	for _, c := range added.Clusters {
		server.CertificateAuthorityData = append(server.CertificateAuthorityData, c.CertificateAuthorityData...)
	}
	file := filepath.Join(t.TempDir(), "b.kubeconfig")
	must(t, clientcmd.WriteToFile(*config, file))
	rotated := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: file, Namespace: p.B.Namespace})
	rotated.Identity = p.B.Identity
	p.Reported()
	_, err = Peer(t.Context(), p.A, rotated, PeerOptions{Timeout: clustertest.Patient, Report: p.Report})
	must(t, err)
	clustertest.Contains(t, p.Reported(), "authority-a: got a new identity at authority-b, valid until ", "the old one was for another server, proxy or certificate authority")
	if must(t, p.A.Client.Get(t.Context(), account, &is)); is.UID != was.UID {
		t.Error("the account of b was revoked")
	}
	var secret corev1.Secret
	must(t, p.A.Client.Get(t.Context(), client.ObjectKey{Namespace: account.Namespace, Name: isthmus.DefaultIdentitySecret}, &secret))
	if have, err := clientcmd.Load(secret.Data[isthmus.SecretKubeconfig]); err != nil || string(have.Clusters[p.B.Identity.ClusterName].CertificateAuthorityData) != string(server.CertificateAuthorityData) {
		t.Errorf("a does not know b by the new authority: %v", err)
	}

	// A cluster with another authority is recognized only by its identity. Here b appears with
	// the first authority again, and without its identity.
	must(t, p.B.Client.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: p.A.Identity.TenantNamespace(), Name: isthmus.DefaultIdentitySecret}}))
	_, err = Peer(t.Context(), p.A, p.B, PeerOptions{Timeout: clustertest.Patient, Report: p.Report})
	if err == nil {
		t.Fatal("a cluster with another authority and without the identity was accepted")
	}
	clustertest.Contains(t, err.Error(), "certificate authority sha256:", "it has no valid identity at this cluster", "--replace")
}

func TestAnAccountWithoutAPeeringIsRevoked(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "orphan")
	must(t, peerUp(t, p))
	must(t, p.A.Client.Delete(t.Context(), &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Name: p.B.Identity.UniqueName()}}))
	for !clustertest.Deleted(t, p.A, &isthmus.Peering{}, p.B.Identity.UniqueName()) {
		time.Sleep(20 * time.Millisecond)
	}
	account := client.ObjectKey{Namespace: p.B.Identity.TenantNamespace(), Name: peerAccount}
	var was, is corev1.ServiceAccount
	must(t, p.A.Client.Get(t.Context(), account, &was))
	p.Reported()
	must(t, peerUp(t, p))
	clustertest.Contains(t, p.Reported(), "orphan-a: the rights of the previous orphan-b are revoked")
	if must(t, p.A.Client.Get(t.Context(), account, &is)); is.UID == was.UID {
		t.Error("the account is the same as before")
	}
}

func TestAuthorityFingerprintDependsOnlyOnItsCertificates(t *testing.T) {
	block := func(s string) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte(s)}))
	}
	one, two := block("one"), block("two")
	same := fingerprint([]byte(one + two))
	for what, text := range map[string]string{"another order": two + one, "text around": "# a bundle\n" + one + "\n\n" + two, "one twice": one + two + one} {
		if got := fingerprint([]byte(text)); got != same {
			t.Errorf("%s: %s, want %s", what, got, same)
		}
	}
	for what, text := range map[string]string{"one less": one, "one more": one + two + block("three"), "none": ""} {
		if got := fingerprint([]byte(text)); got == same {
			t.Errorf("%s: the same", what)
		}
	}
	if got := fingerprint(nil); got != "system" {
		t.Errorf("without certificates: %s", got)
	}
}
