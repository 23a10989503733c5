package kubenodes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// A hierarchy is a mounted cgroup hierarchy.
type hierarchy struct {
	own         string // directory of this process's group, or in cgroup v2 the mount point
	controllers string // in the syntax of mount(8); "-" in cgroup v2
}

// hierarchies returns the hierarchies in which a node needs a group: all of cgroup v1, or the only
// one of cgroup v2.
func hierarchies() ([]hierarchy, error) {
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	found := hierarchiesOf(string(groups), string(mounts))
	if len(found) == 0 {
		return nil, errors.New("no cgroup hierarchy with controllers is mounted")
	}
	return found, nil
}

// hierarchiesOf parses the content of /proc/self/cgroup and /proc/self/mountinfo (cgroups(7),
// proc(5)).
func hierarchiesOf(groups, mounts string) (v1 []hierarchy) {
	var v2 []hierarchy
	for line := range strings.Lines(mounts) {
		// The fields are: 36 35 98:0 ROOT MOUNTPOINT options [optional...] - TYPE SOURCE SUPEROPTIONS
		before, after, ok := strings.Cut(strings.TrimSpace(line), " - ")
		place, kind := strings.Fields(before), strings.Fields(after)
		if !ok || len(place) < 5 || len(kind) < 3 {
			continue
		}
		root, mount := place[3], place[4]
		switch kind[0] {
		case "cgroup2":
			// Put the nodes' groups directly below the mount point. A group other than the root
			// cannot delegate controllers if it contains processes, and our own group does.
			v2 = append(v2, hierarchy{mount, "-"})
		case "cgroup":
			options := strings.Split(kind[2], ",")
			for line := range strings.Lines(groups) { // ID:CONTROLLERS:PATH
				f := strings.SplitN(strings.TrimSpace(line), ":", 3)
				if len(f) != 3 || f[1] == "" {
					continue
				}
				names := strings.Split(f[1], ",")
				if slices.ContainsFunc(names, func(n string) bool { return !slices.Contains(options, n) }) {
					continue
				}
				if path, below := strings.CutPrefix(f[2], strings.TrimSuffix(root, "/")); below {
					v1 = append(v1, hierarchy{filepath.Join(mount, path), f[1]})
				}
			}
		}
	}
	if slices.ContainsFunc(v1, func(h hierarchy) bool { return !strings.HasPrefix(h.controllers, "name=") }) {
		return v1
	}
	return v2[:min(len(v2), 1)]
}

// groupPrefix is the prefix of the names of all nodes' control groups: isthmus.LAB.NODE.
const groupPrefix = "isthmus."

// makeGroups creates a group in each hierarchy. It returns the groups in the format that node.sh
// expects.
func makeGroups(name string) (joined []string, err error) {
	all, err := hierarchies()
	if err != nil {
		return nil, err
	}
	for _, h := range all {
		dir := filepath.Join(h.own, name)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		if slices.Contains(strings.Split(h.controllers, ","), "cpuset") { // a new group accepts no process, because its cpuset is empty: copy that of its parent
			for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
				value, err := os.ReadFile(filepath.Join(h.own, file))
				if err == nil {
					err = os.WriteFile(filepath.Join(dir, file), value, 0)
				}
				if err != nil {
					return nil, err
				}
			}
		}
		joined = append(joined, dir+"="+h.controllers)
	}
	return joined, nil
}

// removeGroups removes the groups with the given name and all groups below. The caller must have
// killed their processes.
func removeGroups(name string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range all {
		dir := filepath.Join(h.own, name)
		// A killed process stays in its group for a short time.
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			err := removeGroup(dir)
			if err == nil || time.Now().After(deadline) {
				errs = append(errs, err)
				break
			}
		}
	}
	return errors.Join(errs...)
}

func removeGroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeGroup(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("control group: %w", err)
	}
	return nil
}

// groupNames returns the names of all existing groups of nodes.
func groupNames() (names []string, err error) {
	all, err := hierarchies()
	if err != nil {
		return nil, err
	}
	for _, h := range all {
		found, err := filepath.Glob(filepath.Join(h.own, groupPrefix+"*.*"))
		if err != nil {
			return nil, err
		}
		for _, path := range found {
			names = append(names, filepath.Base(path))
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}
