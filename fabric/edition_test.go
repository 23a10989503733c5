package fabric

import (
	"math"
	"strconv"
	"testing"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// Whatever number somebody writes, the manager's next one is above it, or it does not count.
func TestNoEditionIsAboveAllThatFollow(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	day := now.Add(24 * time.Hour).UnixMilli()
	for text, want := range map[string]int64{
		"": 0, "x": 0, "-1": 0, "7": 7, "99999999999999999999": 0,
		strconv.FormatInt(now.UnixMilli(), 10): now.UnixMilli(),
		strconv.FormatInt(day, 10):             day,
		strconv.FormatInt(day+1, 10):           0,
		strconv.FormatInt(now.UnixNano(), 10):  0,
		strconv.FormatInt(1<<62-1, 10):         0,
		strconv.FormatInt(1<<62, 10):           0,
		strconv.FormatInt(math.MaxInt64, 10):   0,
	} {
		if got := EditionOf(map[string]string{isthmus.AnnotationEdition: text}, now); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
}
