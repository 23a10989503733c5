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

// The demo that succeeds needs the real program: it is a script in test/scripts.

// kube is the folder of etcd and kube-apiserver.
func kube(t *testing.T) string {
	t.Helper()
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	dir, err := kubetest.Build(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// program is one that stands in for isthmus.
func program(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "isthmus")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFailedStepIsNamedWithItsReasonAndNothingIsLeft(t *testing.T) {
	name := lab.UniqueName("demo")
	var out strings.Builder
	err := Run(t.Context(), Options{Out: &out, Kube: kube(t), Binary: program(t, "echo the reason >&2; exit 1"), Name: name})
	if err == nil || !strings.Contains(err.Error(), `step 1, "Three clusters, one PodCIDR": cluster a: isthmus install: exit status 1`) ||
		!strings.Contains(err.Error(), "the reason") {
		t.Errorf("error %v", err)
	}
	if _, err := lab.Open(name); !errors.Is(err, lab.ErrNotFound) {
		t.Errorf("the lab is left: %v", err)
	}
}

func TestInterruptedDemoLeavesNothing(t *testing.T) {
	name, dir := lab.UniqueName("demo"), kube(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var out strings.Builder
	if err := Run(ctx, Options{Out: &out, Kube: dir, Binary: program(t, "exec sleep 1000"), Name: name}); !errors.Is(err, ErrInterrupted) {
		t.Errorf("error %v", err)
	}
	if strings.Contains(out.String(), "Everything worked") {
		t.Error("an interrupted demo claims success")
	}
	if _, err := lab.Open(name); !errors.Is(err, lab.ErrNotFound) {
		t.Errorf("the lab is left: %v", err)
	}
}

func TestIndentLeavesEmptyLinesAlone(t *testing.T) {
	var out strings.Builder
	w := indent(&out)
	for _, part := range []string{"one\ntw", "o\n\n", "three"} {
		fmt.Fprint(w, part)
	}
	if got, want := out.String(), "  one\n  two\n\n  three"; got != want {
		t.Errorf("%q; want %q", got, want)
	}
}
