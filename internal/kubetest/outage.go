package kubetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Freeze suspends the API server. Connections stay open and the kernel accepts new ones, but no
// request is answered until Thaw.
func (s *Server) Freeze() error { return s.signal(unix.SIGSTOP) }

// Thaw resumes the API server after Freeze.
func (s *Server) Thaw() error { return s.signal(unix.SIGCONT) }

func (s *Server) signal(sig unix.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.api == nil {
		return s.stopped()
	}
	if err := s.api.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("API server %s: %v: %w", s.opts.Name, sig, err)
	}
	// The signal stops the server's threads one after the other, and on a busy machine some threads
	// still answer requests for a moment. So wait until all are stopped.
	for sig == unix.SIGSTOP {
		err := unix.Waitid(unix.P_PID, s.api.cmd.Process.Pid, nil, unix.WSTOPPED|unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	return nil
}

func (s *Server) stopped() error { return fmt.Errorf("API server %s was stopped", s.opts.Name) }

// RestartAPIServer kills the API server, even if it is frozen, and restarts it with the same port
// and data. It returns when the server is ready. Clients lose their connections and watches.
func (s *Server) RestartAPIServer(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.api == nil {
		return s.stopped()
	}
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready within %v", readyTimeout))
	defer cancel()
	err := s.api.kill()
	if err == nil {
		s.client.CloseIdleConnections()
		err = s.startAPI()
	}
	if err == nil {
		err = s.await(ctx, readyz)
	}
	if err != nil {
		return fmt.Errorf("API server %s: restart: %w", s.opts.Name, err)
	}
	return nil
}

// Save copies the data of etcd to a new folder. The copy is consistent, like a snapshot of the
// disk.
func (s *Server) Save(folder string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.etcd == nil {
		return s.stopped()
	}
	if err := s.etcd.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		return err
	}
	return errors.Join(os.CopyFS(folder, os.DirFS(filepath.Join(s.dir, "etcd"))), s.etcd.cmd.Process.Signal(unix.SIGCONT))
}

// Restore kills the API server and etcd, restores the data that Save copied, and returns when both
// are ready again.
func (s *Server) Restore(ctx context.Context, folder string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.api == nil {
		return s.stopped()
	}
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready within %v", readyTimeout))
	defer cancel()
	data := filepath.Join(s.dir, "etcd")
	err := errors.Join(s.api.kill(), s.etcd.kill())
	s.client.CloseIdleConnections()
	for _, step := range []func() error{
		func() error { return os.RemoveAll(data) },
		func() error { return os.CopyFS(data, os.DirFS(folder)) },
		func() error { return os.Chmod(data, 0o700) },
		s.startEtcd,
		s.startAPI,
		func() error { return s.await(ctx, readyz) },
	} {
		if err == nil {
			err = step()
		}
	}
	if err != nil {
		return fmt.Errorf("API server %s: restore: %w", s.opts.Name, err)
	}
	return nil
}
