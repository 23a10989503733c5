package peering

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cluster"
)

// checkServices sets s.shares if the cluster shares services. Such a cluster has the admission
// policy for the objects that its manager creates for services. checkServices returns an error if
// the options choose services to share, but sharing is off in the cluster.
func (s *side) checkServices(ctx context.Context) error {
	policy := &admissionv1.ValidatingAdmissionPolicy{}
	policy.Name = deploy.ManagerServicesPolicy
	err := s.Client.Get(ctx, client.ObjectKeyFromObject(policy), policy)
	switch {
	case err == nil:
		s.shares = true
	case apierrors.IsForbidden(err): // checkRights reports all missing rights together
		return nil
	case !apierrors.IsNotFound(err):
		return s.Explain("ValidatingAdmissionPolicy "+policy.Name, err)
	case len(s.services) > 0:
		return fmt.Errorf("%s: --services: this cluster does not share services; run `isthmus install --context %s --services` first", s.Cluster, s.Context)
	}
	return nil
}

// shared returns the chosen namespaces in the format of a Peering, both to export and to import.
func (s *side) shared() isthmus.Services {
	all := slices.Clone(s.services)
	return isthmus.Services{Export: all, Import: all}
}

// setServices writes the namespaces that a person chose into an existing Peering, unless the
// Peering already has them.
func (s *side) setServices(ctx context.Context) (string, error) {
	if !s.exists || s.services == nil {
		return "", nil
	}
	if err := s.Client.Get(ctx, client.ObjectKeyFromObject(s.peering), s.peering); err != nil {
		return "", s.Explain("Peering "+s.peering.Name, err)
	}
	want := s.shared()
	if slices.Equal(s.peering.Spec.Services.Export, want.Export) && slices.Equal(s.peering.Spec.Services.Import, want.Import) {
		return "", nil
	}
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"services": map[string]any{"export": want.Export, "import": want.Import}}})
	if err != nil {
		return "", err
	}
	if err := s.Client.Patch(ctx, s.peering, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(cluster.FieldManager)); err != nil {
		return "", s.Explain("spec.services of Peering "+s.peering.Name, err)
	}
	if len(s.services) == 0 {
		return fmt.Sprintf("%s: no longer shares services with %s", s.Cluster, s.peer.Cluster), nil
	}
	return fmt.Sprintf("%s: shares services of namespaces %s with %s", s.Cluster, strings.Join(s.services, ", "), s.peer.Cluster), nil
}
