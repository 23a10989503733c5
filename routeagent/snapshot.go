package routeagent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
)

// snapshot is what an agent has to know before it can ask anybody: after a reboot the kernel holds
// nothing of ours, and a packet for a remote network would leave by the default route.
type snapshot struct {
	Version int            `json:"version"`
	Refused []netip.Prefix `json:"refused"` // networks of peers
}

const (
	snapshotVersion = 1
	snapshotName    = "route-agent.json"
	snapshotLimit   = 1 << 20 // octets; a thousand peers need 50 KiB
)

// readSnapshot returns the networks in the snapshot of a directory, none if there is no snapshot.
func readSnapshot(directory string) ([]netip.Prefix, error) {
	path := filepath.Join(directory, snapshotName)
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("snapshot: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, snapshotLimit+1))
	if err != nil {
		return nil, fmt.Errorf("snapshot: %w", err)
	}
	if len(b) > snapshotLimit {
		return nil, fmt.Errorf("snapshot %s: larger than %d octets", path, snapshotLimit)
	}
	var s snapshot
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", path, err)
	}
	if s.Version != snapshotVersion {
		return nil, fmt.Errorf("snapshot %s: version %d; want %d", path, s.Version, snapshotVersion)
	}
	for i, p := range s.Refused {
		if !p.IsValid() || p != p.Masked() || p.Bits() == 0 {
			return nil, fmt.Errorf("snapshot %s: refused[%d] is %v; want a network", path, i, p)
		}
	}
	return s.Refused, nil
}

// writeSnapshot replaces the snapshot in one step: a reader finds the old one or the new one, also
// after the power failed.
func writeSnapshot(directory string, refused []netip.Prefix) error {
	b, err := json.Marshal(snapshot{snapshotVersion, refused})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(directory, "."+snapshotName+"-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // it is gone when it was renamed
	_, err = f.Write(append(b, '\n'))
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), filepath.Join(directory, snapshotName)); err != nil {
		return err
	}
	d, err := os.Open(directory)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// restore refuses what the snapshot says, before anything is read from anywhere. It adds only: what
// an agent before left stays. A snapshot that cannot be read is told until a good one has replaced
// it.
func (a *agent) restore() {
	if a.opts.StateDirectory == "" {
		return
	}
	refused, err := readSnapshot(a.opts.StateDirectory)
	if err != nil {
		a.log.Error("what is there stays as it is, nothing else is refused until the API server answers", "error", err)
		a.state.err = err
		return
	}
	a.granted, a.saved = refused, refused
	changes, err := a.kernel.Add(fabric.RefusingState(refused))
	if len(changes) > 0 {
		a.log.Info("refusing what the snapshot says", "networks", len(refused), "changes", len(changes))
	}
	if err != nil {
		a.log.Error("refusing what the snapshot says", "error", err)
	}
	a.state.err = err
}

// save keeps what is refused for an agent that starts when nobody can be asked.
func (a *agent) save(in fabric.NodeIntent) error {
	refused := in.Refused()
	if a.opts.StateDirectory == "" || a.saved != nil && slices.Equal(refused, a.saved) {
		return nil
	}
	if err := writeSnapshot(a.opts.StateDirectory, refused); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	if a.saved = refused; refused == nil {
		a.saved = []netip.Prefix{}
	}
	return nil
}

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
		if err := os.Remove(filepath.Join(directory, snapshotName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("snapshot: %w", err)
		}
	}
	changes, err := k.Apply(kernel.State{})
	log.Info("everything of route agents is removed", "changes", len(changes))
	return err
}
