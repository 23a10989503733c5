package peerings

import (
	"context"
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/replication"
	"github.com/isthmus-net/isthmus/manager/services"
)

// servicesState has the inputs of the condition ServicesShared.
type servicesState struct {
	on      bool
	lacking string // the reason why no services are shared, or ""
	checked bool   // whether the PeerServices at the peer were checked
	counted bool   // whether each of the peer's services was checked
	sharing replication.Sharing
	imports services.Imports
	left    bool // whether the peer still has PeerServices of ours
}

func (r *Reconciler) gatherServices(ctx context.Context, s *peeringState) {
	s.services = servicesState{on: r.Services != nil || r.ServicesLacking != "", lacking: r.ServicesLacking}
	if r.Services == nil {
		return
	}
	id := s.peering.Spec.Cluster.ClusterID
	s.services.sharing, s.services.checked = r.Services.Sharing(id)
	s.services.imports, s.services.counted = r.Services.Imports(id), r.Services.Checked(ctx, id, s.peering.Spec.TenantNamespace.Local)
	// Before the first check of the peer, the removal does not wait for services: the removal of
	// the NetworkConfig waits for the peer in any case.
	s.services.left = s.services.checked && !s.services.sharing.Withdrawn
}

// servicesCondition computes the condition ServicesShared. It returns nil if the Peering has no
// such condition.
func servicesCondition(s peeringState) *condition {
	spec, state := s.peering.Spec.Services, s.services
	if !state.on || len(spec.Export)+len(spec.Import) == 0 || s.conflict != "" || !s.peering.DeletionTimestamp.IsZero() {
		return nil
	}
	v := func(v condition) *condition { return &v }
	c := state.sharing.Condition
	switch {
	case state.lacking != "":
		return v(no(isthmus.ReasonLocalSetup, "%s", state.lacking))
	case len(spec.Export) > 0 && !state.checked, !state.counted:
		if before := storedCondition(s.peering, isthmus.ConditionServicesShared); before != unknown {
			return &before
		}
		return v(no(isthmus.ReasonSharing, "the manager has not checked the peer and its services yet"))
	case len(spec.Export) > 0 && c.Status == metav1.ConditionFalse:
		return v(no(c.Reason, "%s", c.Message))
	}
	text := fmt.Sprintf("%d services of the peer are served here", state.imports.Served)
	if c.Status == metav1.ConditionTrue {
		text += "; " + c.Message
	}
	var refused []string
	if n := state.imports.Refused; n > 0 {
		refused = append(refused, fmt.Sprintf("%d services of the peer are refused here in whole or in part: see the status of PeerServices in namespace %s", n, s.peering.Spec.TenantNamespace.Local))
	}
	if n := len(state.sharing.Refused); n > 0 {
		refused = append(refused, fmt.Sprintf("the peer refuses %d of our services in whole or in part: see the conditions of their ServiceExports", n))
	}
	if foreign := state.imports.Foreign; len(foreign) > 0 {
		refused = append(refused, "another implementation has "+strings.Join(foreign, ", "))
	}
	if len(refused) > 0 {
		return v(yes(isthmus.ReasonPartlyRefused, text+"; "+strings.Join(refused, "; ")))
	}
	return v(yes(isthmus.ReasonShared, text))
}
