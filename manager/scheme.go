package manager

import (
	"errors"

	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// newScheme returns a scheme with all kinds that a manager reads or writes.
func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	peers.AddForeignClusters(scheme)
	return scheme, errors.Join(clientgoscheme.AddToScheme(scheme), isthmus.AddToScheme(scheme), v1alpha1.AddToScheme(scheme), mcs.Install(scheme))
}
