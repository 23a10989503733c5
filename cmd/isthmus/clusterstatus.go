package main

import (
	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/inspect"
)

// `isthmus status` and `isthmus trace` show either a cluster or the gateway on this machine.
// aboutCluster reports whether the command shows a cluster. If the user has set a flag that applies
// to only one of the two, the flag decides. Otherwise the command shows a cluster if there is a
// kubeconfig or the program runs in a Pod.
func aboutCluster(cmd *cobra.Command) bool {
	for _, flag := range []string{"gateway", "address", "flows"} { // not every command has all of these flags
		if cmd.Flags().Changed(flag) {
			return false
		}
	}
	for _, flag := range []string{"kubeconfig", "context", "namespace", "remote-context", "remote-kubeconfig"} {
		if cmd.Flags().Changed(flag) {
			return true
		}
	}
	return cluster.HasKubeconfig()
}

func clusterStatus(cmd *cobra.Command, access cluster.Access, output cli.Output) error {
	c, err := connect(access)
	if err != nil {
		return err
	}
	if err := c.Identify(cmd.Context()); err != nil {
		return clusterError(err)
	}
	s, err := inspect.StatusOf(cmd.Context(), c)
	if err != nil {
		return clusterError(err)
	}
	if output.ForPrograms() {
		err = output.Print(cmd.OutOrStdout(), s)
	} else {
		err = s.Print(cmd.OutOrStdout(), output == "wide")
	}
	if err != nil {
		return err
	}
	if !s.Ready() {
		return cli.ErrProblem
	}
	return nil
}
