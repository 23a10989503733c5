package routeagent

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

type failingVoter struct{ err error }

func (failingVoter) Run(context.Context)            {}
func (v failingVoter) Err() error                   { return v.err }
func (failingVoter) Refused() (read, unread uint64) { return 0, 0 }

func TestNodeReportsThatItCannotVote(t *testing.T) {
	voter := &failingVoter{errors.New("promise: no space left on device")}
	l := &loop{opts: Options{Voter: voter}}
	limits := []kernel.Limit{{Reason: kernel.LimitMasqueraded}}
	for range 2 { // the second time, the Limit exists already
		if limits = l.withFiles(limits, nil); len(limits) != 2 || limits[1].Reason != kernel.LimitVote || !strings.Contains(limits[1].Message, "no space left") {
			t.Errorf("limits: %v", limits)
		}
	}
	voter.err = nil
	if limits = l.withFiles(limits, nil); len(limits) != 1 {
		t.Errorf("limits of a node that votes: %v", limits)
	}
}
