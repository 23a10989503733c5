// Package coredns finds the CoreDNS of a cluster, and changes its Corefile and permissions for
// multi-cluster services.
package coredns

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/version"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/corefile"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// Oldest is the first CoreDNS version whose plugin kubernetes has the option multicluster. Older
// versions reject a Corefile with that option.
const Oldest = "1.12.2"

// KeyCorefile is the key of the Corefile in its ConfigMap.
const KeyCorefile = "Corefile"

// ErrNone is returned when the DNS server of the cluster cannot be found.
var ErrNone = errors.New("no Deployment in kube-system has the label k8s-app=kube-dns and a ConfigMap with a Corefile")

// A Server is the DNS server of a cluster.
type Server struct {
	Deployment string // name, in namespace kube-system
	image      string
	Account    string           // name of its ServiceAccount
	config     corev1.ConfigMap // contains the Corefile
}

// Find finds CoreDNS where kubeadm and most other installers put it. It returns ErrNone if CoreDNS
// is not there.
func Find(ctx context.Context, c *cluster.Cluster) (*Server, error) {
	var list appsv1.DeploymentList
	if err := c.Client.List(ctx, &list, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{"k8s-app": "kube-dns"}); err != nil {
		return nil, c.Explain("Deployments in kube-system", err)
	}
	for i := range list.Items {
		pod := &list.Items[i].Spec.Template.Spec
		for _, v := range pod.Volumes {
			if v.ConfigMap == nil {
				continue
			}
			d := &Server{Deployment: list.Items[i].Name, Account: pod.ServiceAccountName, image: pod.Containers[0].Image}
			key := client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: v.ConfigMap.Name}
			if err := c.Client.Get(ctx, key, &d.config); client.IgnoreNotFound(err) != nil {
				return nil, c.Explain("ConfigMap "+key.String(), err)
			}
			if d.config.Data[KeyCorefile] != "" {
				return d, nil
			}
		}
	}
	return nil, fmt.Errorf("%s: %w", c, ErrNone)
}

// Corefile returns the text of the Corefile.
func (d *Server) Corefile() string { return d.config.Data[KeyCorefile] }

// Where returns the location of the Corefile for messages.
func (d *Server) Where() string {
	return "Corefile in ConfigMap " + metav1.NamespaceSystem + "/" + safetext.Of(d.config.Name)
}

// TooOld returns the reason why CoreDNS may reject the option multicluster, or "" if it supports
// the option. It reads the version from the image's tag, to which some distributions append text.
func (d *Server) TooOld() string {
	_, tag, _ := strings.Cut(d.image[strings.LastIndexByte(d.image, '/')+1:], ":")
	tag, _, _ = strings.Cut(tag, "@")
	v, err := version.ParseGeneric(tag)
	switch {
	case err != nil:
		return fmt.Sprintf("the image %s does not show the version of CoreDNS; want %s or later", safetext.Of(d.image), Oldest)
	case v.LessThan(version.MustParseGeneric(Oldest)):
		return fmt.Sprintf("CoreDNS %s is too old for %s: want %s or later", v, corefile.Zone, Oldest)
	}
	return ""
}

// Serves reports whether CoreDNS answers for the zone. It returns false if the Corefile cannot be
// parsed.
func (d *Server) Serves() bool {
	served, err := corefile.Serves(d.Corefile())
	return served && err == nil
}

// WithZone returns the Corefile with the zone added.
func (d *Server) WithZone() (string, error) {
	if old := d.TooOld(); old != "" && !d.Serves() {
		return "", errors.New(old)
	}
	text, err := corefile.Add(d.Corefile())
	if err != nil {
		return "", fmt.Errorf("%s: %w", d.Where(), err)
	}
	return text, nil
}

// Write replaces the Corefile, unless the ConfigMap has changed since Find read it.
func Write(ctx context.Context, c *cluster.Cluster, d *Server, text string, report func(string)) error {
	if text == d.Corefile() {
		return nil
	}
	before := d.config.DeepCopy()
	d.config.Data[KeyCorefile] = text
	err := c.Client.Patch(ctx, &d.config, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), client.FieldOwner(cluster.FieldManager))
	if err != nil {
		return c.Explain(d.Where(), err)
	}
	what := "added to"
	if !corefile.Marked(text) {
		what = "removed from"
	}
	restart := "CoreDNS reads it within two minutes"
	if !reloads(text) {
		restart = "CoreDNS reads it at its next start: kubectl -n kube-system rollout restart deployment " + safetext.Of(d.Deployment)
	}
	report(fmt.Sprintf("%s: %s %s %s; %s", c, corefile.Zone, what, d.Where(), restart))
	return nil
}

// reloads reports whether CoreDNS reloads the Corefile when the file changes.
func reloads(text string) bool {
	return slices.ContainsFunc(strings.Split(text, "\n"), func(line string) bool {
		words := strings.Fields(line)
		return len(words) > 0 && words[0] == "reload"
	})
}

// Rights returns the RBAC objects that let a ServiceAccount of CoreDNS watch ServiceImports.
func Rights(account string) (all []*unstructured.Unstructured, err error) {
	text, err := deploy.Optional.ReadFile("optional/coredns.yaml")
	if err != nil {
		return nil, err
	}
	for one := range strings.SplitSeq(string(text), "\n---\n") {
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(one), &u.Object); err != nil {
			return nil, fmt.Errorf("optional/coredns.yaml: %w", err)
		}
		if u.GetKind() == "ClusterRoleBinding" {
			subject := map[string]any{"kind": "ServiceAccount", "name": account, "namespace": metav1.NamespaceSystem}
			if err := unstructured.SetNestedSlice(u.Object, []any{subject}, "subjects"); err != nil {
				return nil, err
			}
		}
		all = append(all, u)
	}
	return all, nil
}
