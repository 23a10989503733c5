package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/peering"
)

func newReleaseGatewayCommand() *cobra.Command {
	var access cluster.Access
	var o peering.ReleaseOptions
	cmd := &cobra.Command{
		Use:   "release-gateway [--context A]",
		Short: "Move the active gateway of a cluster to the standby",
		Long: `Make the active gateway hand over to the standby, for example before work on its node.
Connections survive, as in a drain or a rollout.

The command evicts the Pod of the active gateway, and returns when another gateway is
active. You need the right to create pods/eviction. The Deployment replaces the Pod, and
the new Pod becomes the standby. If no standby is ready, the command fails and
changes nothing.`,
		Example:           "  isthmus release-gateway --context paris",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Timeout <= 0 {
				return cli.Usage("--timeout %v: want a duration, such as 1m", o.Timeout)
			}
			c, err := connect(access)
			if err != nil {
				return err
			}
			o.Report = reporter(cmd)
			return clusterError(peering.ReleaseGateway(cmd.Context(), c, o))
		},
	}
	addAccessFlags(cmd, &access, "", "")
	cmd.Flags().DurationVar(&o.Timeout, "timeout", time.Minute, "how long to wait")
	return cmd
}
