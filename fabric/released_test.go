package fabric

import (
	"net/netip"
	"slices"
	"testing"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// An agent that reads the IPAM state itself finds all held networks in it: those of peers that have left
// among the others, and replaced ones in the annotation.
func TestAnAgentThatReadsTheIPAMStateFindsWhatIsHeld(t *testing.T) {
	books := &v1alpha1.IpamStorage{Spec: v1alpha1.IpamStorageSpec{ClusterSubnets: map[string]v1alpha1.Subnets{
		"gone": {RemotePodCIDR: "10.64.0.0/16", RemoteExternalCIDR: "10.65.0.0/20"}}}}
	books.Annotations = map[string]string{isthmus.AnnotationReleased: `{"released":{"2026-11-25T12:00:00Z":["gone"]},"replaced":{"2026-11-25T12:00:00Z":{"c":["10.66.0.0/16","0.0.0.0/0","x"]}}}`}
	granted, problems := GrantedIn(books)
	want := []netip.Prefix{netip.MustParsePrefix("10.64.0.0/16"), netip.MustParsePrefix("10.65.0.0/20"), netip.MustParsePrefix("10.66.0.0/16")}
	if !slices.Equal(granted, want) || len(problems) > 0 {
		t.Errorf("%v, %v; want %v", granted, problems, want)
	}
	r, err := ReleasedFrom(books.Annotations)
	if err != nil || r.Text() != books.Annotations[isthmus.AnnotationReleased] || (Released{}).Text() != "" {
		t.Errorf("%s, %v", r.Text(), err)
	}
	books.Annotations[isthmus.AnnotationReleased] = "{"
	if granted, problems := GrantedIn(books); len(granted) != 2 || len(problems) != 1 {
		t.Errorf("an annotation that cannot be read: %v, %v", granted, problems)
	}
}
