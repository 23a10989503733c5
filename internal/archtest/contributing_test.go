package archtest

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestContributingPathsExist checks the table "Where things go" of CONTRIBUTING.md: each path in a
// row exists, and each identifier occurs in a file that the row names.
func TestContributingPathsExist(t *testing.T) {
	root := filepath.Join("..", "..")
	text, err := os.ReadFile(filepath.Join(root, "CONTRIBUTING.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "\n## Where things go\n")
	table, _, _ = strings.Cut(table, "\n## ")
	rows := 0
	for row := range strings.Lines(table) {
		if !strings.HasPrefix(row, "|") || strings.HasPrefix(row, "| ---") || strings.HasPrefix(row, "| to add") {
			continue
		}
		rows++
		for _, problem := range wrongInRow(t, root, row) {
			t.Errorf("%s\nin %s", problem, row)
		}
	}
	if rows < 25 {
		t.Errorf("%d rows, want 25 or more", rows)
	}
	for row, want := range map[string]string{
		"| x | `fabric/none.go` |":                         "fabric/none.go does not exist",
		"| x | `fabric/doc.go` (`noSuchName`) |":           "noSuchName stands in none of the row's files",
		"| x | `internal/kernel/own.go` `OverlayPort` |":   "",
		"| x | `internal/inspect/hops.go`, `nowhere.go` |": "nowhere.go does not exist",
	} {
		if got := strings.Join(wrongInRow(t, root, row), "; "); got != want {
			t.Errorf("%s: %q, want %q", row, got, want)
		}
	}
}

var (
	inCode     = regexp.MustCompile("`([^`]+)`")
	identifier = regexp.MustCompile(`^\w+$`)
)

// wrongInRow returns the paths and identifiers of a row that do not exist. A file name without a
// folder belongs to the last folder that the row names before it.
func wrongInRow(t *testing.T, root, row string) (problems []string) {
	t.Helper()
	var paths []string // existing paths that the row has named so far
	exists := func(path string) bool { _, err := os.Stat(filepath.Join(root, path)); return err == nil }
	var names []string
	for _, m := range inCode.FindAllStringSubmatch(row, -1) {
		word := m[1]
		switch {
		case strings.Contains(word, " "), strings.HasPrefix(word, "-"): // a command
		case exists(word):
			paths = append(paths, word)
		case strings.ContainsAny(word, "./"):
			beside := slices.IndexFunc(paths, func(path string) bool {
				return exists(filepath.Join(path, word)) || exists(filepath.Join(filepath.Dir(path), word))
			})
			if beside < 0 {
				problems = append(problems, word+" does not exist")
			} else if beside >= 0 {
				if path := filepath.Join(paths[beside], word); exists(path) {
					paths = append(paths, path)
				} else {
					paths = append(paths, filepath.Join(filepath.Dir(paths[beside]), word))
				}
			}
		case identifier.MatchString(word):
			names = append(names, word)
		}
	}
	for _, name := range names {
		if !slices.ContainsFunc(paths, func(path string) bool { return mentions(t, filepath.Join(root, path), name) }) {
			problems = append(problems, name+" stands in none of the row's files")
		}
	}
	return problems
}

// mentions reports whether a file, or a file in a folder, contains a word.
func mentions(t *testing.T, path, word string) (found bool) {
	t.Helper()
	whole := regexp.MustCompile(`\b` + word + `\b`)
	err := filepath.WalkDir(path, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(path, ".go") {
			return err
		}
		text, err := os.ReadFile(path)
		if err == nil && whole.Match(text) {
			found = true
			return fs.SkipAll
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}
