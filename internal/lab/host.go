package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// netnsDir is the directory of iproute2 for named network namespaces. A lab's namespaces are there,
// so that "ip netns exec" finds them.
const netnsDir = "/run/netns"

// netnsPrefix is the prefix of the names of all labs' namespaces: isthmus.LAB.HOST.
const netnsPrefix = "isthmus."

// A Host is one network namespace of a lab: the underlay, a node, a pod or a server. Its methods
// may be called concurrently. The methods open listeners and connections that work from any thread,
// and that keep the namespace alive until the caller closes them.
type Host struct {
	Name string // unique in the lab: "underlay", "a-node1", "a-pod1", "a-onprem"

	lab string
}

// Netns returns the name of the host's namespace for "ip netns exec".
func (h *Host) Netns() string { return netnsPrefix + h.lab + "." + h.Name }

// String returns the host's name.
func (h *Host) String() string { return h.Name }

// Do runs f inside the host's namespace and returns its error. f runs on its own thread, which ends
// when f returns. Goroutines that f starts run outside of the namespace. f must not end the test
// (t.Fatal), because it does not run on the test's goroutine.
func (h *Host) Do(f func() error) error {
	return onOwnThread(func() error {
		if err := enter(filepath.Join(netnsDir, h.Netns())); err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
		return f()
	})
}

// enter moves the calling thread, which must be locked, into the namespace at path.
func enter(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open namespace", Path: path, Err: err}
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		return &os.PathError{Op: "enter namespace", Path: path, Err: err}
	}
	return nil
}

// onOwnThread runs f on a thread that ends afterwards, so that f may leave the thread in any state.
// It never uses the main thread, because the main thread would keep the namespace alive until the
// process ends, and /proc/PID/ns/net would show this namespace.
func onOwnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			done <- onOwnThread(f) // runs f on another thread, because this goroutine occupies the main thread
			return
		}
		// Without UnlockOSThread, the thread ends with the goroutine. The deferred function sends
		// an error even if f calls runtime.Goexit.
		err := errors.New("the function left its goroutine")
		defer func() { done <- err }()
		err = f()
	}()
	return <-done
}

// Dial connects from inside the host, like net.Dialer. The address must be IP:port, because names
// are not resolved inside the host.
func (h *Host) Dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = h.Do(func() (err error) {
		var d net.Dialer
		conn, err = d.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Listen is net.Listen inside the host.
func (h *Host) Listen(network, address string) (l net.Listener, err error) {
	err = h.Do(func() (err error) {
		l, err = net.Listen(network, address)
		return err
	})
	return l, err
}

// ListenPacket is net.ListenPacket inside the host.
func (h *Host) ListenPacket(network, address string) (c net.PacketConn, err error) {
	err = h.Do(func() (err error) {
		c, err = net.ListenPacket(network, address)
		return err
	})
	return c, err
}

// A Cmd is an exec.Cmd whose process starts inside a host.
type Cmd struct {
	*exec.Cmd

	host *Host
}

// Command returns the command to run the named program inside the host. The program uses the
// caller's file system and user. It is killed when ctx ends, or when the lab is removed.
func (h *Host) Command(ctx context.Context, name string, args ...string) *Cmd {
	return &Cmd{exec.CommandContext(ctx, name, args...), h}
}

// Start is exec.Cmd.Start inside the host.
func (c *Cmd) Start() error {
	c.Env = append(c.Environ(), environment+"="+c.host.lab)
	return c.host.Do(c.Cmd.Start)
}

// Start starts any command inside the host, like a command from Command.
func (h *Host) Start(cmd *exec.Cmd) error { return (&Cmd{cmd, h}).Start() }

// Run is exec.Cmd.Run inside the host.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output is exec.Cmd.Output inside the host, except that an error contains the text on standard
// error.
func (c *Cmd) Output() ([]byte, error) {
	var out, text bytes.Buffer
	c.Stdout = &out
	if c.Stderr == nil {
		c.Stderr = &text
	}
	err := c.Run()
	if err != nil {
		err = fmt.Errorf("%s: %s: %w", c.host.Name, strings.Join(c.Args, " "), err)
		if t := bytes.TrimSpace(text.Bytes()); len(t) > 0 {
			err = fmt.Errorf("%w: %s", err, t)
		}
	}
	return out.Bytes(), err
}

// CombinedOutput is exec.Cmd.CombinedOutput inside the host.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.Bytes(), err
}

// Exec replaces the calling process by the named program, inside the host. It returns only after an
// error. It adds the directory of the calling program to PATH, so that programs in that directory
// are found by name.
func (h *Host) Exec(args []string) error {
	if self, err := os.Executable(); err == nil {
		path := os.Getenv("PATH") + string(filepath.ListSeparator) + filepath.Dir(self)
		if err := os.Setenv("PATH", path); err != nil {
			return err
		}
	}
	if err := os.Setenv(environment, h.lab); err != nil {
		return err
	}
	path, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	// execve(2) keeps only the calling thread, which is in the host's namespace.
	return h.Do(func() error {
		return &os.PathError{Op: "exec", Path: path, Err: unix.Exec(path, args, os.Environ())}
	})
}

// setSysctl writes a setting of the calling thread's namespace. name is a path below
// /proc/sys/net.
func setSysctl(name, value string) error {
	// /proc/sys/net shows the namespace of the thread that opens the file.
	return os.WriteFile(filepath.Join("/proc/sys/net", name), []byte(value), 0)
}
