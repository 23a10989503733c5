package kubetest

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// binEnv is the environment variable with the folder of existing programs. If it is set, Build
// returns that folder and builds nothing.
const binEnv = "ISTHMUS_KUBE"

// programs are the names of the programs. Each is a link to the one binary that Build builds.
var programs = []string{"etcd", "kube-apiserver", "kube-controller-manager"}

// A recipe describes a set of programs to build. There are three: the control plane of the newest
// supported Kubernetes version, the control plane of the oldest, and the newest control plane
// together with the nodes' programs.
type recipe struct {
	env      string // environment variable with the folder of existing programs
	module   string // folder in test/
	prefix   string // prefix of the folder's name in bin/
	programs []string
	long     string // typical duration, for messages
}

var (
	controlPlane = recipe{binEnv, "kube", "kube-", programs, "four to eight minutes on two cores"}
	oldest       = recipe{"ISTHMUS_KUBE_OLDEST", "kubeoldest", "kube-oldest-", programs, "four to eight minutes on two cores"}
	withNodes    = recipe{"ISTHMUS_KUBE_NODES", "kubenodes", "kube-nodes-",
		append(slices.Clone(programs), "kube-scheduler", "kubelet", "kube-proxy"), "five to ten minutes on two cores"}
)

func (r recipe) what() string {
	last := len(r.programs) - 1
	return strings.Join(r.programs[:last], ", ") + " and " + r.programs[last]
}

// buildFlags never vary, because each set of flags needs its own Go cache, with gigabytes of disk
// and minutes of build time. Without debugging information, the build is an eighth faster and the
// linker needs a fifth less memory.
var buildFlags = []string{"-trimpath", "-gcflags=all=-dwarf=false", "-buildvcs=false"}

// Build returns the folder with the programs etcd, kube-apiserver and kube-controller-manager, and
// builds missing programs. On two cores, a build takes four to eight minutes with an empty Go
// cache, and seconds with a warm one. The folder is bin/kube-VERSION-HASH of the repository around
// the working directory, or the value of the environment variable ISTHMUS_KUBE. KUBEBUILDER_ASSETS
// may have the same value. If several processes build at the same time, one builds and the others
// wait. Build writes a line to progress every few seconds while it builds.
func Build(ctx context.Context, progress io.Writer) (dir string, err error) {
	return controlPlane.build(ctx, progress)
}

// BuildOldest is Build for the oldest supported version of Kubernetes. Its folder is
// bin/kube-oldest-VERSION-HASH, or the value of ISTHMUS_KUBE_OLDEST. To run tests on the oldest
// version, set ISTHMUS_KUBE to that folder.
func BuildOldest(ctx context.Context, progress io.Writer) (dir string, err error) {
	return oldest.build(ctx, progress)
}

// BuildNodes is Build with the additional programs of nodes: kube-scheduler, kubelet and
// kube-proxy. Its folder is bin/kube-nodes-VERSION-HASH, or the value of ISTHMUS_KUBE_NODES.
func BuildNodes(ctx context.Context, progress io.Writer) (dir string, err error) {
	return withNodes.build(ctx, progress)
}

// FindNodes returns the folder of BuildNodes if it contains the programs. Otherwise it returns an
// error with the reason.
func FindNodes() (dir string, err error) {
	if dir, err = withNodes.find(); err == nil {
		err = missing(dir, withNodes.programs)
	}
	return dir, err
}

// find returns the folder of the programs, whether they exist or not.
func (r recipe) find() (dir string, err error) {
	if dir := os.Getenv(r.env); dir != "" {
		return dir, nil
	}
	root, err := r.moduleRoot()
	if err != nil {
		return "", err
	}
	version, hash, err := identify(filepath.Join(root, "test", r.module))
	if err != nil {
		return "", err
	}
	return filepath.Join(root, "bin", r.prefix+version+"-"+hash), nil
}

func (r recipe) build(ctx context.Context, progress io.Writer) (dir string, err error) {
	dir, err = r.find()
	if err != nil {
		return "", err
	}
	lacks := missing(dir, r.programs)
	if os.Getenv(r.env) != "" {
		return dir, lacks
	}
	if lacks == nil {
		return dir, nil
	}
	bin := filepath.Dir(dir)
	src := filepath.Join(filepath.Dir(bin), "test", r.module)
	version, _, err := identify(src)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return "", err
	}
	unlock, err := lock(ctx, filepath.Join(bin, r.prefix[:len(r.prefix)-1]+".lock"), progress)
	if err != nil {
		return "", err
	}
	defer unlock()
	if missing(dir, r.programs) == nil { // another process has built the programs meanwhile
		return dir, nil
	}
	if err := r.make(ctx, src, version, dir, progress); err != nil {
		return "", fmt.Errorf("build %s from %s: %w", r.what(), src, err)
	}
	return dir, nil
}

// missing returns an error about a program that is not in dir, or nil if none is missing.
func missing(dir string, programs []string) error {
	for _, name := range programs {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return err
		} else if st.IsDir() || st.Mode()&0o111 == 0 {
			return fmt.Errorf("%s is not a program", filepath.Join(dir, name))
		}
	}
	return nil
}

// moduleRoot returns the folder of the main module that contains the working directory. It skips
// nested modules.
func (r recipe) moduleRoot() (string, error) {
	wd, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := wd; ; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && slices.Contains(strings.Split(string(mod), "\n"), "module github.com/isthmus-net/isthmus") {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("no go.mod of github.com/isthmus-net/isthmus in %s or above: set %s to a folder with %s",
				wd, r.env, r.what())
		}
	}
}

var kubernetesVersion = regexp.MustCompile(`(?m)^\s*k8s\.io/kubernetes (v(\d+)\.(\d+)\.\S+)$`)

// identify returns the version of Kubernetes that the module in src builds, and a hash of all
// inputs of the build.
func identify(src string) (version, hash string, err error) {
	h := sha256.New()
	fmt.Fprintln(h, runtime.GOOS, runtime.GOARCH, buildFlags)
	for _, name := range []string{"go.mod", "go.sum", "main.go"} {
		b, err := os.ReadFile(filepath.Join(src, name))
		if err != nil {
			return "", "", err
		}
		fmt.Fprintf(h, "%s %d\n%s", name, len(b), b)
		if name == "go.mod" {
			m := kubernetesVersion.FindSubmatch(b)
			if m == nil {
				return "", "", fmt.Errorf("%s requires no k8s.io/kubernetes", filepath.Join(src, name))
			}
			version = string(m[1])
		}
	}
	return version, hex.EncodeToString(h.Sum(nil))[:12], nil
}

// lock acquires the file lock at path. If unlock is not called, the kernel releases the lock when
// the process ends.
func lock(ctx context.Context, path string, progress io.Writer) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for tries := 0; ; tries++ {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, &os.PathError{Op: "lock", Path: path, Err: err}
		}
		if tries%50 == 0 {
			fmt.Fprintln(progress, "kube: waiting for another process that builds them")
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("wait for the process that holds %s: %w", path, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// make builds the programs in a temporary folder and renames it to dir, so that dir is never
// incomplete. The caller holds the lock.
func (r recipe) make(ctx context.Context, src, version, dir string, progress io.Writer) error {
	making := "." + r.module + "-" // must not be a prefix of another recipe's name
	abandoned, err := filepath.Glob(filepath.Join(filepath.Dir(dir), making+"*"))
	if err != nil {
		return err
	}
	for _, path := range abandoned { // killed builds have left these folders: a running build would hold the lock
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), making)
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }() // ignore an error: tmp was renamed, or the next build removes it
	if err := os.Chmod(tmp, 0o755); err != nil {
		return err
	}

	status := &reporter{w: progress, started: time.Now(), stage: "downloading modules"}
	stop := status.everySeconds(5, r)
	defer stop()
	stale, err := run(ctx, status, src, append([]string{"list", "-deps", "-f", "{{if .Stale}}{{.ImportPath}}{{end}}"}, buildFlags...))
	if err != nil {
		return err
	}
	status.compiling(len(strings.Fields(stale)))
	ldflags := "-ldflags=-s -w" // without these flags, the programs would report the version v0.0.0-master
	m := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	for _, v := range []string{"gitVersion=" + version, "gitMajor=" + m[0], "gitMinor=" + m[1]} {
		ldflags += " -X k8s.io/component-base/version." + v
	}
	if _, err := run(ctx, status, src, append([]string{"build", "-v", "-o", filepath.Join(tmp, "kube"), ldflags}, buildFlags...)); err != nil {
		return err
	}
	for _, name := range r.programs {
		if err := os.Symlink("kube", filepath.Join(tmp, name)); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(dir); err != nil { // if the folder exists, it lacks a program; otherwise make is not called
		return err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return err
	}
	stop()
	status.printLine("ready: " + dir)
	return nil
}

// run runs the go command in src and returns its output. It reports the command's progress to r.
// An error contains the command's messages.
func run(ctx context.Context, r *reporter, src string, args []string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = src
	// Ignore the caller's flags and platform, because with other values the build could use nothing
	// in the Go cache.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "GOOS="+runtime.GOOS, "GOARCH="+runtime.GOARCH)
	// On SIGINT the go command ends its compilers.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = 10 * time.Second
	var stdout strings.Builder
	cmd.Stdout = &stdout
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	var lines []string
	for s := bufio.NewScanner(stderr); s.Scan(); {
		line := s.Text()
		switch {
		case strings.HasPrefix(line, "go: downloading "):
			r.downloaded()
		case !strings.ContainsAny(line, " \t"): // the line is the path of a package
			r.compiled(line)
		default:
			if lines = append(lines, line); len(lines) > 40 {
				lines = lines[1:]
			}
		}
	}
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		return "", fmt.Errorf("go %s: %w\n%s", args[0], err, strings.Join(lines, "\n"))
	}
	return stdout.String(), nil
}

// A reporter reports the progress of the build to the user.
type reporter struct {
	w       io.Writer
	started time.Time

	mu        sync.Mutex
	stage     string
	done, all int
	since     time.Time // start of the compiling stage
}

func (r *reporter) printLine(what string) {
	fmt.Fprintf(r.w, "kube: %4s  %s\n", time.Since(r.started).Round(time.Second), what)
}

// everySeconds reports the progress every n seconds until stop is called. A second call of stop
// does nothing.
func (r *reporter) everySeconds(n int, what recipe) (stop func()) {
	fmt.Fprintf(r.w, "kube: building %s, once: %s\n", what.what(), what.long)
	quit, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(time.Duration(n) * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				r.report()
			case <-quit:
				return
			}
		}
	}()
	return sync.OnceFunc(func() { close(quit); <-ended })
}

func (r *reporter) report() {
	r.mu.Lock()
	defer r.mu.Unlock()
	stage := r.stage
	if r.done >= 100 && r.done < r.all { // the rate of the first hundred packages is not typical
		left := time.Since(r.since) / time.Duration(r.done) * time.Duration(r.all-r.done)
		stage += fmt.Sprintf("; about %v left, then linking", left.Round(10*time.Second))
	}
	r.printLine(stage)
}

func (r *reporter) downloaded() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done++
	r.stage = fmt.Sprintf("downloading modules: %d", r.done)
}

// compiling starts the second stage, in which all packages are compiled.
func (r *reporter) compiling(all int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done, r.all, r.since, r.stage = 0, all, time.Now(), fmt.Sprintf("compiling %d packages", all); all < 2 { // at most the program itself must be compiled
		r.stage = "linking"
	}
}

func (r *reporter) compiled(pkg string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done++; r.done < r.all {
		r.stage = fmt.Sprintf("compiled %d of %d packages, now %s", r.done, r.all, pkg)
	} else {
		r.stage = "linking"
	}
}
