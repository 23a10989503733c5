package routeagent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
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
	Refused networks `json:"refused"`
}

// networks are those of peers with the revisions that named them last, in JSON an object.
type networks []fabric.Allocation

// MarshalJSON implements json.Marshaler, at one go: with each allocation there are thousands.
func (n networks) MarshalJSON() ([]byte, error) {
	b := append(make([]byte, 0, len(`"255.255.255.255/32":1764288000000,`)*len(n)+2), '{')
	for i, a := range n {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(a.Network.AppendTo(append(b, '"')), `":`...)
		b = strconv.AppendInt(b, a.Revision, 10)
	}
	return append(b, '}'), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (n *networks) UnmarshalJSON(text []byte) error {
	var all map[netip.Prefix]int64
	if err := json.Unmarshal(text, &all); err != nil {
		return err
	}
	*n = nil
	for p, revision := range all {
		*n = append(*n, fabric.Allocation{Network: p, Revision: revision})
	}
	*n = fabric.Latest(*n)
	return nil
}

const (
	snapshotVersion = 2
	snapshotName    = "route-agent.json"
	snapshotLimit   = 1 << 20 // octets; a thousand peers need 80 KiB
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
	for _, a := range s.Refused {
		if p := a.Network; !p.IsValid() || p != p.Masked() || p.Bits() == 0 {
			return nil, fmt.Errorf("snapshot %s: refused has %v; want a network", path, p)
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
	a.grants.hold(unexplained(left))
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
	a.grants.hold(saved.Refused)
	changes, err := a.kernel.Add(fabric.RefusingState(networksOf(saved.Refused)))
	if len(changes) > 0 {
		a.log.Info("refusing what the snapshot says", "networks", len(saved.Refused), "changes", len(changes))
	}
	if err != nil {
		a.log.Error("refusing what the snapshot says", "error", err)
	}
	a.state.err = err
}

// networksOf are those of a list.
func networksOf(list []fabric.Allocation) []netip.Prefix {
	networks := make([]netip.Prefix, len(list))
	for i, a := range list {
		networks[i] = a.Network
	}
	return networks
}

// unexplained are networks of which nobody knows which revision named them.
func unexplained(all []netip.Prefix) (known []fabric.Allocation) {
	for _, p := range all {
		known = append(known, fabric.Allocation{Network: p, Revision: unknownRevision})
	}
	return known
}

// save keeps what is refused for an agent that starts when nobody can be asked. Networks that only tunnels
// name are in it too.
func (a *agent) save(refused []netip.Prefix) error {
	now := &snapshot{snapshotVersion, a.grants.known}
	if !slices.Equal(refused, a.grants.networks) {
		now.Refused = unexplained(refused)
		for i, n := range now.Refused {
			if at, known := find(a.grants.known, n.Network); known {
				now.Refused[i] = a.grants.known[at]
			}
		}
	}
	if a.opts.StateDirectory == "" || a.saved != nil && slices.Equal(now.Refused, a.saved.Refused) {
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
