package fabric

import (
	"strconv"
	"testing"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

func TestAnEditionThatNoManagerWouldPassDoesNotCount(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	at := func(d time.Duration) string { return strconv.FormatInt(now.Add(d).UnixMilli(), 10) }
	for text, want := range map[string]int64{
		"": 0, "x": 0, "-3": 0, "7": 7, at(0): now.UnixMilli(), at(time.Hour): now.Add(time.Hour).UnixMilli(),
		at(25 * time.Hour): 0, "4611686018427387903": 0, "4611686018427387904": 0, "9223372036854775807": 0,
	} {
		if got := EditionOf(map[string]string{isthmus.AnnotationEdition: text}, now); got != want {
			t.Errorf("%q: %d; want %d", text, got, want)
		}
	}
}
