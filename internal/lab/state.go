package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// stateDir contains the files of all existing labs:
//
//	/run/isthmus-lab/.lock           held while labs are created, swept and removed
//	/run/isthmus-lab/NAME/lock       held by the owner as long as it lives
//	/run/isthmus-lab/NAME/lab.json   state, below
//	/run/isthmus-lab/NAME/CLUSTER/   configuration directory of the cluster's gateway
//	/run/isthmus-lab/NAME/log/       output of the gateways
//	/run/netns/isthmus.NAME.HOST     its namespaces
//
// The kernel releases an flock when the process that holds it ends. So if the lock is free, the
// owner has ended.
const stateDir = "/run/isthmus-lab"

const (
	lockFile  = "lock"
	stateFile = "lab.json"
	logDir    = "log"
)

// state is the data that another process needs to use or remove the lab.
type state struct {
	Spec       Spec      `json:"spec"`       // with default values filled in
	Persistent bool      `json:"persistent"` // outlives its owner
	Boot       string    `json:"boot"`       // kernel boot ID: a reboot removes a lab's namespaces
	Owner      int       `json:"owner"`      // process ID, for messages only
	Joins      []join    `json:"joins"`
	Mappings   []mapping `json:"mappings"`
}

// join is a pair of clusters, with the networks that each uses for the other.
type join struct {
	A   string `json:"a"`
	B   string `json:"b"`
	AtA View   `json:"atA"` // the networks that A uses for B
	AtB View   `json:"atB"`
}

// mapping maps an address of a cluster's ExternalCIDR to an endpoint outside the cluster's pods.
type mapping struct {
	Cluster  string     `json:"cluster"`
	Real     netip.Addr `json:"real"`
	External netip.Addr `json:"external"`
}

func dirOf(name string) string { return filepath.Join(stateDir, name) }

// locked runs f while no other process creates, sweeps or removes labs.
func locked(f func() error) error {
	unlock, err := lockAll()
	if err != nil {
		return err
	}
	defer unlock()
	return f()
}

func lockAll() (unlock func(), err error) {
	path := filepath.Join(stateDir, ".lock")
	for {
		if err := os.MkdirAll(stateDir, 0o755); err != nil {
			return nil, err
		}
		file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
		if errors.Is(err, fs.ErrNotExist) {
			continue // another process has removed the directory together with the last lab
		}
		if err != nil {
			return nil, err
		}
		if err := flock(file, unix.LOCK_EX); err != nil {
			file.Close()
			return nil, err
		}
		// While this process waited for the lock, the previous holder may have removed the file.
		if !isFile(file, path) {
			file.Close()
			continue
		}
		return func() {
			if entries, err := os.ReadDir(stateDir); err == nil && len(entries) == 1 {
				_ = errors.Join(os.Remove(path), os.Remove(stateDir)) // a leftover empty directory is harmless
			}
			file.Close()
		}, nil
	}
}

func isFile(file *os.File, path string) bool {
	have, err := file.Stat()
	if err != nil {
		return false
	}
	want, err := os.Stat(path)
	return err == nil && os.SameFile(have, want)
}

func flock(file *os.File, how int) error {
	for {
		err := unix.Flock(int(file.Fd()), how)
		if err == nil {
			return nil
		}
		if err != unix.EINTR {
			return &os.PathError{Op: "flock", Path: file.Name(), Err: err}
		}
	}
}

// acquire acquires the owner's lock of a lab and creates its directory. It returns ErrInUse if a
// live process holds the lock.
func acquire(name string) (*os.File, error) {
	if err := os.MkdirAll(dirOf(name), 0o755); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(dirOf(name), lockFile), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := flock(file, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		file.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lab %q %w", name, ErrInUse)
		}
		return nil, err
	}
	return file, nil
}

// names returns the names of all labs that have files or namespaces, even of labs whose owner has
// ended.
func names() ([]string, error) {
	var all []string
	dirs, err := os.ReadDir(stateDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, d := range dirs {
		if d.IsDir() {
			all = append(all, d.Name())
		}
	}
	namespaces, err := filepath.Glob(filepath.Join(netnsDir, netnsPrefix+"*.*"))
	if err != nil {
		return nil, err
	}
	for _, n := range namespaces {
		name, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(n), netnsPrefix), ".")
		all = append(all, name)
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

func readState(name string) (state, error) {
	var s state
	data, err := os.ReadFile(filepath.Join(dirOf(name), stateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return s, fmt.Errorf("lab %q %w", name, ErrNotFound)
	}
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("lab %s: %s: %w", name, stateFile, err)
	}
	return s, nil
}

func (s state) write() error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(filepath.Join(dirOf(s.Spec.Name), stateFile), append(data, '\n'), 0o644)
}

// writeFile replaces a file atomically, so that a concurrent reader sees either the old or the new
// content. Programs that read a configuration directory ignore the name of the temporary file.
func writeFile(path string, data []byte, perm fs.FileMode) error {
	part, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(part.Name()) }() // fails after the file has been renamed
	_, err = part.Write(data)
	if err := errors.Join(err, part.Chmod(perm), part.Close()); err != nil {
		return err
	}
	return os.Rename(part.Name(), path)
}

func bootID() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
}
