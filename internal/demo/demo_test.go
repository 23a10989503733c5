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

	"github.com/isthmus-net/isthmus/internal/lab"
)

// The demo that succeeds needs a real gateway: it is a script in test/scripts.

func TestFailedStepIsNamedWithTheGatewaysLogsAndNothingIsLeft(t *testing.T) {
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	broken := filepath.Join(t.TempDir(), "isthmus")
	if err := os.WriteFile(broken, []byte("#!/bin/sh\necho the reason >&2\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	name := lab.UniqueName("demo")
	var out strings.Builder
	err := Run(t.Context(), Options{Out: &out, Binary: broken, Name: name})
	if err == nil || !strings.Contains(err.Error(), `step 2, "Join each pair": gateway of cluster `) {
		t.Errorf("error %v", err)
	}
	if want := "Log of the gateway of cluster a, its end\n\tthe reason\n"; !strings.Contains(out.String(), want) {
		t.Errorf("no %q in\n%s", want, out.String())
	}
	if _, err := lab.Open(name); !errors.Is(err, lab.ErrNotFound) {
		t.Errorf("the lab is left: %v", err)
	}
}

func TestInterruptedDemoLeavesNothing(t *testing.T) {
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	never := filepath.Join(t.TempDir(), "isthmus")
	if err := os.WriteFile(never, []byte("#!/bin/sh\nexec sleep 1000\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	name := lab.UniqueName("demo")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	var out strings.Builder
	if err := Run(ctx, Options{Out: &out, Binary: never, Name: name}); !errors.Is(err, ErrInterrupted) {
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
