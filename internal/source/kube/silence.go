package kube

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/voting"
)

// silence explains why this replica, as the holder, must not send to peers. It returns "" if the
// replica may send, or is not the holder.
func (e *election) silence() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.name != e.identity:
		return ""
	case e.lacking:
		if why := staleList(e.list, e.votes.View()); why != "" {
			return "not sending: " + why
		}
		return fmt.Sprintf("not sending: this gateway has no majority of the %d nodes that vote, %s; they have to answer at UDP port %d", len(e.list.Voters), strings.Join(slices.Sorted(maps.Keys(e.list.Voters)), ", "), voting.Port)
	case e.unanswered == "":
		return ""
	}
	return fmt.Sprintf("not sending: this gateway cannot renew the Lease %s, and Pod %s, which may have taken over, does not answer at UDP port %d", isthmus.LeaseGateway, e.unanswered, QuestionPort)
}

// unansweredGrace is how long a standby stays ready although too few voters answer, because a
// message may be late or an agent may restart.
const unansweredGrace = 3 * time.Second

// cannotTakeOver explains why this standby would not get a majority of votes. It returns nil if the
// standby would get one.
func (e *election) cannotTakeOver(now time.Time) error {
	if e.votes == nil {
		return nil
	}
	v := e.votes.View()
	e.mu.Lock()
	defer e.mu.Unlock()
	why := staleList(e.list, v)
	if !e.byVotesLocked() || e.name == e.identity || e.hasMajorityLocked(v) && why == "" || now.Sub(e.lastMajority) < unansweredGrace {
		return nil
	}
	if why != "" {
		return fmt.Errorf("this standby cannot take over: %s", why)
	}
	silent := maps.Clone(e.list.Voters)
	for _, name := range v.Heard {
		delete(silent, name)
	}
	return fmt.Errorf("this standby cannot take over: of the %d nodes that vote, %s do not answer it at UDP port %d, and it needs the votes of %d",
		len(e.list.Voters), strings.Join(slices.Sorted(maps.Keys(silent)), ", "), voting.Port, len(e.list.Voters)/2+1)
}
