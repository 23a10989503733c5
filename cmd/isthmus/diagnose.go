package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/inspect"
)

func newDiagnoseCommand() *cobra.Command {
	var local, remote cluster.Access
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "diagnose [PEER]",
		Short: "Find the first broken hop on the path to a peer",
		Long: `Check the path between a cluster and a peer hop by hop: manager, gateway and route agents
of the cluster, its credentials for the peer, the exchange of networks, and the tunnel.
Name the first broken hop and its remedy. PEER is the name of a Peering or of the other
cluster; without it all peerings are checked.

With --remote-context or --remote-kubeconfig, the command also checks the other cluster. A
cluster that receives no packets cannot detect the reason by itself.

The exit code is 0 if every hop works, even with limits ("limited"), 1 if one is broken,
waits for another hop or is unknown, and 2 if a cluster could not be reached. If only the
other cluster could not be reached, the diagnosis of this one is still printed.`,
		Example:           "  isthmus diagnose --context paris oslo\n  isthmus diagnose --context paris --remote-context oslo",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: completePeering(&local),
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) == 1 {
				name = args[0]
			}
			a, err := connect(local)
			if err != nil {
				return err
			}
			var b *cluster.Cluster
			if otherCluster(&local, &remote) {
				if b, err = connect(remote); err != nil {
					return err
				}
			}
			d, queryErr := inspect.Diagnose(cmd.Context(), a, b, name)
			switch {
			case errors.Is(queryErr, inspect.ErrOtherPeer):
				return cli.Usage("%w", queryErr)
			case d == nil:
				return clusterError(queryErr)
			}
			if output.ForPrograms() {
				err = output.Print(cmd.OutOrStdout(), d)
			} else {
				err = d.Print(cmd.OutOrStdout())
			}
			switch {
			case err != nil:
			case queryErr != nil:
				err = clusterError(queryErr)
			case !d.Fine():
				err = cli.ErrProblem
			}
			return err
		},
	}
	addAccessFlags(cmd, &local, "", "")
	addAccessFlags(cmd, &remote, "remote-", " of the other cluster")
	cli.AddOutputFlag(cmd, &output, "print for programs")
	return cmd
}
