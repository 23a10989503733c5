package routeagent

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
	"github.com/isthmus-net/isthmus/internal/statefile"
)

// snapshot is what an agent has to know before it can ask anybody: after a reboot the kernel holds
// nothing of ours, and a packet for a remote network would leave by the default route.
type snapshot struct {
	Version int      `json:"version"`
	Refused networks `json:"refused"`           // of peers
	Edition int64    `json:"edition,omitempty"` // of the books that were read last; 0, or one that does not count: an older agent's
}

// networks are in JSON as without it, but made at one go: with each grant there are thousands.
type networks []netip.Prefix

// MarshalJSON implements json.Marshaler.
func (n networks) MarshalJSON() ([]byte, error) {
	b := append(make([]byte, 0, len(`"255.255.255.255/32",`)*len(n)+2), '[')
	for i, p := range n {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(p.AppendTo(append(b, '"')), '"')
	}
	return append(b, ']'), nil
}

const (
	snapshotVersion = 1
	snapshotName    = "route-agent.json"
	snapshotLimit   = 1 << 20 // octets; a thousand peers need 50 KiB
)

// readSnapshot returns the snapshot of a directory, nil if there is none.
func readSnapshot(directory string) (*snapshot, error) {
	var s snapshot
	err := statefile.Read(directory, snapshotName, snapshotLimit, &s)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("snapshot: %w", err)
	}
	path := filepath.Join(directory, snapshotName)
	if s.Version != snapshotVersion {
		return nil, fmt.Errorf("snapshot %s: version %d; want %d", path, s.Version, snapshotVersion)
	}
	for i, p := range s.Refused {
		if !p.IsValid() || p != p.Masked() || p.Bits() == 0 {
			return nil, fmt.Errorf("snapshot %s: refused[%d] is %v; want a network", path, i, p)
		}
	}
	return &s, nil
}

// restore refuses what the snapshot says, before anything is read from anywhere. It adds only: what
// an agent before left stays, also what the kernel refuses and no snapshot knows of. A snapshot that
// cannot be read is told until a good one has replaced it.
func (a *agent) restore() {
	left, err := a.kernel.Refused()
	if err != nil {
		a.log.Error("what an agent before refused", "error", err)
	}
	if len(left) > 0 {
		a.grants.hold(left, unknownEdition)
	}
	if a.opts.StateDirectory == "" {
		return
	}
	saved, err := readSnapshot(a.opts.StateDirectory)
	if err != nil {
		a.log.Error("what is there stays as it is, nothing else is refused until the API server answers", "error", err)
		a.state.err = err
		return
	}
	if saved == nil {
		return
	}
	a.saved = saved
	a.grants.hold(saved.Refused, saved.edition(left, time.Now()))
	changes, err := a.kernel.Add(fabric.RefusingState(saved.Refused))
	if len(changes) > 0 {
		a.log.Info("refusing what the snapshot says", "networks", len(saved.Refused), "changes", len(changes))
	}
	if err != nil {
		a.log.Error("refusing what the snapshot says", "error", err)
	}
	a.state.err = err
}

// edition is that of the networks of a snapshot and those that the kernel refuses. It is unknown when
// the kernel's are more: they were granted after the last snapshot that could be written.
func (s *snapshot) edition(left []netip.Prefix, now time.Time) int64 {
	edition := fabric.Edition(s.Edition, now)
	unexplained := slices.ContainsFunc(left, func(p netip.Prefix) bool { return !slices.Contains(s.Refused, p) })
	if unexplained || edition == 0 && len(s.Refused)+len(left) > 0 {
		return unknownEdition
	}
	return edition
}

// save keeps what is refused for an agent that starts when nobody can be asked.
func (a *agent) save(refused []netip.Prefix) error {
	now := &snapshot{snapshotVersion, refused, max(a.grants.edition, 0)}
	if a.opts.StateDirectory == "" || a.saved != nil && slices.Equal(now.Refused, a.saved.Refused) && now.Edition == a.saved.Edition {
		return nil
	}
	if err := statefile.Write(a.opts.StateDirectory, snapshotName, snapshotLimit, now); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	a.saved = now
	return nil
}

// cleanupPatience is how long others may change iptables-legacy while it is cleaned up.
const cleanupPatience = 30 * time.Second

// Cleanup removes everything that route agents made in the network namespace of the process, and
// the snapshot in the directory. It is for the end of an installation: packets for remote networks
// leave by other routes from then on. It fails while an agent runs.
func Cleanup(log *slog.Logger, directory string) error {
	k, err := rtnl.Open(kernel.RouteAgent, log)
	if err != nil {
		return err
	}
	defer k.Close()
	if directory != "" {
		if err := statefile.Remove(directory, snapshotName); err != nil {
			return fmt.Errorf("snapshot: %w", err)
		}
	}
	changes, err := k.Apply(kernel.State{})
	for end := time.Now().Add(cleanupPatience); err == nil && k.Busy(); time.Sleep(busyInterval) {
		if time.Now().After(end) {
			return errors.New("others change iptables-legacy all the time, and rules of ours are left in its FORWARD; want another --cleanup")
		}
		var more kernel.Plan
		more, err = k.Apply(kernel.State{})
		changes = append(changes, more...)
	}
	log.Info("everything of route agents is removed", "changes", len(changes))
	return err
}
