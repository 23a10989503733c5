package pages

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// ranFrom maps pages to the test file that reads their commands and runs them. The test names the
// page and each chapter.
var ranFrom = map[string]string{
	"README.md":               "test/fleet/pages_test.go",
	"docs/troubleshooting.md": "test/fleet/pages_test.go",
	"docs/lifecycle.md":       "test/nodes/lifecycle_test.go",
	"docs/install.md":         "test/nodes/install_test.go",
	"docs/recipes.md":         "test/fleet/recipes_test.go",
}

// A reason states why commands of a page are not run literally, and names the test that covers
// the same behavior.
type reason struct {
	page, begins string // path of the page; beginning of the commands, "" for all
	why          string
	tested       string // FILE: a word in it; "" if there is no test
}

var reasons = []reason{
	{"README.md", "isthmus install ", "containers are needed, and an image", "test/nodes/lifecycle_test.go: \"Install\""},
	{"README.md", "isthmus peer --context paris --remote-context oslo --services ", "containers and CoreDNS are needed", "test/nodes/names_test.go: \"--services\", \"default\""},
	{"README.md", "kubectl ", "containers and CoreDNS are needed", "test/nodes/names_test.go: getByName"},
	{"README.md", "make image ", "it is about a registry", "internal/image/licenses_test.go: SBOM("},
	{"README.md", "skopeo ", "a registry is needed", ""},
	{"README.md", "helm ", "containers are needed, and an image", "test/nodes/lifecycle_test.go: \"With Helm\""},
	{"README.md", "isthmus verify ", "containers are needed", "test/nodes/tools_test.go: \"verify\""},
	{"README.md", "isthmus uninstall ", "containers are needed, and an image", "test/nodes/lifecycle_test.go: \"Uninstall\""},
	{"docs/capture.md", "", "examples of arguments, which need traffic of that kind", "cmd/isthmus/gatewaykube_test.go: \"capture\""},
	{"docs/install.md", "make image-load", "it is about a containerd of the machine's", ""},
	{"docs/install.md", "skopeo ", "a registry is needed", ""},
	{"docs/lifecycle.md", "kubectl -n isthmus-system annotate lease ", "a restored Lease is needed, with voters that nobody knows", ""},
	{"docs/liqo.md", "", "a Liqo is needed; its objects are made from the page and exchanged with a manager", "test/control/liqodoc_test.go: docs/liqo.md"},
	{"docs/peering.md", "", "output of an example, in which a peer advertises other networks", "internal/peering/claims_test.go: Consent"},
	{"docs/recipes.md", "isthmus install --context paris --pod-cidr", "containers are needed, and an image", "test/control/refusal_test.go: reconfigure("},
	{"docs/recipes.md", "isthmus install --context oslo", "containers are needed, and an image", "test/nodes/lifecycle_test.go: \"Install\""},
	{"docs/recipes.md", "kubectl ", "no kubectl is there; the test applies the objects itself", "test/fleet/recipes_test.go: applyRecipe("},
	{"docs/mcs-conformance.md", "", "a checkout of the suite is needed", "test/nodes/mcs_test.go: *suite"},
	{"docs/services.md", "isthmus install ", "containers and CoreDNS are needed", "test/nodes/names_test.go: \"--configure-dns\""},
	{"docs/services.md", "isthmus peer ", "containers and CoreDNS are needed", "test/nodes/names_test.go: \"--services\", \"default\""},
	{"docs/services.md", "kubectl --context oslo apply ", "containers and CoreDNS are needed", "test/nodes/names_test.go: kind: ServiceExport"},
	{"docs/services.md", "curl ", "containers and CoreDNS are needed", "test/nodes/names_test.go: getByName"},
	{"docs/services.md", "kubectl ", "they show objects", ""},
	{"docs/services.md", "isthmus diagnose ", "containers and CoreDNS are needed", "test/nodes/names_test.go: \"diagnose\""},
	{"docs/services.md", "isthmus status ", "containers and CoreDNS are needed", "test/nodes/names_test.go: THEIR SERVICES HERE"},
	{"docs/services.md", "isthmus trace ", "containers and CoreDNS are needed", "test/nodes/names_test.go: \"trace\""},
	{"docs/services.md", "isthmus verify ", "containers and CoreDNS are needed", "test/nodes/names_test.go: imported Service default/shop"},
	{"docs/soak.md", "make soak ", "it takes hours", "test/fleet/soak_test.go: func TestSoak("},
	{"docs/performance.md", "", "a profile is for people to look at", ""},
}

// A new command of a page needs a test that runs the page, or an entry here with the reason why
// not.
func TestEveryCommandOnAPageIsTestedOrListedWithAReason(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	text := func(name string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Error(err)
		}
		return string(b)
	}
	used := make([]bool, len(reasons))
	commands := 0
	for _, file := range append(files, filepath.Join(root, "README.md"), filepath.Join(root, "CONTRIBUTING.md"), filepath.Join(root, "benchmarks", "README.md")) {
		page, _ := filepath.Rel(root, file)
		if page == "docs/cli.md" || page == "docs/experiments.md" { // the first is generated, and the second describes past experiments
			continue
		}
		all, err := Of(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range all {
			commands++
			why := slices.IndexFunc(reasons, func(r reason) bool { return r.page == page && strings.HasPrefix(c.Text, r.begins) })
			switch by := ranFrom[page]; {
			case why >= 0:
				used[why] = true
			case by == "":
				t.Errorf("%s, %s: no test runs %q, and no reason is given", page, c.Chapter, c.Text)
			case !strings.Contains(text(by), filepath.Base(page)+`"`) && !strings.Contains(text(by), page) || !strings.Contains(text(by), `"`+c.Chapter+`"`):
				t.Errorf("%s does not run the chapter %q of %s, with %q", by, c.Chapter, page, c.Text)
			}
		}
	}
	for i, r := range reasons {
		file, word, named := strings.Cut(r.tested, ": ")
		switch {
		case !used[i]:
			t.Errorf("%s has no command any more that begins with %q", r.page, r.begins)
		case named && !strings.Contains(text(file), word):
			t.Errorf("%s, %q: %s does not have %s", r.page, r.begins, file, word)
		}
	}
	if commands < 60 {
		t.Errorf("%d commands are found", commands)
	}
}

func TestCommandsAreFoundInIndentedAndFencedBlocks(t *testing.T) {
	page := filepath.Join(t.TempDir(), "page.md")
	if err := os.WriteFile(page, []byte(strings.ReplaceAll("# One\n\n    isthmus peer --context a \\\n      b  # why\n    output\n\nisthmus is text.\n\n## Two\n\n'''\n"+
		"$ kubectl apply -f - <<EOF\nmake nothing\nEOF\nhelm list\n'''\n", "'''", "```")), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := Of(page)
	want := []Command{{"One", "isthmus peer --context a b"}, {"Two", "kubectl apply -f - <<EOF"}, {"Two", "helm list"}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
}
