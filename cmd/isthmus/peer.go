package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/peering"
)

func newPeerCommand() *cobra.Command {
	var local, remote peering.Access
	var o peering.PeerOptions
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "peer --context A --remote-context B",
		Short: "Join two clusters",
		Long: `Join two clusters in which Isthmus is installed, and wait until traffic flows.

In each of them this makes a namespace for the peering, a ServiceAccount that the
other one may use for NetworkConfigs in that namespace and for nothing else, a
Secret with the identity at the other one, and a Peering. Repeating it changes
nothing, repairs what is missing and renews an identity that was revoked. Another
cluster that has the ID and name of the one peered before is refused.

The exit code is 1 when the clusters were not joined in time; what is missing on
which side is said.`,
		Example: "  isthmus peer --context paris --remote-context oslo",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if remote.Context == "" && remote.Kubeconfig == "" {
				return cli.Usage("want --remote-context, or --remote-kubeconfig: the cluster to be joined with")
			}
			if remote.Kubeconfig == "" {
				remote.Kubeconfig = local.Kubeconfig
			}
			if o.Timeout < 0 {
				return cli.Usage("--timeout %v: want a duration, or 0 to wait for nothing", o.Timeout)
			}
			a, err := connect(local)
			if err != nil {
				return err
			}
			b, err := connect(remote)
			if err != nil {
				return err
			}
			o.Report = reporter(cmd)
			if output != "" {
				o.Report = func(line string) { fmt.Fprintln(cmd.ErrOrStderr(), line) }
			}
			peerings, err := peering.Peer(cmd.Context(), a, b, o)
			if output != "" && peerings[0] != nil {
				err = errors.Join(err, output.Print(cmd.OutOrStdout(), map[string]any{"local": peerings[0], "remote": peerings[1]}))
			}
			return clusterError(err)
		},
	}
	addAccessFlags(cmd, &local, "", "")
	addAccessFlags(cmd, &remote, "remote-", " of the other cluster")
	cmd.Flags().StringVar(&local.Server, "server", "", "URL of this cluster's API server as the other cluster reaches it (default as in the kubeconfig)")
	cmd.Flags().StringVar(&remote.Server, "remote-server", "", "URL of the other cluster's API server as this cluster reaches it (default as in the kubeconfig)")
	cmd.Flags().StringVar(&o.Name, "name", "", "name of the Peering here (default the other cluster's name and six digits)")
	cmd.Flags().StringVar(&o.RemoteName, "remote-name", "", "name of the Peering there")
	cmd.Flags().BoolVar(&o.Replace, "replace", false, "the other cluster was made anew, or its authority changed: revoke the old one's rights and join this one")
	cmd.Flags().DurationVar(&o.Timeout, "timeout", time.Minute, "how long to wait; 0: not at all")
	cli.AddOutputFlag(cmd, &output, "print both Peerings at the end, and the progress on standard error")
	return cmd
}
