package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// Only failures are tested here. A script in test/scripts runs the complete demo with the real
// program.

// kube returns the folder of etcd and kube-apiserver.
func kube(t *testing.T) string {
	t.Helper()
	dir, err := kubetest.Build(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// program returns the path of a shell script that replaces the isthmus program.
func program(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "isthmus")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestErrorNamesFailedStepAndLabIsRemoved(t *testing.T) {
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	fails := program(t, "echo the reason >&2; exit 1")
	for _, part := range []struct {
		what string
		play func(*narrator) error
	}{
		{`step 2, "Joined by two files, without an API server": gateway of cluster a: `, runFiles},
		{`step 1, "Three clusters, one PodCIDR": cluster a: isthmus install: exit status 1`, func(n *narrator) error { return runFleet(n, kube(t), 0) }},
	} {
		name := lab.UniqueName("demo")
		var out strings.Builder
		err := part.play(&narrator{Options: Options{Out: &out, Binary: fails, Name: name}, ctx: t.Context()})
		if err == nil || !strings.Contains(err.Error(), part.what) || !strings.Contains(err.Error()+out.String(), "the reason") {
			t.Errorf("error %v; want %s, the reason", err, part.what)
		}
		if _, err := lab.Open(name); !errors.Is(err, lab.ErrNotFound) {
			t.Errorf("the lab is left: %v", err)
		}
	}
}

func TestInterruptedDemoLeavesNothing(t *testing.T) {
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	hangs := program(t, "exec sleep 1000")
	for _, play := range []func(*narrator) error{runFiles, func(n *narrator) error { return runFleet(n, kube(t), 0) }} {
		name := lab.UniqueName("demo")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var out strings.Builder
		if err := play(&narrator{Options: Options{Out: &out, Binary: hangs, Name: name}, ctx: ctx}); !errors.Is(err, ErrInterrupted) {
			t.Errorf("error %v", err)
		}
		if strings.Contains(out.String(), "Everything worked") {
			t.Error("an interrupted demo claims success")
		}
		if _, err := lab.Open(name); !errors.Is(err, lab.ErrNotFound) {
			t.Errorf("the lab is left: %v", err)
		}
	}
}

func TestPingsAreCountedWithTheLongestPauseBetweenAnswers(t *testing.T) {
	p := &pings{last: time.Now().Add(-time.Second)}
	for _, answered := range []bool{true, true, false, true} {
		p.note(answered)
	}
	if p.sent != 4 || p.answered != 3 || p.inRow != 1 || p.pause < time.Second || p.pause > time.Minute {
		t.Errorf("%+v; want 4 sent, 3 answered, 1 in a row, a pause of a second", p)
	}
}

func TestIndentKeepsEmptyLinesEmpty(t *testing.T) {
	var out strings.Builder
	w := indent(&out)
	for _, part := range []string{"one\ntw", "o\n\n", "three"} {
		fmt.Fprint(w, part)
	}
	if got, want := out.String(), "  one\n  two\n\n  three"; got != want {
		t.Errorf("%q; want %q", got, want)
	}
}
