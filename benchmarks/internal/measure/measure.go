// Package measure has the helpers that all benchmark programs share for their figures: medians,
// CPU time, memory, and a description of the machine.
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

// Median returns the middle value of v, or the mean of the two middle values. It does not change
// v, which must not be empty.
func Median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

// Where describes the machine, the versions, the commit and the day, to make figures comparable
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

// CPU returns the CPU time of a process so far, including its system calls; 0 if it does not
// exist.
func CPU(pid int) time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil { // clock_getcpuclockid(3)
		return 0
	}
	return time.Duration(t.Nano())
}

// Memory returns a value of /proc/PID/status, such as VmRSS, in octets; 0 if the process does not
// exist.
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

// Busy returns the seconds that all processors have worked since boot: user, nice, system, irq
// and softirq of /proc/stat (proc_stat(5)). It excludes time stolen by other guests of the host.
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
			seconds += ticks / 100 // USER_HZ is 100 on every Linux architecture that Go supports
		}
	}
	return seconds, nil
}
