package v1alpha1

import (
	"encoding/json"
	"fmt"
)

// AnnotationTakeover on the Lease of the gateways has the Takeover of its holder, as JSON.
const AnnotationTakeover = "isthmus.net/takeover"

// A Takeover is why a gateway became active.
//
// +kubebuilder:object:generate=false
type Takeover struct {
	Pod    string `json:"pod"`
	Reason string `json:"reason"`
	// Former is the Pod that was active before; empty: unknown, or none was.
	Former string `json:"former,omitempty"`
}

// Reasons of a Takeover.
const (
	TakeoverReleased   = "Released"   // the former gateway ended in order: a drain, a rollout, `isthmus release-gateway`
	TakeoverNotHeard   = "NotHeard"   // a majority of the voting nodes did not hear the former gateway
	TakeoverExpired    = "Expired"    // the former gateway did not renew the Lease
	TakeoverNoneActive = "NoneActive" // there was no Lease, or no gateway was known to be active
	TakeoverResumed    = "Resumed"    // the gateway itself was active before a restart, and read no Lease since
)

// TakeoverReasons has all reasons of a Takeover.
var TakeoverReasons = []string{TakeoverReleased, TakeoverNotHeard, TakeoverExpired, TakeoverNoneActive, TakeoverResumed}

// TakeoverOf parses an AnnotationTakeover. It returns the zero Takeover unless that is about the
// holder: an older version of the gateway leaves the annotation of its predecessor.
func TakeoverOf(annotation, holder string) Takeover {
	var t Takeover
	if json.Unmarshal([]byte(annotation), &t) != nil || t.Pod != holder {
		return Takeover{}
	}
	return t
}

// Annotation returns the AnnotationTakeover.
func (t Takeover) Annotation() string {
	b, err := json.Marshal(t)
	if err != nil {
		panic(err) // strings can be marshalled
	}
	return string(b)
}

// String explains the reason. It is empty if that is unknown.
func (t Takeover) String() string {
	former := "the former gateway"
	if t.Former != "" {
		former = "Pod " + t.Former
	}
	switch t.Reason {
	case "":
		return ""
	case TakeoverReleased:
		return former + " handed over"
	case TakeoverNotHeard:
		return "most voting nodes did not hear " + former
	case TakeoverExpired:
		return former + " did not renew the Lease"
	case TakeoverNoneActive:
		return "no gateway was active"
	case TakeoverResumed:
		return "it was active before its restart"
	}
	return fmt.Sprintf("%s, after %s", t.Reason, former) // of a later version
}
