package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/cobra"
)

func TestExitCodeDistinguishesUsageFromFailure(t *testing.T) {
	for _, tc := range []struct {
		name    string
		args    []string
		err     error
		code    int
		message string
	}{
		{"fine", []string{"do"}, nil, Fine, ""},
		{"an error", []string{"do"}, errors.New("no luck"), Problem, "program: no luck\n"},
		{"a problem that was printed", []string{"do"}, ErrProblem, Problem, ""},
		{"wrong usage", []string{"do"}, Usage("--x %d: want 1", 2), Wrong, "program: --x 2: want 1\n"},
		{"unreachable, wrapped", []string{"do"}, fmt.Errorf("a: %w", Unreachable(errors.New("gone"))), Wrong, "program: a: gone\n"},
		{"too many arguments", []string{"do", "a", "b"}, nil, Wrong, "program: arguments \"a\" \"b\": want program do [flags]\nTry \"program do --help\".\n"},
		{"no such flag", []string{"do", "--nope"}, nil, Wrong, "program: unknown flag: --nope\nTry \"program do --help\".\n"},
	} {
		var out, errs bytes.Buffer
		root := &cobra.Command{Use: "program"}
		root.AddCommand(&cobra.Command{Use: "do", Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error { return tc.err }})
		if code := Run(root, tc.args, strings.NewReader(""), &out, &errs); code != tc.code || errs.String() != tc.message {
			t.Errorf("%s: code %d, %q; want %d, %q", tc.name, code, &errs, tc.code, tc.message)
		}
	}
}

func TestSignalCancelsContextAndIsReportedAsInterruption(t *testing.T) {
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		if signal.Ignored(s) { // nohup(1) ignores SIGHUP
			continue
		}
		var out, errs bytes.Buffer
		root := &cobra.Command{Use: "program", RunE: func(cmd *cobra.Command, _ []string) error {
			if err := syscall.Kill(syscall.Getpid(), s); err != nil {
				return err
			}
			<-cmd.Context().Done()
			return fmt.Errorf("step 3: %w", cmd.Context().Err())
		}}
		if code := Run(root, nil, strings.NewReader(""), &out, &errs); code != Problem || errs.String() != "program: interrupted: step 3: context canceled\n" {
			t.Errorf("%v: code %d, %q", s, code, &errs)
		}
	}
}

func TestPluginUsageNamesKubectl(t *testing.T) {
	for argv0, want := range map[string]string{
		"/usr/local/bin/kubectl-program": "kubectl program", "kubectl-program": "kubectl program", "program": "program", "kubectl-other": "program",
	} {
		root := &cobra.Command{Use: "program"}
		root.AddCommand(&cobra.Command{Use: "do", RunE: func(*cobra.Command, []string) error { return errors.New("no") }})
		As(root, argv0)
		for _, tc := range []struct {
			args    []string
			code    int
			message string
		}{{[]string{"do"}, Problem, want + ": no\n"}, {[]string{"do", "--nothing"}, Wrong, "Try \"" + want + " do --help\".\n"}} {
			var errs bytes.Buffer
			if code := Run(root, tc.args, nil, io.Discard, &errs); code != tc.code || !strings.HasSuffix(errs.String(), tc.message) {
				t.Errorf("%s %v: %d, %q; want %d, %q", argv0, tc.args, code, errs.String(), tc.code, tc.message)
			}
			root = &cobra.Command{Use: "program"}
			root.AddCommand(&cobra.Command{Use: "do", RunE: func(*cobra.Command, []string) error { return errors.New("no") }})
			As(root, argv0)
		}
	}
}

func TestEachVersionYieldsAValidImageTag(t *testing.T) {
	for version, want := range map[string]string{"(devel)": "devel", "v1.2.3+dirty": "v1.2.3-dirty", "0123456789ab-modified": "0123456789ab-modified"} {
		if got := tagOf(version); got != want {
			t.Errorf("%s: %s, want %s", version, got, want)
		}
	}
}
