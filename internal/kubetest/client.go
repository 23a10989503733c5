package kubetest

import (
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// NewScheme returns a scheme with the kinds of Kubernetes, Isthmus, Liqo and the Multi-Cluster
// Services API.
func NewScheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme, apiextensions.AddToScheme, v1alpha1.AddToScheme, isthmus.AddToScheme, mcs.Install,
	} {
		if err := add(scheme); err != nil {
			panic(err) // programming error: two kinds have the same name
		}
	}
	return scheme
}

// Config returns the configuration of a client with an administrator's rights. The client has no
// rate limit, and connects by Options.Dial if that is set.
func (s *Server) Config() (*rest.Config, error) {
	config, err := clientcmd.RESTConfigFromKubeConfig(s.admin)
	if err != nil {
		return nil, err
	}
	config.QPS = -1
	if s.opts.Starter != nil {
		config.Dial = s.opts.Dial
	}
	return config, nil
}

// Client returns a client with an administrator's rights for the kinds of NewScheme.
func (s *Server) Client() (client.WithWatch, error) {
	config, err := s.Config()
	if err != nil {
		return nil, err
	}
	return client.NewWithWatch(config, client.Options{Scheme: NewScheme()})
}
