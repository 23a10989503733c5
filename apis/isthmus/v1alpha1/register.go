package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is isthmus.net/v1alpha1.
var GroupVersion = schema.GroupVersion{Group: "isthmus.net", Version: "v1alpha1"}

// SchemeBuilder collects the functions that register the kinds of this package.
var SchemeBuilder = runtime.NewSchemeBuilder(addKnownTypes)

// AddToScheme registers the kinds of this package and their lists.
var AddToScheme = SchemeBuilder.AddToScheme

func addKnownTypes(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion, &Peering{}, &PeeringList{}, &NodeNetworks{}, &NodeNetworksList{}, &NetworkAllocation{}, &NetworkAllocationList{},
		&PeerServices{}, &PeerServicesList{})
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
