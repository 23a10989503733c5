package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// golden is the output of go 1.26 for a package with a passed, a failed and a skipped test, a
// package that does not compile, and a package whose TestMain fails after all its tests passed.
const golden = `{"Action":"start","Package":"m/a"}
{"Action":"run","Package":"m/a","Test":"TestPasses"}
{"Action":"output","Package":"m/a","Test":"TestPasses","Output":"    a_test.go:3: noise\n"}
{"Action":"pass","Package":"m/a","Test":"TestPasses","Elapsed":0}
{"Action":"run","Package":"m/a","Test":"TestFails"}
{"Action":"run","Package":"m/a","Test":"TestFails/sub"}
{"Action":"output","Package":"m/a","Test":"TestFails/sub","Output":"    a_test.go:5: got 1, want 2\n"}
{"Action":"fail","Package":"m/a","Test":"TestFails/sub","Elapsed":0}
{"Action":"fail","Package":"m/a","Test":"TestFails","Elapsed":0}
{"Action":"run","Package":"m/a","Test":"TestSkips"}
{"Action":"output","Package":"m/a","Test":"TestSkips","Output":"    a_test.go:9: needs root to make network namespaces\n"}
{"Action":"output","Package":"m/a","Test":"TestSkips","Output":"--- SKIP: TestSkips (0.00s)\n"}
{"Action":"skip","Package":"m/a","Test":"TestSkips","Elapsed":0}
{"Action":"fail","Package":"m/a","Elapsed":0.3}
{"ImportPath":"m/b","Action":"build-output","Output":"b/b.go:3:1: undefined: x\n"}
{"ImportPath":"m/b","Action":"build-fail"}
{"Action":"start","Package":"m/b"}
{"Action":"fail","Package":"m/b","Elapsed":0,"FailedBuild":"m/b"}
{"Action":"run","Package":"m/c","Test":"TestPasses"}
{"Action":"pass","Package":"m/c","Test":"TestPasses","Elapsed":0}
{"Action":"output","Package":"m/c","Output":"goleak: found unexpected goroutines\n"}
{"Action":"fail","Package":"m/c","Elapsed":0.1}
{"Action":"skip","Package":"m/notests","Elapsed":0}
`

func tallyOf(t *testing.T, in string) (*tally, string) {
	t.Helper()
	var out bytes.Buffer
	sum := &tally{}
	if err := follow(strings.NewReader(in), &out, sum); err != nil {
		t.Fatal(err)
	}
	return sum, out.String()
}

func TestTallyCountsOutcomesAndFailedPackages(t *testing.T) {
	sum, out := tallyOf(t, golden)
	if sum.passed != 2 || sum.failed != 4 || sum.skipped != 1 {
		t.Errorf("got %d passed, %d failed, %d skipped; want 2, 4, 1", sum.passed, sum.failed, sum.skipped)
	}
	for _, want := range []string{"got 1, want 2", "undefined: x", "goleak: found", "FAIL"} {
		if !strings.Contains(out, want) {
			t.Errorf("output lacks %q:\n%s", want, out)
		}
	}
	if strings.Contains(out, "noise") {
		t.Errorf("output shows what a passing test said:\n%s", out)
	}
	if left := sum.running(); len(left) != 0 {
		t.Errorf("still running at the end: %v", left)
	}
}

func TestSummaryEndsWithTheCountAndNamesSkips(t *testing.T) {
	sum, _ := tallyOf(t, golden)
	var out bytes.Buffer
	if report(&out, nil, sum, nil) {
		t.Error("a run with failed tests passed")
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if last := lines[len(lines)-1]; last != "2 passed, 4 failed, 1 skipped" {
		t.Errorf("last line is %q", last)
	}
	if !strings.Contains(out.String(), "skipped: 1 × needs root to make network namespaces\n") {
		t.Errorf("the reason for skipping is missing:\n%s", out.String())
	}
}

func TestSummaryNamesTheSlowestTests(t *testing.T) {
	sum, _ := tallyOf(t, `{"Action":"pass","Package":"m/a","Test":"TestQuick","Elapsed":0.4}
{"Action":"pass","Package":"m/a","Test":"TestSlow/sub","Elapsed":60}
{"Action":"pass","Package":"m/a","Test":"TestSlow","Elapsed":61.2}
`)
	var out bytes.Buffer
	report(&out, nil, sum, nil)
	if want := "slow: 1m1s m/a TestSlow\nslow: 0s m/a TestQuick\n"; !strings.Contains(out.String(), want) {
		t.Errorf("the summary lacks %q:\n%s", want, &out)
	}
}

func TestPackagesWithFindsPackagesByTestName(t *testing.T) {
	t.Chdir("../..")
	found := packagesWith("NotAllocate")
	for _, want := range []string{"./natengine", "./gateway/bind"} {
		if !slices.Contains(found, want) {
			t.Errorf("%s is not among %q", want, found)
		}
	}
	if slices.Contains(found, "./fabric") {
		t.Errorf("%q have no such test", found)
	}
}

// A package that starts to share data between goroutines needs the race detector.
func TestPackagesWithoutRaceDetectorUseNoGoroutines(t *testing.T) {
	t.Chdir("../..")
	shares := regexp.MustCompile(`(?m)^\s*go\s|\.Go\(|^\s*"sync(/atomic)?"$|\.Parallel\(\)`)
	for _, folder := range sequential {
		files, err := filepath.Glob(filepath.Join(folder, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", folder, len(files), err)
		}
		for _, file := range files {
			code, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if found := shares.Find(code); found != nil {
				t.Errorf("%s has %q: take the package out of the list", file, bytes.TrimSpace(found))
			}
		}
	}
	if all := concurrent(); slices.Contains(all, "./fabric") || !slices.Contains(all, "./gateway/datapath") || !slices.Contains(all, "./natengine") {
		t.Errorf("with the race detector: %q", all)
	}
}

func TestReportFailsIfAStepFails(t *testing.T) {
	for name, tc := range map[string]struct {
		results     []result
		interrupted error
		want        bool
	}{
		"clean":       {[]result{{name: "lint"}}, nil, true},
		"lint failed": {[]result{{name: "lint", err: errors.New("exit status 1")}}, nil, false},
		"interrupted": {[]result{{name: "lint"}}, errors.New("context canceled"), false},
	} {
		if got := report(&bytes.Buffer{}, tc.results, &tally{passed: 3}, tc.interrupted); got != tc.want {
			t.Errorf("%s: passed = %v, want %v", name, got, tc.want)
		}
	}
}

func TestRunningNamesInnermostTestsAndSkipsPausedOnes(t *testing.T) {
	sum, _ := tallyOf(t, `{"Action":"run","Package":"m/a","Test":"TestX"}
{"Action":"run","Package":"m/a","Test":"TestX/slow"}
{"Action":"run","Package":"m/a","Test":"TestLater"}
{"Action":"pause","Package":"m/a","Test":"TestLater"}
`)
	if got := strings.Join(sum.running(), ","); got != "a.TestX/slow" {
		t.Errorf("running: %q", got)
	}
}

const chance = `{"Action":"run","Package":"m/a","Test":"TestBusy"}
{"Action":"run","Package":"m/a","Test":"TestBusy/sub"}
{"Action":"output","Package":"m/a","Test":"TestBusy/sub","Output":"    a_test.go:5: nothing after a minute\n"}
{"Action":"fail","Package":"m/a","Test":"TestBusy/sub","Elapsed":0}
{"Action":"fail","Package":"m/a","Test":"TestBusy","Elapsed":0}
{"Action":"fail","Package":"m/a","Elapsed":0.3}
`

func TestAFlakyTestIsNamedButDoesNotFailTheRun(t *testing.T) {
	sum, _ := tallyOf(t, chance)
	again := sum.repeatable(1)
	if len(again) != 1 || again[0] != (testName{"m/a", "TestBusy"}) {
		t.Fatalf("to repeat: %v; want m/a TestBusy, once for the test and its subtest", again)
	}
	results := []result{{name: "tests", err: errTestsFailed}}
	var out bytes.Buffer
	if report(&out, results, sum, nil) {
		t.Errorf("the run passed before the test was repeated:\n%s", &out)
	}
	sum.removeFailure(again[0])
	out.Reset()
	if !report(&out, results, sum, nil) {
		t.Errorf("the run failed:\n%s", &out)
	}
	for _, want := range []string{"ok the second time", "flaky: m/a TestBusy", "2 passed, 0 failed, 0 skipped\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the summary lacks %q:\n%s", want, &out)
		}
	}
	if report(&out, append(results, result{name: "lint", err: errors.New("exit status 1")}), sum, nil) {
		t.Error("a step that is not a test was forgiven with it")
	}
}

func TestRacesLeaksAndTimeoutsAreNotRetried(t *testing.T) {
	for _, words := range []string{"WARNING: DATA RACE", "3 packets in the clear", "panic: test timed out"} {
		sum, _ := tallyOf(t, strings.Replace(chance, "nothing after a minute", words, 1))
		if again := sum.repeatable(1); len(again) != 0 {
			t.Errorf("%q is tried again: %v", words, again)
		}
	}
	if sum, _ := tallyOf(t, strings.Replace(chance, "nothing after a minute", "underlay watched: 20 packets, 0 of them in the clear", 1)); len(sum.repeatable(1)) != 1 {
		t.Error("what a sniffer says when all is well keeps a test from being tried again")
	}
	if sum, _ := tallyOf(t, golden); len(sum.repeatable(9)) != 0 {
		t.Error("beside a package that does not compile tests are tried again")
	}
	sum, _ := tallyOf(t, chance+strings.ReplaceAll(chance, "TestBusy", "TestToo"))
	if again := sum.repeatable(1); len(again) != 0 {
		t.Errorf("more than the bound are tried again: %v", again)
	}
}
