// Package measure has what all benchmark programs say about their figures: the median, and the
// machine.
package measure

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Median returns the middle of v, or the mean of the two in the middle. It does not change v, which
// must not be empty.
func Median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

// Where names the machine, the versions, the commit and the day, so that a figure means something
// later.
func Where() string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	cpu := "unknown CPU"
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, rest, ok := strings.Cut(string(info), "model name\t: "); ok {
			cpu, _, _ = strings.Cut(rest, "\n")
		}
	}
	commit, err := exec.Command("git", "describe", "--always", "--dirty").Output()
	if err != nil {
		commit = []byte("unknown")
	}
	return fmt.Sprintf("%s, %d CPUs, Linux %s, %s, commit %s, %s",
		cpu, runtime.NumCPU(), unix.ByteSliceToString(u.Release[:]), runtime.Version(), strings.TrimSpace(string(commit)),
		time.Now().UTC().Format("2006-01-02"))
}

// CPU is how long a process has been on processors so far, with all that it had others do in its
// system calls; 0 when there is none.
func CPU(pid int) time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil { // clock_getcpuclockid(3)
		return 0
	}
	return time.Duration(t.Nano())
}

// Memory is a line of /proc/PID/status, such as VmRSS, in octets; 0 when there is none.
func Memory(pid int, name string) int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == name+":" {
			n, _ := strconv.Atoi(fields[1])
			return n << 10
		}
	}
	return 0
}

// Busy is how many seconds all processors have worked since the machine started, but for what others of
// its host took: user, nice, system, irq and softirq of /proc/stat (proc_stat(5)).
func Busy() (seconds float64, err error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(stat), "\n")
	for i, field := range strings.Fields(line) {
		if i == 1 || i == 2 || i == 3 || i == 6 || i == 7 {
			ticks, err := strconv.ParseFloat(field, 64)
			if err != nil {
				return 0, fmt.Errorf("/proc/stat: %w", err)
			}
			seconds += ticks / 100 // USER_HZ is 100 on every Linux architecture that Go knows
		}
	}
	return seconds, nil
}
