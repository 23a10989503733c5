package v1alpha1

import (
	"encoding/json"
	"fmt"
	"time"
)

// AnnotationTakeover on the gateways' Lease is the Takeover of the gateway that holds the Lease, as
// JSON.
const AnnotationTakeover = "isthmus.net/takeover"

// A Takeover describes why a gateway became active. The gateway writes it to the Lease.
// +kubebuilder:object:generate=false
type Takeover struct {
	Pod    string `json:"pod"`
	Reason string `json:"reason"`
	// Previous is the Pod that was active before. It is empty if there was none, or if that Pod is
	// unknown.
	Previous string `json:"previous,omitempty"`
}

// Reasons of a Takeover.
const (
	TakeoverReleased   = "Released"   // the previous gateway shut down cleanly, for example at a drain, a rollout or `isthmus release-gateway`, or it gave up its votes
	TakeoverNotHeard   = "NotHeard"   // a majority of the voting nodes did not hear the previous gateway
	TakeoverExpired    = "Expired"    // the previous gateway did not renew the Lease
	TakeoverNoneActive = "NoneActive" // there was no Lease, or no gateway was known to be active
	TakeoverResumed    = "Resumed"    // the gateway was active before its restart, and no API server answered
)

// TakeoverReasons has all reasons of a Takeover.
var TakeoverReasons = []string{TakeoverReleased, TakeoverNotHeard, TakeoverExpired, TakeoverNoneActive, TakeoverResumed}

// TakeoverOf parses the value of AnnotationTakeover. holder is the gateway that holds the Lease. If
// the value names another gateway, TakeoverOf returns the zero Takeover: an older version of the
// gateway does not write the annotation, so that of its predecessor stays in place.
func TakeoverOf(annotation, holder string) Takeover {
	var t Takeover
	if json.Unmarshal([]byte(annotation), &t) != nil || t.Pod != holder {
		return Takeover{}
	}
	return t
}

// Annotation returns the value of AnnotationTakeover.
func (t Takeover) Annotation() string {
	b, err := json.Marshal(t)
	if err != nil {
		panic(err) // cannot happen: t has only strings
	}
	return string(b)
}

// String explains the reason to users. It is empty if the reason is unknown.
func (t Takeover) String() string {
	previous := "the previous gateway"
	if t.Previous != "" {
		previous = "Pod " + t.Previous
	}
	switch t.Reason {
	case "":
		return ""
	case TakeoverReleased:
		return previous + " handed over"
	case TakeoverNotHeard:
		return "most voting nodes did not hear " + previous
	case TakeoverExpired:
		return previous + " did not renew the Lease"
	case TakeoverNoneActive:
		return "no gateway was active"
	case TakeoverResumed:
		return "it was active before its restart"
	}
	return fmt.Sprintf("%s, after %s", t.Reason, previous) // a reason of a later version
}

// A Mandate states since when a gateway is active, and why.
// +kubebuilder:object:generate=false
type Mandate struct {
	Epoch int32     `json:"epoch"` // grows with each takeover
	Since time.Time `json:"since"`
	Takeover
}
