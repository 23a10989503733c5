package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/uninstall"
)

func newUninstallCommand() *cobra.Command {
	var access cluster.Access
	var o uninstall.Options
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove Isthmus from a cluster",
		Long: `Remove Isthmus from a cluster in this order: peerings; components; their objects in the
kernel of each node, by a Pod there; rights, custom resource definitions and the
namespace. Until its kernel is cleaned, a node refuses packets for peers, so no packet
leaves in the clear.

Run the command again if it was interrupted, or if somebody deleted the namespace before
the peerings. In the latter case set --image, because nothing in the cluster names the
image that cleans the nodes. With --force the command does not wait for peers and nodes
that are unreachable, and reports the objects that may remain there.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Timeout <= 0 {
				return cli.Usage("--timeout %v: want a duration, such as 5m", o.Timeout)
			}
			c, err := connect(access)
			if err != nil {
				return err
			}
			o.Report = reporter(cmd)
			return clusterError(uninstall.Run(cmd.Context(), c, o))
		},
	}
	addAccessFlags(cmd, &access, "", "")
	cmd.Flags().BoolVar(&o.Force, "force", false, "do not wait for peers and nodes that are unreachable; report the objects that may remain there")
	cmd.Flags().BoolVar(&o.KeepDefinitions, "keep-crds", false, "keep the custom resource definitions and their objects, such as the IPAM state")
	cmd.Flags().BoolVar(&o.BeforeHelm, "before-helm", false, "remove only the workloads, and objects that Helm did not install; for the chart's pre-delete hook")
	cmd.Flags().StringVar(&o.Image, "image", "", "image that cleans the nodes (default that of the route agents)")
	cmd.Flags().DurationVar(&o.Timeout, "timeout", 5*time.Minute, "how long to wait")
	return cmd
}
