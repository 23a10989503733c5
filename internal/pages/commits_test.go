package pages

import (
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

const maxSubject = 72

var (
	subject  = regexp.MustCompile(`^[a-z0-9][\w./, -]*: \S`)
	headless = regexp.MustCompile(`: (what|who|whoever|which|whatever) `)
)

// wrongSubject returns the mistake in the subject of a commit, or the empty string.
func wrongSubject(s string) string {
	switch length := utf8.RuneCountInString(s); {
	case length > maxSubject:
		return "longer than 72 characters"
	case !subject.MatchString(s):
		return "not PACKAGE: VERB OBJECT"
	case headless.MatchString(strings.ToLower(s)):
		return "begins with a clause without a subject: say what the commit does"
	}
	return ""
}

func TestCommitSubjectsAreShortAndImperative(t *testing.T) {
	for s, want := range map[string]string{
		"natengine: keep the port of a flow across rule changes": "",
		"manager/services, docs: order exports by age":           "",
		"kubetest: what listens there is not what was before":    "begins with a clause without a subject: say what the commit does",
		"Fix it": "not PACKAGE: VERB OBJECT",
		"gateway: a gateway on the host's network follows of Nodes where they are alone": "longer than 72 characters",
	} {
		if got := wrongSubject(s); got != want {
			t.Errorf("%q: %q, want %q", s, got, want)
		}
	}
	git := func(args ...string) string {
		out, err := exec.Command("git", args...).Output()
		if err != nil {
			t.Skipf("needs the history of git: %v", err)
		}
		return strings.TrimSpace(string(out))
	}
	// The rules apply from the commit that added this file.
	since := git("log", "-1", "--diff-filter=A", "--format=%H", "--", "commits_test.go")
	if since == "" {
		t.Skip("needs the history of git: this file is in no commit")
	}
	for line := range strings.Lines(git("log", "--no-merges", "--ancestry-path", "--format=%h %s", since+"..HEAD")) {
		hash, s, _ := strings.Cut(strings.TrimSpace(line), " ")
		if problem := wrongSubject(s); problem != "" {
			t.Errorf("commit %s, %q: %s", hash, s, problem)
		}
	}
}
