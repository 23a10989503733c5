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

// A snapshot is the state on disk that an agent needs until it reaches an API server. After a
// reboot, the kernel has none of our objects. Without a snapshot, packets for remote networks would
// then leave by the default route.
type snapshot struct {
	Version int                 `json:"version"`
	Refused []fabric.Allocation `json:"refused"` // the networks of peers, with the NetworkAllocations that named them
}

const (
	snapshotVersion = 2
	snapshotName    = "route-agent.json"
	snapshotLimit   = 4 << 20 // octets; a thousand peers need 220 KiB
)

// readSnapshot returns the snapshot in a directory, or nil if there is none.
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
	for _, a := range s.Refused {
		if p := a.Network; !p.IsValid() || p != p.Masked() || p.Bits() == 0 {
			return nil, fmt.Errorf("snapshot %s: refused has %v; want a network", path, p)
		}
	}
	s.Refused = fabric.Latest(s.Refused)
	return &s, nil
}

// restore refuses packets for the networks in the snapshot, before the agent has read anything
// else. The function refused returns the networks for which a previous agent made the kernel refuse
// packets. restore keeps these networks, even if the snapshot lacks them. If refused fails, the
// agent must make no comparison, because a comparison would remove these networks. If the snapshot
// is unreadable, the node's status has this error until the first comparison, which writes a new
// snapshot.
func (l *loop) restore(refused func() ([]netip.Prefix, error)) error {
	l.recall()
	left, err := refused()
	if err != nil {
		return fmt.Errorf("networks that an earlier agent refused: %w", err)
	}
	l.allocations.hold(unexplained(slices.DeleteFunc(left, func(p netip.Prefix) bool { return contains(l.allocations.networks, p) })))
	return nil
}

// recall reads the snapshot, and refuses packets for its networks.
func (l *loop) recall() {
	if l.opts.StateDirectory == "" {
		return
	}
	saved, err := readSnapshot(l.opts.StateDirectory)
	if err != nil {
		l.log.Error("cannot read the snapshot; keeping the current routes until the API server answers", "error", err)
		l.last.err = err
		return
	}
	if saved == nil {
		return
	}
	l.saved = saved
	l.allocations.hold(saved.Refused)
	changes, err := l.kernel.Add(fabric.RefusingState(l.allocations.networks))
	if len(changes) > 0 {
		l.log.Info("refusing the networks in the snapshot", "networks", len(l.allocations.networks), "changes", len(changes))
	}
	if err != nil {
		l.log.Error("cannot refuse the networks in the snapshot", "error", err)
	}
	l.last.err = err
}

// networksOf returns the networks in a sorted list, without duplicates.
func networksOf(list []fabric.Allocation) []netip.Prefix {
	networks := make([]netip.Prefix, len(list))
	for i, a := range list {
		networks[i] = a.Network
	}
	return slices.Compact(networks)
}

// unexplained returns allocations for networks if the objects that named them are unknown.
func unexplained(all []netip.Prefix) (known []fabric.Allocation) {
	for _, p := range all {
		known = append(known, fabric.Allocation{Network: p, Revision: unknownRevision})
	}
	return known
}

// contains reports whether a sorted list contains a network.
func contains(list []netip.Prefix, p netip.Prefix) bool {
	_, found := slices.BinarySearchFunc(list, p, netip.Prefix.Compare)
	return found
}

// save writes the snapshot if it has changed. The snapshot contains all refused networks, including
// those that only tunnels name.
func (l *loop) save(refused []netip.Prefix) error {
	now := &snapshot{snapshotVersion, l.allocations.known}
	if !slices.Equal(refused, l.allocations.networks) {
		others := slices.DeleteFunc(slices.Clone(refused), func(p netip.Prefix) bool { return contains(l.allocations.networks, p) })
		known := slices.DeleteFunc(slices.Clone(l.allocations.known), func(k fabric.Allocation) bool { return !contains(refused, k.Network) })
		now.Refused = fabric.Latest(append(known, unexplained(others)...))
	}
	if l.opts.StateDirectory == "" || l.saved != nil && slices.Equal(now.Refused, l.saved.Refused) {
		return nil
	}
	if err := statefile.Write(l.opts.StateDirectory, snapshotName, snapshotLimit, now); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	l.saved = now
	return nil
}

// Other programs may change iptables-legacy at the same time. Cleanup then repeats its attempts for
// at most cleanupPatience.
const cleanupPatience = 30 * time.Second

// Cleanup removes all kernel objects of route agents in the network namespace of the process, and
// the snapshot in the directory. Use it to uninstall: from then on, packets for remote networks
// leave by other routes. It fails while an agent runs.
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
			return errors.New("iptables-legacy: the chain FORWARD still has our rules, because other programs keep changing it; run --cleanup again")
		}
		var more kernel.Plan
		more, err = k.Apply(kernel.State{})
		changes = append(changes, more...)
	}
	log.Info("removed all objects of the route agent", "changes", len(changes))
	return err
}
