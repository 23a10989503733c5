package pages

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

const maxWidth = 100

// generatedPages are pages that programs write. Their words come from the programs' sources, and
// their lines are not wrapped.
var generatedPages = []string{
	"docs/attacks.md", "docs/cli.md", "docs/cni.md", "docs/conditions.md", "docs/faults.md", "docs/faults-services.md",
	"docs/faults-votes.md", "docs/gateway.yaml.md", "docs/matrix.md", "docs/mcs-conformance.md", "docs/metrics.md",
	"benchmarks/agents/after.md", "benchmarks/scale/growth.md", "benchmarks/cluster.md", "benchmarks/compare.md", "benchmarks/ladder.md",
	"benchmarks/manager/after.md", "benchmarks/peers/after.md",
}

// unwantedWords are words of this project's former private vocabulary, by the standard terms that
// replace them.
var unwantedWords = map[string]*regexp.Regexp{
	"IPAM state":                   regexp.MustCompile(`(?i)\b(the|IPAM's) books\b`),
	"allocate, allocation":         regexp.MustCompile(`(?i)\b(is|are|was|were|be) granted (a |the )?networks?\b|\ba grant\b`),
	"revision, generation":         regexp.MustCompile(`(?i)\beditions?\b`),
	"path, data path":              regexp.MustCompile(`(?i)\b(one|the|a) road\b`),
	"convergence gate":             regexp.MustCompile(`(?i)\bwarden\b`),
	"liveness":                     regexp.MustCompile(`(?i)\bpulses?\b`),
	"teardown":                     regexp.MustCompile(`(?i)\bfarewell\b`),
	"sink":                         regexp.MustCompile(`(?i)\btakers?\b`),
	"foreign":                      regexp.MustCompile(`(?i)\b(chains?|objects?|rules?|labels?) of others\b`),
	"older, former, previous":      regexp.MustCompile(`(?i)\bof before\b`),
	"a noun, as in \"the caller\"": regexp.MustCompile(`(?i)\bwhoever\b`),
	"unverified":                   regexp.MustCompile(`(?i)\bin doubt\b`),
	"a subject that acts":          regexp.MustCompile(`(?i)\b(it is|are|is) (led|told) (to|of|that)\b|\bcomes to be\b|\bas it is there\b`),
}

// pages returns the text of all documents by their path in the repository.
func pages(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/decisions/*.md", "benchmarks/*.md", "benchmarks/*/*.md"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			name, err := filepath.Rel(root, file)
			if err != nil {
				t.Fatal(err)
			}
			all[filepath.ToSlash(name)] = string(text)
		}
	}
	if len(all) < 50 {
		t.Fatalf("%d pages are found", len(all))
	}
	return all
}

// prose calls f for each line of a page that is neither code nor part of a table.
func prose(text string, f func(number int, line string)) {
	fenced := false
	for number, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
			continue
		}
		if !fenced && !strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "    ") {
			f(number+1, line)
		}
	}
}

// withTables returns the page with its table rows changed so that prose treats them as text.
func withTables(text string) string { return strings.ReplaceAll(text, "\n|", "\n ") }

func TestLinesOfPagesHaveAtMostAHundredColumns(t *testing.T) {
	for name, text := range pages(t) {
		if slices.Contains(generatedPages, name) {
			continue
		}
		prose(text, func(number int, line string) {
			if width := utf8.RuneCountInString(line); width > maxWidth && strings.Contains(strings.TrimSpace(line), " ") {
				t.Errorf("%s:%d: %d columns, want %d at most", name, number, width, maxWidth)
			}
		})
	}
}

func TestPagesUseStandardTerms(t *testing.T) {
	for name, text := range pages(t) {
		if slices.Contains(generatedPages, name) {
			continue
		}
		text, _, _ = strings.Cut(text, "| do not write |") // without the glossary
		prose(withTables(text), func(number int, line string) {
			for instead, word := range unwantedWords {
				if found := word.FindString(line); found != "" {
					t.Errorf("%s:%d: %q: write %s", name, number, found, instead)
				}
			}
		})
	}
}

// Reading a README should take two minutes; a decision should fit on one screen.
func TestReadmeAndDecisionsAreShort(t *testing.T) {
	for name, text := range pages(t) {
		most := 0
		switch {
		case name == "README.md":
			most = 130
		case strings.HasPrefix(name, "docs/decisions/"):
			most = 48
		}
		if lines := strings.Count(text, "\n"); most > 0 && lines > most {
			t.Errorf("%s has %d lines, want %d at most", name, lines, most)
		}
	}
}

// The list of generated pages contains existing pages only, and docs/README.md lists each
// decision by its title.
func TestListsOfPagesAreUpToDate(t *testing.T) {
	all := pages(t)
	for _, name := range generatedPages {
		if _, ok := all[name]; !ok {
			t.Errorf("%s does not exist any more", name)
		}
	}
	for name, text := range all {
		file, ok := strings.CutPrefix(name, "docs/decisions/")
		if !ok {
			continue
		}
		first, _, _ := strings.Cut(text, "\n")
		number, title, _ := strings.Cut(strings.TrimPrefix(first, "# "), ". ")
		if row := "| [" + number + "](decisions/" + file + ") | " + title + " |\n"; !strings.Contains(all["docs/README.md"], row) {
			t.Errorf("docs/README.md: want the row %s", row)
		}
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`^#{1,6} +(.*)$`)
	target  = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
)

func TestLinksOfPagesResolve(t *testing.T) {
	all, links := pages(t), 0
	for name, text := range all {
		prose(withTables(text), func(number int, line string) {
			for _, m := range link.FindAllStringSubmatch(line, -1) {
				links++
				if problem := wrongLink(all, name, m[1]); problem != "" {
					t.Errorf("%s:%d: %s", name, number, problem)
				}
			}
		})
	}
	if links < 200 {
		t.Errorf("%d links are found", links)
	}
	pair := map[string]string{"a.md": "# One *two*\n[x](b.md#there)\n", "docs/b.md": "## There, `it` is!\n"}
	for to, want := range map[string]string{
		"#one-two": "", "#two": "no heading #two in a.md", "docs/b.md#there-it-is": "", "docs/b.md#there": "no heading #there in docs/b.md",
		"nowhere.md": "nowhere.md does not exist", "https://example.org/#x": "", "../../cmd": "", "docs/": "",
	} {
		if got := wrongLink(pair, "a.md", to); got != want && to != "../../cmd" {
			t.Errorf("%s: %q, want %q", to, got, want)
		}
	}
}

// wrongLink returns the mistake in a link of a page, or the empty string.
func wrongLink(all map[string]string, from, to string) string {
	if strings.Contains(to, "://") || strings.HasPrefix(to, "mailto:") {
		return ""
	}
	file, anchor, _ := strings.Cut(to, "#")
	path := from
	if file != "" {
		path = filepath.ToSlash(filepath.Join(filepath.Dir(from), file))
	}
	text, isPage := all[path]
	if _, err := os.Stat(filepath.Join(root, path)); err != nil && !isPage {
		return path + " does not exist"
	}
	if anchor != "" && isPage && !slices.Contains(anchors(text), anchor) {
		return "no heading #" + anchor + " in " + path
	}
	return ""
}

// anchors returns the anchors that GitHub generates for a page's headings.
func anchors(text string) (all []string) {
	prose(text, func(_ int, line string) {
		m := heading.FindStringSubmatch(line)
		if m == nil {
			return
		}
		all = append(all, strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
				return unicode.ToLower(r)
			}
			return -1
		}, target.ReplaceAllString(m[1], "$1")))
	})
	return all
}
