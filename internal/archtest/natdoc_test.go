package archtest

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestNATDocumentNamesItsTests compares docs/nat.md with the tests. Every row of a table of
// requirements must have a status. A requirement that is met must name its tests, and each named
// test must exist. Each test that is named after an RFC must have a row.
func TestNATDocumentNamesItsTests(t *testing.T) {
	root := filepath.Join("..", "..")
	text, err := os.ReadFile(filepath.Join(root, "docs", "nat.md"))
	if err != nil {
		t.Fatal(err)
	}
	tests := testNames(t, root)
	rows, problems := requirements(string(text), tests)
	for _, p := range problems {
		t.Error(p)
	}
	for rfc, numbers := range mustHaveRow {
		for number := range strings.FieldsSeq(numbers) {
			if !slices.ContainsFunc(rows, func(r requirement) bool { return r.rfc == rfc && r.number == number }) {
				t.Errorf("%s has no row for %s", rfc, number)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(tests)) {
		inRow := func(r requirement) bool { return slices.Contains(r.tests, name) }
		if strings.HasPrefix(name, "TestRFC") && !slices.ContainsFunc(rows, inRow) {
			t.Errorf("%s is named after an RFC, but no row names it", name)
		}
	}
}

func TestNATDocumentCheckCatchesErrors(t *testing.T) {
	tests := map[string]bool{"TestA": true}
	for row, want := range map[string]string{
		"| REQ-1 | a | met | b | `TestA` |":            "",
		"| REQ-1 | a | not met | b | |":                "",
		"| REQ-1 | a | in part | b | `TestA` |":        "",
		"| REQ-1 | a | met | b | |":                    "names no test",
		"| REQ-1 | a | met | b | `TestB` |":            "TestB does not exist",
		"| REQ-1 | a | not met | b | `TestB` |":        "TestB does not exist",
		"| REQ-1 | a | nearly | b | `TestA` |":         `status "nearly"`,
		"| REQ-1 | a | n/a | b |":                      "4 columns",
		"| REQ-1 | | met | b | `TestA` |":              "says nothing",
		"| REQ-1 | a | met | | `TestA` |\n| | | | | |": "says nothing",
	} {
		_, problems := requirements("### RFC 4787\n\n| number | asks | status | how | tests |\n|---|---|---|---|---|\n"+row+"\n", tests)
		if got := strings.Join(problems, "; "); want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", row, got, want)
		}
	}
}

// mustHaveRow lists the requirements of the RFCs about NAT behavior. Each must have a row.
var mustHaveRow = map[string]string{
	"RFC 4787": `REQ-1 REQ-2 REQ-3 REQ-3a REQ-4 REQ-5 REQ-5a REQ-5b REQ-5c REQ-6 REQ-6a REQ-7 REQ-8 REQ-8a REQ-9 REQ-9a
		REQ-10 REQ-10a REQ-11 REQ-12 REQ-12a REQ-12b REQ-13 REQ-13a REQ-14 REQ-14a`,
	"RFC 5382": "REQ-1 REQ-2 REQ-2a REQ-3 REQ-3a REQ-3b REQ-4 REQ-4a REQ-5 REQ-5a REQ-6 REQ-7 REQ-8 REQ-8a REQ-9 REQ-10",
	"RFC 5508": `REQ-1 REQ-1a REQ-2 REQ-2a REQ-3 REQ-3a REQ-3b REQ-3c REQ-3d REQ-4 REQ-4a REQ-4b REQ-4c REQ-5 REQ-5a REQ-5b REQ-5c
		REQ-6 REQ-7 REQ-7a REQ-8 REQ-9 REQ-10a REQ-10b REQ-10c REQ-10d REQ-10e REQ-10f REQ-11`,
	"RFC 7857": "2 2.1 2.2 3 4 5 6 7 7.1 8 9 10 11 12",
}

// A requirement is a row of a table below a heading "### RFC ...".
type requirement struct {
	rfc, number string
	tests       []string
}

var (
	statuses = []string{"met", "in part", "not met", "n/a"}
	testName = regexp.MustCompile("`(Test\\w+)`")
)

// requirements reads the tables. The columns are number, requirement, status, implementation,
// tests.
func requirements(text string, tests map[string]bool) (rows []requirement, problems []string) {
	rfc := ""
	for n, line := range strings.Split(text, "\n") {
		named := []string{}
		for _, m := range testName.FindAllStringSubmatch(line, -1) {
			if named = append(named, m[1]); !tests[m[1]] {
				problems = append(problems, fmt.Sprintf("line %d: %s does not exist", n+1, m[1]))
			}
		}
		if heading, ok := strings.CutPrefix(line, "#"); ok {
			rfc = ""
			if title := strings.TrimLeft(heading, "# "); strings.HasPrefix(title, "RFC ") {
				rfc = strings.TrimRight(strings.Join(strings.Fields(title)[:2], " "), ",:")
			}
			continue
		}
		if rfc == "" || !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|---") || strings.HasPrefix(line, "| number ") {
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		r := requirement{rfc: rfc, number: cells[0], tests: named}
		fail := func(format string, args ...any) {
			problems = append(problems, fmt.Sprintf("line %d, %s %s: %s", n+1, r.rfc, r.number, fmt.Sprintf(format, args...)))
		}
		if len(cells) != 5 {
			fail("%d columns, want number, what it asks, status, how, tests", len(cells))
			continue
		}
		rows = append(rows, r)
		switch {
		case r.number == "" || cells[1] == "" || cells[3] == "":
			fail("says nothing")
		case !slices.Contains(statuses, cells[2]):
			fail("status %q, want one of %q", cells[2], statuses)
		case cells[2] == "met" && len(r.tests) == 0:
			fail("is met, yet names no test")
		}
	}
	return rows, problems
}

var testFunc = regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)

// testNames returns the names of all tests of this module and of the modules nested in it.
func testNames(t *testing.T, root string) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "bin"):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		b, err := os.ReadFile(path)
		for _, m := range testFunc.FindAllStringSubmatch(string(b), -1) {
			names[m[1]] = true
		}
		return err
	})
	if err != nil || len(names) < 100 {
		t.Fatalf("%d tests below %s: %v", len(names), root, err)
	}
	return names
}
