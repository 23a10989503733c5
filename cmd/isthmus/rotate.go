package main

import (
	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/peering"
)

func newRotateKeyCommand() *cobra.Command {
	var access cluster.Access
	var o peering.RotateOptions
	cmd := &cobra.Command{
		Use:   "rotate-key [--context A]",
		Short: "Give a cluster a new WireGuard key",
		Long: `Begin a rotation of a cluster's WireGuard key, or show the progress of the current one.
Nothing has to be done in the other clusters.

During a rotation the gateway accepts the current and the new key. Peers get the new
public key from the manager, and each peer switches to it without losing packets. When all
peers have switched, or after the gateway's --rotation-patience, only the new key remains.
The preshared keys are renewed, too.

Use --now for a key that may be stolen. The new key replaces all keys of the Secret at
once, including unreadable ones. Sessions end, and each peer is out of reach for about a
second, until its manager has read the new key. If the manager cannot publish the key at
a peer, that peer stays out of reach. A gateway that is cut off from its API server
accepts the old key until it reads the Secret.

Use --abort to drop the new key, for example because a gateway rejects it. This fails if a
peer has already received the new key, because a peer that has switched no longer accepts
the old key.`,
		Example:           "  isthmus rotate-key --context paris --wait 5m",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Wait < 0 || (o.Now || o.Abort) && o.Wait > 0 {
				return cli.Usage("--wait %v: want a duration such as 5m, without --now and --abort", o.Wait)
			}
			if o.Now && o.Abort {
				return cli.Usage("--now and --abort: want only one of them")
			}
			c, err := connect(access)
			if err != nil {
				return err
			}
			o.Report = reporter(cmd)
			return clusterError(peering.RotateKey(cmd.Context(), c, o))
		},
	}
	addAccessFlags(cmd, &access, "", "")
	cmd.Flags().BoolVar(&o.Now, "now", false, "replace the key at once; sessions end")
	cmd.Flags().BoolVar(&o.Abort, "abort", false, "drop the new key, if no peer has received it yet")
	cmd.Flags().DurationVar(&o.Wait, "wait", 0, "how long to wait until the rotation is complete; 0: do not wait")
	return cmd
}
