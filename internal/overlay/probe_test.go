package overlay

import (
	"strings"
	"testing"
	"time"
)

func TestOverlayIsReportedBrokenOnlyIfTheUnderlayWorks(t *testing.T) {
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		rounds string // one letter per round; o: both answered, u: only the underlay, O: only the overlay, -: none
		broken bool
	}{
		{"oooo", false}, {"uuu", false}, {"uuuu", true}, {"ouuuu", true}, {"uuuuo", false}, {"uuuuO", false},
		{"uuuouuu", false}, {"----------", false}, {"uuu-uuu", false}, {"uuuu-", true}, {"uuuu-uo", false},
	} {
		var p State
		for i, r := range c.rounds {
			p.Take(now.Add(time.Duration(i)*time.Minute), r == 'o' || r == 'O', r == 'o' || r == 'u')
		}
		if p.Broken != c.broken || p.Broken == p.Since.IsZero() {
			t.Errorf("%s: %+v", c.rounds, p)
		}
		if p.Broken && p.Since != now.Add(time.Duration(strings.Index(c.rounds, "uuuu"))*time.Minute) {
			t.Errorf("%s: since %v", c.rounds, p.Since)
		}
	}
}
