package install

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/version"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcscrd "sigs.k8s.io/mcs-api/config/crd"
	"sigs.k8s.io/yaml"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/coredns"
	"github.com/isthmus-net/isthmus/internal/corefile"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

const mcsGroup = "multicluster.x-k8s.io"

// mcsVersions are the versions that a definition of the Multi-Cluster Services API must serve.
// CoreDNS watches v1alpha1 (1.15.0, checked 2026-11).
var mcsVersions = []string{"v1alpha1", "v1beta1"}

// ServiceDefinitions returns the custom resource definitions of the Multi-Cluster Services API,
// with our label.
func ServiceDefinitions() (all []*unstructured.Unstructured, err error) {
	for _, text := range [][]byte{mcscrd.ServiceExportCRD, mcscrd.ServiceImportCRD} {
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(text, &u.Object); err != nil {
			return nil, fmt.Errorf("definition of mcs-api: %w", err)
		}
		labels := u.GetLabels()
		labels[cluster.LabelManagedBy] = cluster.ManagedBy
		u.SetLabels(labels)
		all = append(all, u)
	}
	return all, nil
}

// WithServices reports whether services by name are on.
func WithServices(chosen chart.Values) bool { return chart.Get(chosen, "services", "enabled") == true }

// A servicesPlan has those changes for services by name that are not in the chart.
type servicesPlan struct {
	definitions []*unstructured.Unstructured // all definitions
	apply       []*unstructured.Unstructured // definitions to apply
	dns         *coredns.Server              // nil: not found
	corefile    string                       // Corefile to write; empty: no change
	advice      string                       // manual steps for a person; empty: none
}

// planServices plans the changes for services, and returns nil if services are off. It writes
// nothing, so an impossible plan is reported before anything changes.
func planServices(ctx context.Context, c *cluster.Cluster, chosen chart.Values, o Options) (*servicesPlan, error) {
	configure := o.ConfigureDNS != nil && *o.ConfigureDNS
	if !WithServices(chosen) {
		if configure {
			return nil, fmt.Errorf("%s: --configure-dns needs --services, because this cluster does not share services by name", c)
		}
		return nil, nil
	}
	p := &servicesPlan{}
	var err error
	if p.definitions, err = ServiceDefinitions(); err != nil {
		return nil, err
	}
	for _, want := range p.definitions {
		have, err := c.Get(ctx, DefinitionKind, "", want.GetName())
		if err != nil {
			return nil, err
		}
		switch lacks := lacksVersion(have); {
		case have == nil, have.GetLabels()[cluster.LabelManagedBy] == cluster.ManagedBy && !newer(have, want):
			p.apply = append(p.apply, want)
		case lacks != "":
			return nil, fmt.Errorf("%s: %s already exists but does not serve %s; upgrade it to mcs-api %s with the program that installed it",
				c, cluster.Describe(want), lacks, want.GetLabels()[mcscrd.ReleaseVersionLabel])
		}
	}
	switch p.dns, err = coredns.Find(ctx, c); {
	case err != nil && configure:
		return nil, err
	case err != nil:
		p.advice = fmt.Sprintf("names in %s need CoreDNS %s or later: %v", corefile.Zone, coredns.Oldest, err)
		return p, nil
	case o.ConfigureDNS != nil && !configure:
		if p.corefile, err = corefile.Remove(p.dns.Corefile()); err != nil {
			return nil, fmt.Errorf("%s: %s: %w: nothing was changed", c, p.dns.Where(), err)
		}
		return p, nil
	}
	text, err := p.dns.WithZone()
	switch {
	case err != nil && configure:
		return nil, fmt.Errorf("%s: %w: nothing was changed", c, err)
	case err != nil:
		p.advice = fmt.Sprintf("CoreDNS does not answer for %s: %v", corefile.Zone, err)
	case configure:
		p.corefile = text
	case !p.dns.Serves():
		p.advice = fmt.Sprintf("CoreDNS does not answer for %s: run `isthmus install --configure-dns`, or add to the %s:\n%s", corefile.Zone, p.dns.Where(), corefile.Lines)
	}
	return p, nil
}

// applied returns the definitions that defineServices applies.
func (p *servicesPlan) applied() []*unstructured.Unstructured {
	if p == nil {
		return nil
	}
	return slices.Clone(p.apply)
}

// lacksVersion returns a version from mcsVersions that a definition does not serve, or "" if it
// serves all.
func lacksVersion(crd *unstructured.Unstructured) string {
	if crd == nil {
		return ""
	}
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	for _, want := range mcsVersions {
		if !slices.ContainsFunc(versions, func(v any) bool {
			m, _ := v.(map[string]any)
			return m["name"] == want && m["served"] == true
		}) {
			return want
		}
	}
	return ""
}

// newer reports whether a definition belongs to a newer release of mcs-api.
func newer(have, want *unstructured.Unstructured) bool {
	h, err := version.ParseGeneric(have.GetLabels()[mcscrd.ReleaseVersionLabel])
	w, wrong := version.ParseGeneric(want.GetLabels()[mcscrd.ReleaseVersionLabel])
	return err == nil && wrong == nil && w.LessThan(h)
}

// defineServices applies the definitions. It must run before the manager starts, because the
// manager watches objects of these kinds.
func defineServices(ctx context.Context, c *cluster.Cluster, p *servicesPlan, report func(string)) error {
	if p == nil {
		return nil
	}
	for _, u := range p.definitions {
		outcome := cluster.Outcome("already exists and stays unchanged")
		if slices.Contains(p.apply, u) {
			var err error
			if outcome, err = c.Apply(ctx, u); err != nil {
				return err
			}
		}
		report(fmt.Sprintf("%s: %s %s", c, cluster.Describe(u), outcome))
	}
	return waitEstablished(ctx, c, p.definitions)
}

// nameServices makes CoreDNS answer for imported services. The definitions must exist before that,
// and nameServices creates the rights before it changes the Corefile. Without either, a CoreDNS
// with the zone answers for no Service at all.
func nameServices(ctx context.Context, c *cluster.Cluster, p *servicesPlan, report func(string)) error {
	if p == nil {
		return nil
	}
	if p.dns != nil {
		rights, err := coredns.Rights(p.dns.Account)
		if err != nil {
			return err
		}
		for _, u := range rights {
			outcome, err := c.Apply(ctx, u)
			if err != nil {
				return err
			}
			report(fmt.Sprintf("%s: %s %s", c, cluster.Describe(u), outcome))
		}
		if p.corefile != "" {
			if err := coredns.Write(ctx, c, p.dns, p.corefile, report); err != nil {
				return err
			}
		}
	}
	if p.advice != "" {
		report(fmt.Sprintf("%s: %s", c, p.advice))
	}
	return nil
}

// UnnameServices reverts nameServices and defineServices: first the Corefile, then the rights, then
// the definitions. It keeps and reports objects that CoreDNS or other clients still need.
func UnnameServices(ctx context.Context, c *cluster.Cluster, keepDefinitions bool, report func(string)) error {
	definitions, err := ServiceDefinitions()
	if err != nil {
		return err
	}
	rights, err := coredns.Rights("")
	if err != nil {
		return err
	}
	var ours []*unstructured.Unstructured
	for _, u := range append(rights, definitions...) {
		have, err := c.Get(ctx, u.GroupVersionKind(), "", u.GetName())
		switch {
		case kubeerr.Forbidden(err): // if a person may not read the object, they have not created it either
		case err != nil:
			return err
		case have != nil && have.GetDeletionTimestamp() == nil && appliedByUs(have):
			ours = append(ours, have)
		}
	}
	dns, err := coredns.Find(ctx, c)
	needs := "" // the reason why CoreDNS still needs ServiceImports
	switch {
	case errors.Is(err, coredns.ErrNone):
	case err != nil && len(ours) == 0:
		return nil
	case err != nil:
		needs = "cannot check whether CoreDNS needs it: " + safetext.Of(err.Error())
	default:
		if text, err := corefile.Remove(dns.Corefile()); err != nil {
			report(fmt.Sprintf("%s: %s stays unchanged: %v", c, dns.Where(), err))
		} else if err := coredns.Write(ctx, c, dns, text, report); err != nil {
			return err
		}
		if corefile.Multicluster(dns.Corefile()) {
			needs = "the " + dns.Where() + " has the option multicluster, and without this object CoreDNS does not answer for any Service"
		}
	}
	if len(ours) > 0 && !keepDefinitions { // if Isthmus applied no object, services by name were never on
		if err := removeImports(ctx, c, report); err != nil {
			return err
		}
	}
	var going []*unstructured.Unstructured
	for _, u := range ours {
		stays := ""
		if u.GetKind() == DefinitionKind.Kind {
			if keepDefinitions {
				continue
			}
			if stays, err = othersNeed(ctx, c, u); err != nil {
				return err
			}
		}
		if plural, _, _ := unstructured.NestedString(u.Object, "spec", "names", "plural"); stays == "" && plural != "serviceexports" {
			stays = needs
		}
		if stays != "" {
			report(fmt.Sprintf("%s: %s stays: %s", c, cluster.Describe(u), stays))
			continue
		}
		if err := DeleteObject(ctx, c, u, report); err != nil {
			return err
		}
		if u.GetKind() == DefinitionKind.Kind {
			going = append(going, u)
		}
	}
	for _, u := range going {
		if deleted, err := untilDeleted(ctx, c, u.GetName(), deletionTimeout); err != nil {
			return err
		} else if !deleted {
			report(fmt.Sprintf("%s: %s is not gone yet", c, cluster.Describe(u)))
		}
	}
	return nil
}

// removeImports deletes the ServiceImports that the manager created, and their Services and
// EndpointSlices. The garbage collector would not delete these, because it cannot find an owner
// whose definition was deleted.
func removeImports(ctx context.Context, c *cluster.Cluster, report func(string)) error {
	for _, kind := range []schema.GroupVersionKind{
		{Group: mcsGroup, Version: mcsVersions[1], Kind: "ServiceImport"},
		corev1.SchemeGroupVersion.WithKind("Service"), discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"),
	} {
		var list metav1.PartialObjectMetadataList
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		err := c.Client.List(ctx, &list, client.HasLabels{isthmus.LabelService})
		if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return c.Explain(kind.Kind+"s of imported services", err)
		}
		for i := range list.Items {
			if err := c.Client.Delete(ctx, &list.Items[i]); client.IgnoreNotFound(err) != nil {
				return c.Explain("delete "+kind.Kind+" "+list.Items[i].Namespace+"/"+list.Items[i].Name, err)
			}
		}
		if n := len(list.Items); n > 0 {
			report(fmt.Sprintf("%s: %ss of imported services deleted: %d", c, kind.Kind, n))
		}
	}
	return nil
}

// othersNeed returns the reason why a definition that we applied must stay, or "" if nobody else
// uses it.
func othersNeed(ctx context.Context, c *cluster.Cluster, crd *unstructured.Unstructured) (string, error) {
	for _, f := range crd.GetManagedFields() {
		if f.Manager != cluster.FieldManager && f.Subresource == "" {
			return fmt.Sprintf("%s manages fields of it as well", safetext.Of(f.Manager)), nil
		}
	}
	kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(schema.GroupVersionKind{Group: mcsGroup, Version: mcsVersions[1], Kind: kind + "List"})
	if err := c.Client.List(ctx, &list); err != nil {
		return "", c.Explain(kind+"s", err)
	}
	var foreign []string
	for i := range list.Items {
		if m := &list.Items[i]; m.Labels[isthmus.LabelService] == "" {
			foreign = append(foreign, safetext.Of(m.Namespace+"/"+m.Name))
		}
	}
	if len(foreign) == 0 {
		return "", nil
	}
	return fmt.Sprintf("it has %ss that Isthmus did not create: %s; delete the CRD when they are no longer needed: kubectl delete crd %s", kind, safetext.FirstFew(foreign, ", "), crd.GetName()), nil
}

// servicesManifests returns the additional objects for `isthmus install --print`.
func servicesManifests() (string, error) {
	definitions, err := ServiceDefinitions()
	if err != nil {
		return "", err
	}
	rights, err := coredns.Rights("coredns")
	if err != nil {
		return "", err
	}
	text := ""
	for _, u := range append(definitions, rights...) {
		one, err := yaml.Marshal(u.Object)
		if err != nil {
			return "", err
		}
		text += "---\n" + string(one)
	}
	return text, nil
}
