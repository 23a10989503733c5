package manager

import (
	"testing"

	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
)

// `isthmus install` may start a manager while the deletion of CRDs waits only for our finalizers.
func TestStartingManagerRemovesFinalizersWhileCRDsAreDeleted(t *testing.T) {
	a, b := twoSides(t)
	ready(a, b)
	b.stop()
	definitions := make([]*apiextensions.CustomResourceDefinition, 2)
	for i, name := range []string{"peerings.isthmus.net", "networkconfigs.net.liqo.io"} {
		definitions[i] = &apiextensions.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: name}}
		b.OK(b.API().Delete(b.Ctx, definitions[i]))
	}
	b.Until("the Peering is being deleted", func() bool {
		var p isthmus.Peering
		b.OK(b.API().Get(b.Ctx, client.ObjectKeyFromObject(b.peer.Peering), &p))
		return !p.DeletionTimestamp.IsZero()
	})
	b.manage()
	for _, d := range definitions {
		b.Until(d.Name+" is gone", func() bool {
			crd, err := controllers.Found(b.Ctx, b.API(), client.ObjectKeyFromObject(d), new(apiextensions.CustomResourceDefinition))
			b.OK(err)
			return crd == nil
		})
	}
	b.stop()
	part(a)
}
