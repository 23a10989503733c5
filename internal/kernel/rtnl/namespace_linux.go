package rtnl

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// NewNamespace makes a network namespace without a name. It exists as long as the file, or a socket
// in the namespace, is open.
func NewNamespace() (*os.File, error) {
	var f *os.File
	err := onDyingThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		f, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	return f, err
}

// Do runs fn on a thread in the network namespace. Sockets and devices that fn makes stay in that
// namespace and may be used from any thread later.
func Do(namespace *os.File, fn func() error) error {
	return onDyingThread(func() error {
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("setns: %w", err)
		}
		return fn()
	})
}

// onDyingThread runs fn on its own OS thread, which ends with fn, so that no other goroutine can
// run in a foreign namespace. It never uses the main thread: that thread cannot end, and
// /proc/PID/ns/net shows its namespace for the whole process.
func onDyingThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if unix.Gettid() != unix.Getpid() {
			done <- fn()
			return
		}
		// While this goroutine occupies the main thread, the next one gets another thread.
		err := onDyingThread(fn)
		runtime.UnlockOSThread()
		done <- err
	}()
	return <-done
}
