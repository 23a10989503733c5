// Command ci runs all checks of a change, in order. It continues after a failure, so that one run
// shows all failures. `make test` calls it, and CI calls `make test`.
//
// The last line of the output is "N passed, N failed, N skipped" over all Go tests and subtests of
// both modules. A step that is not a test (lint, generated files) affects the exit code and the
// table of steps above that line, not the count.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// A step is a check that passes or fails. Its output is shown while it runs.
type step struct {
	name string
	run  func(context.Context) error
}

type result struct {
	name    string
	err     error
	elapsed time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if !check(ctx) {
		os.Exit(1)
	}
}

func check(ctx context.Context) bool {
	tests := &tally{}
	first := []step{
		{"generated files", command("make", "--no-print-directory", "generate-check")},
		{"vet", command("go", "vet", "./...")},
		{"vet test/", command("go", "-C", "test", "vet", "./...")},
		// This step runs before the tests. The build takes minutes with cold caches, and would
		// count against a test's timeout.
		{"kube-apiserver", command("make", "--no-print-directory", "kube")},
	}
	// mainSteps and testDirSteps run at the same time. Tests in test/ mostly wait, for elections
	// and API servers, and need the CPU at once when they wake. Tests that mostly compute have nice
	// 10: they get a tenth of the CPU when the API servers need it.
	mainSteps := []step{
		{"lint", command("nice", "-n", "10", "make", "--no-print-directory", "lint")},
		{"tests", goTest(nice10, ".", tests, raceDetector, concurrent()...)},
		{"sequential", goTest(nice10, ".", tests, "", sequential...)},
		// The race detector allocates memory. Tests that a function does not allocate therefore
		// skip themselves under the race detector, and run here.
		{"allocations", goTest(nice10, ".", tests, "", append([]string{"-run=NotAllocate"}, packagesWith("NotAllocate")...)...)},
		// The race detector would slow down the honest peer and falsify the comparison.
		{"fairness", goTest(nice0, ".", tests, "", "-run=OneHostilePeer", "./gateway")},
	}
	testDirSteps := []step{
		// The two slowest packages start first.
		{"tests in test/", goTest(nice0, testDir, tests, raceDetector, "./fleet", "./control", "./...")},
		{"without the race detector", goTest(nice0, testDir, tests, "", "-run=BudgetOfTheRules|LargestPeerServices", "./crd")},
	}
	if os.Geteuid() != 0 {
		fmt.Println("not root: tests that make network namespaces will be skipped, each with its reason below")
	}

	results := run(ctx, first)
	var more []result
	var wg sync.WaitGroup
	wg.Go(func() { more = run(ctx, testDirSteps) })
	results = append(results, run(ctx, mainSteps)...)
	wg.Wait()
	results = append(results, more...)
	if again := tests.repeatable(maxRepeated); len(again) > 0 {
		results = append(results, run(ctx, []step{{"once more, alone", repeat(tests, again)}})...)
	}
	return report(os.Stdout, results, tests, ctx.Err())
}

// maxRepeated is the largest number of failed tests that are repeated. CI runs on unknown machines
// at a load of ten, where the system may stop a test's process for longer than the test waits. In a
// typical run, one or two tests fail for this reason. More failures have another cause.
const maxRepeated = 4

// repeat runs failed tests again, each alone. The summary lists a test that passes now as flaky;
// such a test needs fixing. A test that fails again counts as failed.
func repeat(tests *tally, again []testName) func(context.Context) error {
	return func(ctx context.Context) error {
		for _, name := range again {
			fmt.Printf("      %s\n", name)
			dir := "."
			if name.pkg == testModule || strings.HasPrefix(name.pkg, testModule+"/") {
				dir = testDir
			}
			second := &tally{}
			err := goTest(nice0, dir, second, raceDetector, "-run=^"+name.test+"$", name.pkg)(ctx)
			if err == nil && second.passed > 0 && second.failed == 0 {
				tests.removeFailure(name)
			}
		}
		return nil
	}
}

// run runs steps one after the other, even after a failure, until ctx ends.
func run(ctx context.Context, steps []step) (results []result) {
	for _, s := range steps {
		if ctx.Err() != nil {
			break
		}
		fmt.Printf("\n=== %s\n", s.name)
		start := time.Now()
		err := s.run(ctx)
		results = append(results, result{s.name, err, time.Since(start)})
	}
	return results
}

// report prints the table of steps, the slowest tests, the reasons of skipped tests, and the count.
// The count is alone on the last line.
func report(w io.Writer, results []result, tests *tally, interrupted error) (ok bool) {
	ok = tests.failed == 0 && interrupted == nil
	fmt.Fprintf(w, "\n=== summary\n")
	for _, r := range results {
		mark := "ok"
		switch {
		case errors.Is(r.err, errTestsFailed) && tests.failed == 0 && len(tests.flaky) > 0:
			mark = "ok the second time"
		case r.err != nil:
			mark, ok = "FAILED: "+r.err.Error(), false
		}
		fmt.Fprintf(w, "%8s  %-16s %s\n", r.elapsed.Round(100*time.Millisecond), r.name, mark)
	}
	for _, s := range tests.slowest(10) {
		fmt.Fprintf(w, "slow: %s %v\n", s.took.Round(time.Second), s.testName)
	}
	if interrupted != nil {
		fmt.Fprintln(w, "interrupted, later steps did not run")
	}
	for _, reason := range tests.skipReasons() {
		fmt.Fprintf(w, "skipped: %s\n", reason)
	}
	for _, name := range tests.flaky {
		fmt.Fprintf(w, "flaky: %s failed once, and passed when it ran again alone; repair it\n", name)
	}
	for _, f := range tests.failures {
		fmt.Fprintf(w, "failed: %s\n", f)
	}
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped\n", tests.passed, tests.failed, tests.skipped)
	return ok
}

// sequential lists packages whose code and tests share nothing between goroutines. The race
// detector finds nothing there, and would make their searches and property tests five to ten times
// slower.
var sequential = []string{
	"./fabric", "./internal/archtest", "./internal/chart", "./internal/mandate", "./internal/postquantum", "./manager/ipam", "./packet",
}

// longest lists the packages that take longest. They start first, so that none of them still runs
// alone at the end.
var longest = []string{"./internal/install", "./internal/peering", "./natengine", "./manager"}

// concurrent returns the packages of the main module that are not in sequential. Those in longest
// come first.
func concurrent() []string {
	packages := slices.Clone(longest)
	out, err := exec.Command("go", "list", "./...").Output()
	if err != nil {
		return append(packages, "./...") // go test will report the error
	}
	for path := range strings.Lines(string(out)) {
		folder := "." + strings.TrimPrefix(strings.TrimSpace(path), mainModule)
		if !slices.Contains(sequential, folder) {
			packages = append(packages, folder)
		}
	}
	return packages
}

// packagesWith returns the packages of the main module that have a test with the given text in
// its name. It searches the source, because building all packages without the race detector would
// take a minute.
func packagesWith(text string) (packages []string) {
	test := regexp.MustCompile(`(?m)^func Test\w*` + text)
	// go vet reports unreadable files, so errors are ignored here.
	_ = filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && (d.Name() == testDir || d.Name() == "bin") {
			return fs.SkipDir
		}
		folder := "./" + filepath.Dir(path)
		if !strings.HasSuffix(path, "_test.go") || slices.Contains(packages, folder) {
			return nil
		}
		if code, err := os.ReadFile(path); err == nil && test.Match(code) {
			packages = append(packages, folder)
		}
		return nil
	})
	return packages
}

func command(name string, args ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		cmd := newCommand(ctx, name, args...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		return cmd.Run()
	}
}

// newCommand returns a command whose process tree gets SIGTERM when ctx ends. Tests clean up
// their namespaces on SIGTERM.
func newCommand(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	return cmd
}

const mainModule = "github.com/isthmus-net/isthmus"

// testModule is the path of the module in test/, which has the heavy dependencies.
const testModule = mainModule + "/test"

const testDir = "test"

// errTestsFailed represents exit code 1 of go test. The tally has the names of the failed tests.
var errTestsFailed = errors.New("tests failed")

// raceDetector is the race detector's flag. goTest passes it if there is a C compiler.
const raceDetector = "-race"

// Nice values: nice0 is for tests that need the CPU at once, nice10 for all others.
const nice0, nice10 = "0", "10"

// goTest runs tests of the module in dir with a nice value and counts them. It passes -count=1,
// because a cached result does not cover the kernel of this machine.
func goTest(nice, dir string, t *tally, race string, args ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		flags, cgo := []string{"-n", nice, "go", "-C", dir, "test", "-json", "-count=1", "-timeout=45m"}, "CGO_ENABLED=0"
		if race != "" {
			if _, err := exec.LookPath("gcc"); err == nil {
				flags, cgo = append(flags, race), "CGO_ENABLED=1"
			} else {
				fmt.Println("no gcc: running without the race detector")
			}
		}
		cmd := newCommand(ctx, "nice", append(flags, args...)...)
		cmd.Env = append(os.Environ(), cgo)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			return err
		}
		if err := cmd.Start(); err != nil {
			return err
		}
		if err := follow(out, os.Stdout, t); err != nil {
			return err
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); errors.As(err, &exit) && exit.ExitCode() == 1 {
			return errTestsFailed
		} else {
			return err
		}
	}
}

// follow reads the output of `go test -json` into t and prints the parts for users. Every half
// minute it prints the running tests, to distinguish a slow package from a hanging one.
func follow(r io.Reader, w io.Writer, t *tally) error {
	lines := make(chan []byte)
	scanned := make(chan error, 1)
	go func() {
		defer close(lines)
		s := bufio.NewScanner(r)
		s.Buffer(nil, 16<<20)
		for s.Scan() {
			lines <- append([]byte(nil), s.Bytes()...)
		}
		scanned <- s.Err()
	}()
	patience := time.NewTicker(30 * time.Second)
	defer patience.Stop()
	for {
		select {
		case line, more := <-lines:
			if !more {
				return <-scanned
			}
			fmt.Fprint(w, t.add(line))
		case <-patience.C:
			if running := t.running(); len(running) > 0 {
				fmt.Fprintf(w, "      still running: %s\n", strings.Join(running, ", "))
			}
		}
	}
}
