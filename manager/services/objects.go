package services

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

// An existing has the present objects of a service in this cluster.
type existing struct {
	key     Key
	imports *mcs.ServiceImport // nil: there is none
	service *corev1.Service    // has the name DerivedName(key)
	slices  map[string]*discoveryv1.EndpointSlice
}

// indexService is the cache index of EndpointSlices by LabelService, because a namespace may have
// thousands of slices.
const indexService = "service"

// read reads the objects from the cache. The caller must not change them.
func (c *Controller) read(ctx context.Context, key Key) (have existing, err error) {
	have = existing{key: key, slices: make(map[string]*discoveryv1.EndpointSlice)}
	var i mcs.ServiceImport
	if err := c.objects.Get(ctx, key, &i); err == nil {
		have.imports = &i
	} else if !apierrors.IsNotFound(err) {
		return have, fmt.Errorf("ServiceImport: %w", err)
	}
	var s corev1.Service
	if err := c.objects.Get(ctx, Key{Namespace: key.Namespace, Name: DerivedName(key)}, &s); err == nil {
		have.service = &s
	} else if !apierrors.IsNotFound(err) {
		return have, fmt.Errorf("derived Service: %w", err)
	}
	var list discoveryv1.EndpointSliceList
	if err := c.objects.List(ctx, &list, client.InNamespace(key.Namespace), client.MatchingFields{indexService: key.Name}); err != nil {
		return have, fmt.Errorf("EndpointSlices: %w", err)
	}
	for j := range list.Items {
		if s := &list.Items[j]; s.Labels[discoveryv1.LabelManagedBy] == ManagedBy && strings.HasPrefix(s.Name, DerivedName(key)+"-") {
			have.slices[s.Name] = s
		}
	}
	return have, nil
}

// foreign describes a foreign object that has the name of one of our objects. It returns "" if
// there is none.
func (e existing) foreign() string {
	if e.imports != nil && e.imports.Labels[LabelService] != e.key.Name {
		return "the ServiceImport of this name belongs to another implementation of the Multi-Cluster Services API"
	}
	if e.service != nil && (e.service.Labels[LabelService] != e.key.Name || e.service.Spec.ClusterIP == corev1.ClusterIPNone) {
		return "the importing cluster has a Service " + e.service.Name + " that Isthmus did not create"
	}
	return ""
}

// ours returns those of our objects that depend on a ServiceImport.
func (e existing) ours() existing {
	e.imports = nil
	if e.service != nil && e.service.Labels[LabelService] != e.key.Name {
		e.service = nil
	}
	return e
}

// errForeign is the name of a foreign EndpointSlice, if one of our EndpointSlices needs that name.
type errForeign string

func (e errForeign) Error() string {
	return "the importing cluster has an EndpointSlice " + string(e) + " that Isthmus did not create"
}

// remove deletes our objects.
func (c *Controller) remove(ctx context.Context, have existing) (err error) {
	for _, name := range slices.Sorted(maps.Keys(have.slices)) {
		err = errors.Join(err, c.delete(ctx, have.slices[name]))
	}
	if have.service != nil {
		err = errors.Join(err, c.delete(ctx, have.service))
	}
	if have.imports != nil {
		err = errors.Join(err, c.delete(ctx, have.imports))
	}
	return err
}

func (c *Controller) delete(ctx context.Context, o client.Object) error {
	if !o.GetDeletionTimestamp().IsZero() {
		return nil
	}
	if err := c.Client.Delete(ctx, o, client.Preconditions{UID: ptr.To(o.GetUID())}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete %T %s: %w", o, o.GetName(), err)
	}
	return nil
}

// apply writes the objects that differ, in this order: the ServiceImport, which owns the other
// objects; the Service, whose addresses the ServiceImport lists; the slices. It adds new slices
// before it deletes old slices.
func (c *Controller) apply(ctx context.Context, have existing, want Merged) error {
	i, err := c.applyImport(ctx, have.imports, want.Import)
	if err != nil || i == nil {
		return err
	}
	owners := []metav1.OwnerReference{{APIVersion: mcs.GroupVersion.String(), Kind: mcs.ServiceImportKindName, Name: i.Name, UID: i.UID}}
	var ips []string
	if want.Service != nil {
		want.Service.OwnerReferences = owners
		s, err := c.applyService(ctx, have.service, want.Service)
		if err != nil {
			return err
		}
		ips = s.Spec.ClusterIPs
	}
	var foreign error
	for n := range want.Slices {
		slice := &want.Slices[n]
		slice.OwnerReferences = owners
		if err := c.applySlice(ctx, have.slices[slice.Name], slice); errors.As(err, new(errForeign)) {
			foreign = err // the other slices are still served
		} else if err != nil {
			return err
		}
		delete(have.slices, slice.Name)
	}
	for _, name := range slices.Sorted(maps.Keys(have.slices)) {
		if err := c.delete(ctx, have.slices[name]); err != nil {
			return err
		}
	}
	if want.Service == nil && have.service != nil {
		if err := c.delete(ctx, have.service); err != nil {
			return err
		}
	}
	return errors.Join(foreign, c.completeImport(ctx, i, ips, want.Import))
}

// applyImport writes the ServiceImport and returns it. It returns nil while a previous one with the
// same name is being deleted.
func (c *Controller) applyImport(ctx context.Context, have, want *mcs.ServiceImport) (*mcs.ServiceImport, error) {
	if have == nil {
		made := want.DeepCopy()
		made.Status = mcs.ServiceImportStatus{}
		return made, wrap("create ServiceImport", c.Client.Create(ctx, made))
	}
	if !have.DeletionTimestamp.IsZero() {
		return nil, nil //nolint:nilnil // an event reports the end of the deletion
	}
	changed := have.DeepCopy()
	changed.Labels, changed.Annotations = maps.Clone(want.Labels), maps.Clone(want.Annotations)
	changed.Spec = *want.Spec.DeepCopy()
	changed.Spec.IPs, changed.Spec.IPFamilies = have.Spec.IPs, have.Spec.IPFamilies
	if equality.Semantic.DeepEqual(have.Spec, changed.Spec) && maps.Equal(have.Labels, changed.Labels) && maps.Equal(have.Annotations, changed.Annotations) {
		return changed, nil
	}
	return changed, wrap("ServiceImport", c.Client.Patch(ctx, changed, client.MergeFrom(have)))
}

// completeImport writes those fields of the ServiceImport that depend on the other objects.
func (c *Controller) completeImport(ctx context.Context, i *mcs.ServiceImport, ips []string, merged *mcs.ServiceImport) error {
	families := merged.Spec.IPFamilies
	if merged.Spec.Type == mcs.Headless && len(families) == 0 {
		families = i.Spec.IPFamilies // the endpoints may be missing only for a moment, so the families stay
	}
	for _, ip := range ips {
		families = append(families, map[bool]corev1.IPFamily{false: corev1.IPv4Protocol, true: corev1.IPv6Protocol}[strings.Contains(ip, ":")])
	}
	if !slices.Equal(i.Spec.IPs, ips) || !slices.Equal(i.Spec.IPFamilies, families) {
		before := i.DeepCopy()
		i.Spec.IPs, i.Spec.IPFamilies = ips, families
		if err := c.Client.Patch(ctx, i, client.MergeFrom(before)); err != nil {
			return fmt.Errorf("addresses of the ServiceImport: %w", err)
		}
	}
	want := i.DeepCopy()
	want.Status.EndpointSliceObjects, want.Status.Clusters = merged.Status.EndpointSliceObjects, merged.Status.Clusters
	meta.SetStatusCondition(&want.Status.Conditions, metav1.Condition{
		Type: string(mcs.ServiceImportConditionReady), Status: metav1.ConditionTrue, Reason: string(mcs.ServiceImportReasonReady), ObservedGeneration: i.Generation,
	})
	if equality.Semantic.DeepEqual(want.Status, i.Status) {
		return nil
	}
	return wrap("status of the ServiceImport", c.Client.Status().Patch(ctx, want, client.MergeFrom(i)))
}

func (c *Controller) applyService(ctx context.Context, have, want *corev1.Service) (*corev1.Service, error) {
	if have == nil {
		made := want.DeepCopy()
		return made, wrap("create derived Service", c.Client.Create(ctx, made))
	}
	changed := have.DeepCopy()
	maps.Copy(changed.Labels, want.Labels) // keeps the labels of other controllers
	changed.OwnerReferences = want.OwnerReferences
	w, s := want.Spec.DeepCopy(), &changed.Spec
	s.Type, s.Ports, s.Selector, s.ExternalIPs, s.TrafficDistribution = w.Type, w.Ports, nil, nil, w.TrafficDistribution
	s.InternalTrafficPolicy = ptr.To(ptr.Deref(w.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster))
	if s.SessionAffinity = w.SessionAffinity; w.SessionAffinityConfig != nil || w.SessionAffinity == corev1.ServiceAffinityNone {
		s.SessionAffinityConfig = w.SessionAffinityConfig // otherwise the API server's default stays
	}
	if equality.Semantic.DeepEqual(have.Spec, changed.Spec) && maps.Equal(have.Labels, changed.Labels) && equality.Semantic.DeepEqual(have.OwnerReferences, changed.OwnerReferences) {
		return have, nil
	}
	return changed, wrap("derived Service", c.Client.Patch(ctx, changed, client.MergeFrom(have)))
}

func (c *Controller) applySlice(ctx context.Context, have, want *discoveryv1.EndpointSlice) error {
	if have == nil {
		err := c.Client.Create(ctx, want.DeepCopy())
		if apierrors.IsAlreadyExists(err) && !c.sources.exists(ctx, want) { // the cache only has slices with our label
			return errForeign(want.Name)
		}
		return wrap("create EndpointSlice", err)
	}
	if have.AddressType != want.AddressType { // the field is immutable, so somebody else has created this object
		return c.delete(ctx, have) // the deletion causes an event
	}
	changed := have.DeepCopy()
	maps.Copy(changed.Labels, want.Labels)
	changed.OwnerReferences, changed.Ports, changed.Endpoints = want.OwnerReferences, want.Ports, want.Endpoints
	if equality.Semantic.DeepEqual(have.ObjectMeta, changed.ObjectMeta) && equality.Semantic.DeepEqual(have.Ports, changed.Ports) &&
		equality.Semantic.DeepEqual(have.Endpoints, changed.Endpoints) {
		return nil
	}
	return wrap("EndpointSlice "+want.Name, c.Client.Patch(ctx, changed, client.MergeFrom(have)))
}

func wrap(step string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", step, err)
}
