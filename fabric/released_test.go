package fabric

import (
	"testing"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

func TestTheAnnotationOfReleasedNetworksIsReadAsItWasWritten(t *testing.T) {
	text := `{"released":{"2026-11-25T12:00:00Z":["gone"]},"replaced":{"2026-11-25T12:00:00Z":{"c":["10.66.0.0/16"]}}}`
	r, err := ReleasedFrom(map[string]string{isthmus.AnnotationReleased: text})
	if err != nil || r.Text() != text || (Released{}).Text() != "" {
		t.Errorf("%s, %v", r.Text(), err)
	}
	if _, err := ReleasedFrom(map[string]string{isthmus.AnnotationReleased: "{"}); err == nil {
		t.Error("nonsense is read")
	}
}
