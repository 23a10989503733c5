package kubetest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// A guard ensures that no process of a server outlives its owner, even if SIGKILL or a panic ends
// the owner. The guard is a shell that leads the process group of all programs. It reads from a
// pipe, and only the owner has the other end. When the pipe is closed, the guard removes the folder
// and kills the group, including itself. Stop also closes the pipe.
//
// Pdeathsig is no alternative. It fires when the thread that started the process ends. A program
// inside a network namespace is started by a thread that ends immediately afterwards. A list of
// process IDs is no alternative either, because the kernel reuses them. By contrast, the ID of a
// process group stays in use as long as the guard exists.
type guard struct {
	shell *exec.Cmd
	pipe  *os.File // the owner's end of the pipe
}

func newGuard(dir string) (*guard, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	shell := exec.Command("sh", "-c", `read -r _; rm -rf -- "$1"; kill -9 0`, "kubetest-guard", dir)
	shell.Stdin = r
	shell.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := shell.Start(); err != nil {
		w.Close()
		return nil, fmt.Errorf("guard: %w", err)
	}
	return &guard{shell, w}, nil
}

// end kills all remaining processes of the group and removes the folder.
func (g *guard) end() {
	g.pipe.Close()
	_ = g.shell.Wait() // always "killed", because the shell kills itself
}

// A process is a started program of a server.
type process struct {
	cmd   *exec.Cmd
	log   string // path of the log
	ended chan struct{}
	err   error // result of Wait; read it only after ended is closed
}

// start starts the program in the guard's process group. It appends the output to the log that an
// earlier run of the program may have left. The log is a file instead of a pipe, so that the
// program never waits for a reader.
func (g *guard) start(starter func(*exec.Cmd) error, dir, path string, args ...string) (*process, error) {
	name := filepath.Base(path)
	p := &process{cmd: exec.Command(path, args...), log: filepath.Join(dir, name+".log"), ended: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = dir, log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pgid: g.shell.Process.Pid}
	if starter == nil {
		starter = (*exec.Cmd).Start
	}
	if err := starter(p.cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	if p.cmd.Process == nil {
		return nil, fmt.Errorf("start %s: Starter did not start it", name)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

func (p *process) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// kill kills the process and waits until it has ended.
func (p *process) kill() error {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.cmd.Path, err)
	}
	select {
	case <-p.ended:
		return nil
	case <-time.After(time.Minute):
		return fmt.Errorf("%s (process %d) does not end", p.cmd.Path, p.cmd.Process.Pid)
	}
}

// tail returns the last lines of the log, from at most its last 64 KiB.
func (p *process) tail(lines int) string {
	f, err := os.Open(p.log)
	if err != nil {
		return ""
	}
	defer f.Close()
	if end, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.Seek(max(0, end-64<<10), io.SeekStart) // cannot fail if the previous Seek succeeded
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return ""
	}
	b = bytes.TrimRight(b, "\n")
	from := len(b)
	for ; lines > 0 && from > 0; lines-- {
		from = max(0, bytes.LastIndexByte(b[:from], '\n'))
	}
	return string(bytes.TrimLeft(b[from:], "\n"))
}
