package lab

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// environment is the environment variable that marks processes that were started inside a lab, and
// their children. Its value is the lab's name.
const environment = "ISTHMUS_LAB"

// A crowd is the set of processes that belong to a lab. It contains each process whose main thread
// is in a namespace of the lab. It also contains each process that was started inside the lab, even
// if that process has changed its namespace; see environment.
type crowd struct {
	namespaces map[uint64]bool
	mark       []byte
}

func crowdOf(lab string) crowd {
	c := crowd{map[uint64]bool{}, []byte(environment + "=" + lab)}
	for _, path := range namespacesOf(lab) {
		if ino, ok := nsfsInode(path); ok {
			c.namespaces[ino] = true
		}
	}
	return c
}

func (c crowd) has(pid int) bool {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	ino, ok := nsfsInode(filepath.Join(dir, "ns/net"))
	if !ok { // a zombie or a kernel thread; other threads of a zombie may still hold sockets
		threads, _ := filepath.Glob(filepath.Join(dir, "task/*/ns/net"))
		return slices.ContainsFunc(threads, func(path string) bool {
			ino, ok := nsfsInode(path)
			return ok && c.namespaces[ino]
		})
	}
	if c.namespaces[ino] {
		return true
	}
	env, err := os.ReadFile(filepath.Join(dir, "environ"))
	return err == nil && slices.ContainsFunc(bytes.Split(env, []byte{0}), func(v []byte) bool { return bytes.Equal(v, c.mark) })
}

// members returns the process IDs of the crowd, except that of the calling process.
func (c crowd) members() []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && pid != os.Getpid() && c.has(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// signal sends sig to a member. The kernel may have given the process ID to another process since
// the caller read it. A pidfd always refers to the same process, so signal opens one and then
// checks the membership again.
func (c crowd) signal(pid int, sig unix.Signal) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if c.has(pid) {
		_ = unix.PidfdSendSignal(fd, sig, nil, 0) // the process may have ended
	}
}

// end ends all members by SIGTERM, and after the grace period by SIGKILL.
func (c crowd) end(grace time.Duration) error {
	pids := c.members()
	for _, pid := range pids {
		c.signal(pid, unix.SIGTERM)
	}
	for deadline := time.Now().Add(grace); len(pids) > 0 && time.Now().Before(deadline); pids = c.members() {
		time.Sleep(5 * time.Millisecond)
	}
	for deadline := time.Now().Add(30 * time.Second); len(pids) > 0; pids = c.members() {
		if time.Now().After(deadline) {
			return fmt.Errorf("processes %v do not end", pids)
		}
		for _, pid := range pids {
			c.signal(pid, unix.SIGKILL)
		}
		time.Sleep(5 * time.Millisecond)
	}
	return nil
}

// nsfsInode returns the inode number of the namespace at path. It returns false if path is no
// namespace, for example a plain file that a reboot left.
func nsfsInode(path string) (uint64, bool) {
	var fs unix.Statfs_t
	var st unix.Stat_t
	if unix.Statfs(path, &fs) != nil || fs.Type != unix.NSFS_MAGIC || unix.Stat(path, &st) != nil {
		return 0, false
	}
	return st.Ino, true
}

// namespacesOf returns the paths of all named namespaces of a lab.
func namespacesOf(lab string) []string {
	paths, err := filepath.Glob(filepath.Join(netnsDir, netnsPrefix+lab+".*"))
	if err != nil {
		return nil // only for a bad pattern, which no lab name produces
	}
	return paths
}
