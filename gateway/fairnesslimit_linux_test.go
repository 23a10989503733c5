//go:build !race

package gateway

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// cpuQuotas are the files of control groups, of version 2 or 1, that set a quota of 80 % of a
// processor.
var cpuQuotas = []struct{ root, file, value string }{
	{"/sys/fs/cgroup", "cpu.max", "80000 100000"},
	{"/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "80000"}, // microseconds of a period of 100 ms, the default
}

// startLimited starts a process with limited CPU time: under a CPU quota or, if control groups
// are not available, on one processor together with a busy thread. It returns a description of
// the limit.
func startLimited(t *testing.T, cmd *exec.Cmd) (limit string) {
	for _, q := range cpuQuotas {
		group, err := os.MkdirTemp(q.root, "isthmus-fairness-")
		if err != nil {
			continue
		}
		t.Cleanup(func() { _ = os.Remove(group) })
		if writeExisting(filepath.Join(group, q.file), q.value) != nil {
			continue
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if err := writeExisting(filepath.Join(group, "cgroup.procs"), strconv.Itoa(cmd.Process.Pid)); err != nil {
			t.Logf("no CPU quota: %v", err)
			return "no limit"
		}
		return "a CPU quota of 80 %"
	}
	if err := startBesideBusyThread(t, cmd); err != nil {
		t.Fatal(err)
	}
	return "one processor beside a busy thread"
}

// writeExisting writes a file of the kernel. It creates no file.
func writeExisting(name, text string) error {
	f, err := os.OpenFile(name, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// startBesideBusyThread starts a process on one processor that it shares with a busy thread of
// this process until the test ends. By its nice value, the thread takes a quarter of the
// processor.
func startBesideBusyThread(t *testing.T, cmd *exec.Cmd) error {
	started := make(chan error)
	var stop atomic.Bool
	t.Cleanup(func() { stop.Store(true) })
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		var all, one unix.CPUSet
		err := unix.SchedGetaffinity(0, &all)
		for cpu := range len(all) * 64 {
			if all.IsSet(cpu) && one.Count() == 0 {
				one.Set(cpu)
			}
		}
		if err = errors.Join(err, unix.SchedSetaffinity(0, &one)); err == nil {
			err = cmd.Start() // the process inherits the processor
		}
		if started <- errors.Join(err, unix.Setpriority(unix.PRIO_PROCESS, 0, 5)); err != nil {
			return
		}
		for !stop.Load() { // keep the processor busy
		}
	}()
	return <-started
}
