package voting

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/mandate"
)

// A voter that is free long before its holder's time has ended was released. A voter that was
// only late to answer was not.
func TestCandidateNoticesTheReleaseOfAMajority(t *testing.T) {
	c := NewCandidate("me", netip.MustParseAddr("192.0.2.9"), func() [32]byte { return private }, slog.New(slog.DiscardHandler))
	list := List{Version: 1, Voters: make(map[string]netip.Addr)}
	for i, name := range []string{"n1", "n2", "n3"} {
		list.Voters[name] = netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
	}
	c.Learn(list, false)
	for _, step := range []struct {
		voter, holder mandate.ID
		free          time.Duration
		want          bool
	}{
		{"n1", "you", 0, false},
		{"n1", "you", time.Hour, false},
		{"n2", "you", time.Hour, false},
		{"n1", "me", 0, false}, // the voter votes for this gateway, and may be free for that reason only
		{"n2", "me", 0, false},
		{"n3", "you", 2 * mandate.Usual.Beat, false},
		{"n3", "you", 0, false}, // the holder's time may have ended
		{"n1", "you", 0, false}, // only one of three is released
		{"n2", "you", 0, true},
		{"n1", "you", 0, true},
		{"n1", "me", 0, true},
		{"n2", "another", time.Hour, false},
	} {
		answer := answer{mandate.Answer{From: step.voter, Promise: mandate.Promise{Holder: step.holder}, Free: step.free}, c.voters[step.voter].cookie}
		c.receive(answer, nil)
		if got := c.View().Released; got != step.want {
			t.Errorf("after %s, free of %s in %v: released: %v", step.voter, step.holder, step.free, got)
		}
	}
}
