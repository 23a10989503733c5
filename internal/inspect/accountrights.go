package inspect

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"sync"

	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/safetext"

	authorizationv1 "k8s.io/api/authorization/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/install"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
)

// A need is a permission that a component requires.
type need struct {
	account    string
	attributes authorizationv1.ResourceAttributes
}

func (n need) String() string {
	a := n.attributes
	what := a.Resource
	if a.Subresource != "" {
		what += "/" + a.Subresource
	}
	if a.Group != "" {
		what += "." + a.Group
	}
	if a.Name != "" {
		what += " " + a.Name
	}
	if a.Namespace != "" {
		what += " in " + a.Namespace
	}
	return fmt.Sprintf("%s is not allowed to %s %s", n.account, a.Verb, what)
}

// needs returns the rights that deploy/rbac grants to the components, except the right to write
// Events, because everything works without it.
func needs(namespace string) (all []need, err error) {
	paths, err := fs.Glob(deploy.Files, "rbac/*.yaml")
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		text, err := deploy.Files.ReadFile(path)
		if err != nil {
			return nil, err
		}
		d := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096)
		for {
			var role rbacv1.ClusterRole // the fields read here are the same in a Role
			if err := d.Decode(&role); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
			in := role.Namespace
			switch role.Kind {
			case "Role":
				if in == deploy.Namespace {
					in = namespace
				}
			case "ClusterRole":
			default:
				continue
			}
			for _, rule := range role.Rules {
				all = append(all, needsOf(role.Name, in, rule)...)
			}
		}
	}
	return all, nil
}

func needsOf(account, namespace string, rule rbacv1.PolicyRule) (all []need) {
	names := rule.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	for _, group := range rule.APIGroups {
		if group == eventsv1.GroupName {
			continue
		}
		for _, r := range rule.Resources {
			resource, sub, _ := strings.Cut(r, "/")
			for _, name := range names {
				for _, verb := range rule.Verbs {
					all = append(all, need{account, authorizationv1.ResourceAttributes{
						Namespace: namespace, Group: group, Resource: resource, Subresource: sub, Name: name, Verb: verb}})
				}
			}
		}
	}
	return all
}

const concurrentRequests = 16

// rightsHop checks, by SubjectAccessReviews, whether the components have the rights that they need.
// lacking lists the accounts that lack a right. hop is nil if the user may not create such reviews.
func rightsHop(ctx context.Context, c *cluster.Cluster) (hop *health.Hop, lacking []string, err error) {
	all, err := needs(c.Namespace)
	if err != nil {
		return nil, nil, err
	}
	denied, errs := make([]bool, len(all)), make([]error, len(all))
	review := func(i int) {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User:   fmt.Sprintf("system:serviceaccount:%s:%s", c.Namespace, all[i].account),
			Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + c.Namespace, "system:authenticated"}, ResourceAttributes: &all[i].attributes}}
		errs[i] = c.Client.Create(ctx, review)
		denied[i] = errs[i] == nil && !review.Status.Allowed
	}
	if review(0); kubeerr.Forbidden(errs[0]) {
		return nil, nil, nil
	}
	var group sync.WaitGroup
	slots := make(chan struct{}, concurrentRequests)
	for i := 1; i < len(all); i++ {
		slots <- struct{}{}
		group.Go(func() {
			review(i)
			<-slots
		})
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, nil, c.Explain("rights of the components", err)
	}
	hop = &health.Hop{Cluster: c.String(), Name: health.HopRights, State: health.Works, Text: "the components have all rights that they need", Source: "SubjectAccessReviews"}
	var missing []string
	for i, n := range all {
		if denied[i] {
			missing, lacking = append(missing, "ServiceAccount "+n.String()), append(lacking, n.account)
		}
	}
	if len(missing) > 0 {
		release, _ := install.HelmRelease(ctx, c) // ignore the error: `isthmus install` reports it
		hop.State, hop.Reason = health.Broken, "RightsMissing"
		hop.Text = fmt.Sprintf("%s; to grant these rights, run %s", safetext.FirstFew(missing, "; "), repairCommand(c, release))
	}
	return hop, lacking, nil
}

// repairCommand returns the command that grants the rights to the components.
func repairCommand(c *cluster.Cluster, release string) string {
	if release != "" {
		return fmt.Sprintf("`helm upgrade %s` with this program's chart", safetext.Of(release))
	}
	return fmt.Sprintf("`isthmus install --context %s`", c.Context)
}
