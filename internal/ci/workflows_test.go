package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// A workflow holds the fields of a GitHub Actions workflow that the tests read.
type workflow struct {
	On   map[string]any `yaml:"on"`
	Jobs map[string]struct {
		If       string            `yaml:"if"`
		Limit    int               `yaml:"timeout-minutes"`
		Rights   map[string]string `yaml:"permissions"`
		Strategy struct {
			Matrix struct {
				Target []string `yaml:"target"`
			} `yaml:"matrix"`
		} `yaml:"strategy"`
		Steps []struct {
			Run  string `yaml:"run"`
			Uses string `yaml:"uses"`
		} `yaml:"steps"`
	} `yaml:"jobs"`
}

func workflows(t *testing.T) map[string]workflow {
	t.Helper()
	files, err := filepath.Glob("../../.github/workflows/*.yml")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]workflow{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var w workflow
		if err := yaml.Unmarshal(text, &w); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		all[strings.TrimSuffix(filepath.Base(file), ".yml")] = w
	}
	return all
}

// An action's code runs with the job's permissions. A tag can be moved to other code; a commit
// cannot.
func TestWorkflowsPinActionsToCommits(t *testing.T) {
	byCommit := regexp.MustCompile(`^[\w-]+/[\w/-]+@[0-9a-f]{40}$`)
	used := 0
	for name, w := range workflows(t) {
		for job, j := range w.Jobs {
			for _, s := range j.Steps {
				if s.Uses == "" {
					continue
				}
				if used++; !byCommit.MatchString(s.Uses) {
					t.Errorf("%s.yml, job %s: uses %s; want the action's commit, 40 hexadecimal digits", name, job, s.Uses)
				}
			}
		}
	}
	if used == 0 {
		t.Error("no workflow uses an action")
	}
}

var (
	makeTarget = regexp.MustCompile(`(?m)^([a-z0-9-]+):`)
	makeCall   = regexp.MustCompile(`(?m)(?:^|\s)make ([a-z0-9-]+)`)
)

func TestWorkflowJobsRunExistingTargetsAndHaveTimeouts(t *testing.T) {
	text, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	var targets []string
	for _, m := range makeTarget.FindAllStringSubmatch(string(text), -1) {
		targets = append(targets, m[1])
	}
	calls := 0
	for name, w := range workflows(t) {
		for job, j := range w.Jobs {
			if j.Limit == 0 {
				t.Errorf("%s, %s: no timeout-minutes", name, job)
			}
			called := slices.Clone(j.Strategy.Matrix.Target)
			for _, s := range j.Steps {
				for _, m := range makeCall.FindAllStringSubmatch(s.Run, -1) {
					called = append(called, m[1])
				}
			}
			calls += len(called)
			for _, target := range called {
				if !slices.Contains(targets, target) {
					t.Errorf("%s, %s: the Makefile has no target %q", name, job, target)
				}
			}
		}
	}
	if calls < 10 {
		t.Errorf("%d calls of make are found", calls)
	}
}

// Each test target of the Makefile runs in a workflow, or is in a list with the reason why not.
func TestEachTestTargetRunsInAWorkflow(t *testing.T) {
	text, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := map[string]string{
		"test":     ".ci/run calls it",
		"test-mcs": "a checkout of the conformance suite is needed",
	}
	var run []string
	for _, w := range workflows(t) {
		for _, j := range w.Jobs {
			run = append(run, j.Strategy.Matrix.Target...)
			for _, s := range j.Steps {
				run = append(run, strings.Fields(s.Run)...)
			}
		}
	}
	for _, m := range makeTarget.FindAllStringSubmatch(string(text), -1) {
		if target := m[1]; strings.HasPrefix(target, "test") && elsewhere[target] == "" && !slices.Contains(run, target) {
			t.Errorf("no workflow runs make %s", target)
		}
	}
}

// A manual run of the release workflow builds everything, but has no permission to publish.
func TestReleaseWorkflowPublishesOnlyForTags(t *testing.T) {
	w := workflows(t)["release"]
	if _, ok := w.On["workflow_dispatch"]; !ok {
		t.Error("the release workflow cannot be run by hand")
	}
	published := 0
	for name, j := range w.Jobs {
		if len(j.Rights) == 0 {
			for _, s := range j.Steps {
				if strings.Contains(s.Run, "push") || strings.Contains(s.Run, "gh release") {
					t.Errorf("job %s publishes and asks for no right", name)
				}
			}
			continue
		}
		published++
		if j.If != "github.event_name == 'push' && github.ref_type == 'tag'" {
			t.Errorf("job %s has rights %v and runs if %q", name, j.Rights, j.If)
		}
	}
	if published != 1 {
		t.Errorf("%d jobs publish", published)
	}
}
