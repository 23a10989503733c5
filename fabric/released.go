package fabric

import (
	"encoding/json"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// ReleaseHold is how long a released network is held: every node refuses it, and no other cluster gets it.
const ReleaseHold = 24 * time.Hour

// Released is the annotation isthmus.net/released-networks of the IPAM state: the networks that peers gave
// up. The keys of the maps are times in RFC 3339, by the API server's clock.
type Released struct {
	// Peers are peers that have left. The networks that the IPAM state has for them are held.
	Peers map[string][]string `json:"released,omitempty"`
	// Replaced are held networks of peers that have other ones now, by cluster ID.
	Replaced map[string]map[string][]string `json:"replaced,omitempty"`
	// Unused are peers with networks that no object of a peering names, by the time since when.
	Unused map[string][]string `json:"unused,omitempty"`
}

// ReleasedFrom reads the annotation.
func ReleasedFrom(annotations map[string]string) (r Released, err error) {
	if text := annotations[isthmus.AnnotationReleased]; text != "" {
		err = json.Unmarshal([]byte(text), &r)
	}
	return r, err
}

// Text returns the annotation; empty if there is nothing to record.
func (r Released) Text() string {
	if len(r.Peers)+len(r.Replaced)+len(r.Unused) == 0 {
		return ""
	}
	text, err := json.Marshal(r)
	if err != nil {
		panic(err) // maps of texts
	}
	return string(text)
}
