package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

// Exit codes.
const (
	exitFine    = 0
	exitProblem = 1 // a problem was found
	exitUsage   = 2 // used wrongly, or what was asked could not be reached
)

// codeError ends the program with a code of its own.
type codeError struct {
	code int
	err  error // nil: everything has been said
}

func (e *codeError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *codeError) Unwrap() error { return e.err }

// unreachable says that err kept the command from finding out anything.
func unreachable(err error) error { return &codeError{exitUsage, err} }

// problemFound ends with exitProblem after the command has printed the problem.
var problemFound = &codeError{code: exitProblem}

// started tells errors of a command from errors in its use.
const started = "started"

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "isthmus",
		Short: "Join the pod networks of Kubernetes clusters, even with the same PodCIDR",
		Long: `Isthmus joins the pod networks of independent Kubernetes clusters over WireGuard,
in userspace. Pods reach remote pods by IP, even when the clusters use the same
PodCIDR.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		PersistentPreRun: func(cmd *cobra.Command, _ []string) {
			cmd.Root().Annotations = map[string]string{started: cmd.CommandPath()}
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.AddCommand(
		newManagerCommand(),
		newGatewayCommand(),
		newRouteAgentCommand(),
		newInstallCommand(),
		newPeerCommand(),
		newUnpeerCommand(),
		newStatusCommand(),
		newTraceCommand(),
		newGenkeyCommand(),
		newPubkeyCommand(),
		newLabCommand(),
		newDemoCommand(),
		newVersionCommand(),
	)
	return root
}

// exitCode prints err and says how to end.
func exitCode(root *cobra.Command, err error) int {
	if err == nil {
		return exitFine
	}
	if text := err.Error(); text != "" {
		fmt.Fprintf(root.ErrOrStderr(), "isthmus: %s\n", text)
	}
	if code := (*codeError)(nil); errors.As(err, &code) {
		return code.code
	}
	if root.Annotations[started] == "" {
		fmt.Fprintf(root.ErrOrStderr(), "Try \"isthmus --help\".\n")
		return exitUsage
	}
	return exitProblem
}
