package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/peering"
)

func newUnpeerCommand() *cobra.Command {
	var local, remote cluster.Access
	var o peering.UnpeerOptions
	cmd := &cobra.Command{
		Use:   "unpeer --context A {--remote-context B | NAME}",
		Short: "End the peering of two clusters",
		Long: `End a peering: with --remote-context in both clusters, or with NAME only in this cluster.
NAME is the name of its Peering or of the other cluster.

First the command revokes the rights of the other cluster's manager in this cluster. With
--remote-context it also revokes the rights of this cluster's manager in the other one. In
that case each manager keeps the right to delete its objects in the other cluster, except
with --force, or if the peering is in-band. Then the command deletes the Peerings, and each
manager deletes the objects that it created and may still delete. If the peering is
in-band, the tunnel closes, and with both contexts and without --force the command itself
deletes each manager's objects in the other cluster. Last, the command deletes the
remaining rights, identities and namespaces. If the two clusters are not peered, the
command succeeds. An unknown NAME is an error.

If the API server of the other cluster is unreachable, the manager waits for it, because
objects of the manager may remain there. With --force the manager does not wait, and the
command reports the objects that may remain. If no manager runs, --force does the
manager's work.

For 24 hours, nodes still refuse packets for the networks of the former peer, and no other
peer gets these networks.`,
		Example:           "  isthmus unpeer --context paris --remote-context oslo\n  isthmus unpeer --context paris oslo --force",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: completePeering(&local),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				o.Name = args[0]
			}
			both := otherCluster(&local, &remote)
			if !both && o.Name == "" {
				return cli.Usage("want the NAME of a Peering, or --remote-context for both sides; `isthmus status` shows the names")
			}
			if o.Timeout <= 0 {
				return cli.Usage("--timeout %v: want a duration, such as 60s", o.Timeout)
			}
			a, err := connect(local)
			if err != nil {
				return err
			}
			var b *cluster.Cluster
			if both {
				if b, err = connect(remote); err != nil {
					return err
				}
			}
			o.Report = reporter(cmd)
			return clusterError(peering.Unpeer(cmd.Context(), a, b, o))
		},
	}
	addAccessFlags(cmd, &local, "", "")
	addAccessFlags(cmd, &remote, "remote-", " of the other cluster")
	cmd.Flags().BoolVar(&o.Force, "force", false, "do not wait for the other cluster; report the objects that may remain there")
	cmd.Flags().DurationVar(&o.Timeout, "timeout", time.Minute, "how long to wait")
	return cmd
}
