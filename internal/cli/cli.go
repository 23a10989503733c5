// Package cli has the code that all programs of Isthmus share: exit codes, signals, flags and the
// version.
//
// The exit code is 0 for success, 1 if the command found a problem or failed, and 2 for wrong
// usage, or if a cluster or gateway could not be reached.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
)

// ExitCodes is the paragraph about exit codes in the help.
const ExitCodes = `Exit codes: 0 success; 1 the command found a problem or failed; 2 wrong usage, or a
cluster or gateway could not be reached.`

// Exit codes.
const (
	Fine    = 0
	Problem = 1
	Wrong   = 2
)

// codeError is an error that determines the program's exit code.
type codeError struct {
	code int
	err  error // nil: the command has already printed everything
}

func (e *codeError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *codeError) Unwrap() error { return e.err }

// Usage returns an error about the arguments. The program exits with code Wrong.
func Usage(format string, args ...any) error { return &codeError{Wrong, fmt.Errorf(format, args...)} }

// Unreachable marks err as the reason why a command could not reach its cluster or gateway. The
// program exits with code Wrong.
func Unreachable(err error) error { return &codeError{Wrong, err} }

// ErrProblem makes the program exit with code Problem. The command returns it after it has printed
// the problem.
var ErrProblem error = &codeError{code: Problem}

// startedAnnotation is the annotation of a command that has begun to run. From then on, its errors
// are not usage errors.
const startedAnnotation = "started"

// Run runs a program and returns its exit code. The first SIGINT, SIGTERM or SIGHUP cancels the
// command's context; a second one ends the program at once.
func Run(root *cobra.Command, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // nohup(1) ignores it
		signals = append(signals, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	defer stop()
	context.AfterFunc(ctx, stop)

	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SilenceUsage, root.SilenceErrors = true, true
	root.AddCommand(versionCommand(), referenceCommand())
	root.SetFlagErrorFunc(flagError)
	explainArgs(root)
	root.Version = Version()
	root.SetVersionTemplate(versionLine(root.Name()))
	if root.Annotations == nil {
		root.Annotations = make(map[string]string)
	}
	root.PersistentPreRun = func(*cobra.Command, []string) { root.Annotations[startedAnnotation] = "yes" }
	cmd, err := root.ExecuteContextC(ctx)
	return exitCode(ctx, root, cmd, err)
}

// As sets the program's name in the help to the name under which the program was called. `kubectl
// NAME` calls the program as the plugin kubectl-NAME. argv0 is os.Args[0].
func As(root *cobra.Command, argv0 string) {
	if filepath.Base(argv0) != "kubectl-"+root.Name() {
		return
	}
	if root.Annotations == nil {
		root.Annotations = make(map[string]string)
	}
	root.Annotations[cobra.CommandDisplayNameAnnotation] = "kubectl " + root.Name()
}

// exitCode prints err, which cmd returned, and returns the exit code.
func exitCode(ctx context.Context, root, cmd *cobra.Command, err error) int {
	if err == nil {
		return Fine
	}
	name := root.CommandPath()
	text := err.Error()
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		text = "interrupted: " + text
	}
	if text != "" {
		fmt.Fprintf(root.ErrOrStderr(), "%s: %s\n", name, text)
	}
	if code := (*codeError)(nil); errors.As(err, &code) {
		return code.code
	}
	if root.Annotations[startedAnnotation] == "" {
		fmt.Fprintf(root.ErrOrStderr(), "Try \"%s --help\".\n", cmd.CommandPath())
		return Wrong
	}
	return Problem
}
