package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// event is one line of `go test -json` (see go doc test2json).
type event struct {
	Action     string
	Package    string
	ImportPath string // only in events of build-output
	Test       string // empty: the event is about the package
	Elapsed    float64
	Output     string
}

type testName struct{ pkg, test string }

type testTime struct {
	testName
	took time.Duration // excludes the time for which a parallel test was paused
}

// A failure is a failed test. If a package failed without a failed test, it is the package, and
// test is empty.
type failure struct {
	testName

	final bool // the test must not be repeated
}

// finalWords mark failures that must never happen, even if a second run passes. They include
// panics, after which the rest of the package has not run.
var finalWords = []string{"DATA RACE", "in the clear", "panic:"}

// noLeaks is a text in the report of a packet sniffer. It means success, although it contains one
// of finalWords.
const noLeaks = " 0 of them in the clear"

// tally counts tests and keeps the output of tests that have not ended. Several `go test`
// processes may report to it concurrently.
type tally struct {
	mu sync.Mutex

	passed, failed, skipped int
	failures                []failure // in the order in which they failed
	flaky                   []testName
	times                   []testTime // durations of ended tests, without subtests

	reasons map[string]int // number of skipped tests by reason
	output  map[testName]string
	inTest  map[testName]bool // running tests
	counts  map[string][3]int // passed, failed and skipped tests of the running packages
}

// add processes one line and returns the text to print for it, which is often empty. A line that
// is not JSON (the go command's own messages) is printed unchanged.
func (t *tally) add(line []byte) (show string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var e event
	if err := json.Unmarshal(line, &e); err != nil || e.Action == "" {
		return string(line) + "\n"
	}
	if t.output == nil {
		t.reasons, t.output = map[string]int{}, map[testName]string{}
		t.inTest, t.counts = map[testName]bool{}, map[string][3]int{}
	}
	name := testName{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		return e.Output
	case "output":
		t.output[name] += e.Output
	case "run", "cont":
		t.inTest[name] = true
	case "pause": // a parallel test waits for its turn
		delete(t.inTest, name)
	case "pass", "fail", "skip":
		if e.Test == "" {
			return t.endPackage(e)
		}
		if !strings.Contains(e.Test, "/") {
			t.times = append(t.times, testTime{name, time.Duration(e.Elapsed * float64(time.Second))})
		}
		return t.endTest(name, e.Action)
	}
	return ""
}

func (t *tally) endTest(name testName, action string) (show string) {
	out, c := t.output[name], t.counts[name.pkg]
	delete(t.output, name)
	delete(t.inTest, name)
	switch action {
	case "pass":
		t.passed++
		c[0]++
	case "fail":
		t.failed++
		c[1]++
		t.failures = append(t.failures, failure{name, hasAny(strings.ReplaceAll(out, noLeaks, ""), finalWords)})
		show = withoutRunLines(out)
	case "skip":
		t.skipped++
		c[2]++
		t.reasons[skipReason(out)]++
	}
	t.counts[name.pkg] = c
	return show
}

// withoutRunLines removes the lines that go test prints when it starts or continues a test.
func withoutRunLines(out string) string {
	var kept strings.Builder
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, "=== ") {
			kept.WriteString(line)
		}
	}
	return kept.String()
}

// endPackage returns one line for a package that has tests. If a package failed but none of its
// tests did, for example because it does not compile, endPackage counts one failed test. Otherwise
// the failure would be missing from the count.
func (t *tally) endPackage(e event) (show string) {
	c := t.counts[e.Package]
	out := t.output[testName{e.Package, ""}]
	for name := range t.inTest {
		if name.pkg == e.Package {
			delete(t.inTest, name)
		}
	}
	delete(t.counts, e.Package)
	delete(t.output, testName{e.Package, ""})
	if e.Action == "fail" && c[1] == 0 {
		c[1]++
		t.failed++
		t.failures = append(t.failures, failure{testName{e.Package, ""}, true})
	}
	if e.Action == "skip" || c == [3]int{} {
		return "" // the package has no test files
	}
	mark := "ok"
	if e.Action == "fail" {
		mark, show = "FAIL", out
	}
	elapsed := time.Duration(e.Elapsed * float64(time.Second)).Round(100 * time.Millisecond)
	show += fmt.Sprintf("%-4s %7s  %s: %d passed, %d failed", mark, elapsed, e.Package, c[0], c[1])
	if c[2] > 0 {
		show += fmt.Sprintf(", %d skipped", c[2])
	}
	return show + "\n"
}

// running lists the tests that have started and not ended. It omits the parents of running
// subtests.
func (t *tally) running() (names []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name := range t.inTest {
		parent := false
		for other := range t.inTest {
			parent = parent || other.pkg == name.pkg && strings.HasPrefix(other.test, name.test+"/")
		}
		if !parent {
			names = append(names, name.pkg[strings.LastIndexByte(name.pkg, '/')+1:]+"."+name.test)
		}
	}
	slices.Sort(names)
	return names
}

// slowest returns the slowest tests, at most limit of them.
func (t *tally) slowest(limit int) []testTime {
	slices.SortStableFunc(t.times, func(a, b testTime) int { return cmp.Compare(b.took, a.took) })
	return t.times[:min(limit, len(t.times))]
}

func hasAny(s string, words []string) bool {
	return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(s, w) })
}

func (n testName) String() string { return strings.TrimSpace(n.pkg + " " + n.test) }

// top returns the name of the top-level test, without subtests, for `go test -run`.
func (n testName) top() testName {
	name, _, _ := strings.Cut(n.test, "/")
	return testName{n.pkg, name}
}

// repeatable returns the failed tests that may be repeated. It returns none if one of the failures
// is final, or if there are more than limit failures, because so many cannot be chance.
func (t *tally) repeatable(limit int) (names []testName) {
	for _, f := range t.failures {
		if f.final {
			return nil
		}
		if !slices.Contains(names, f.top()) {
			names = append(names, f.top())
		}
	}
	if len(names) > limit {
		return nil
	}
	return names
}

// removeFailure removes a test that passed the second time, and its subtests, from the failures.
func (t *tally) removeFailure(name testName) {
	before := len(t.failures)
	t.failures = slices.DeleteFunc(t.failures, func(f failure) bool { return f.top() == name })
	t.failed -= before - len(t.failures)
	t.passed += before - len(t.failures)
	t.flaky = append(t.flaky, name)
}

func (t *tally) skipReasons() (reasons []string) {
	for reason, n := range t.reasons {
		reasons = append(reasons, fmt.Sprintf("%d × %s", n, reason))
	}
	slices.Sort(reasons)
	return reasons
}

var skipLine = regexp.MustCompile(`(?m)^\s+\S+\.go:\d+: (.*)$`)

// skipReason returns the text that the test passed to t.Skip.
func skipReason(output string) string {
	m := skipLine.FindAllStringSubmatch(output, -1)
	if len(m) == 0 {
		return "no reason given"
	}
	return m[len(m)-1][1]
}
