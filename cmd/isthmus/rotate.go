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
		Long: `Begin a rotation of the WireGuard key of one cluster, or report how far the one in
progress is. The other clusters need do nothing.

The gateway answers to the current and the new key. Peers get the new public key
from the manager, and each moves to it without losing packets. When all have moved,
or when the patience of the gateway ends (--rotation-patience), the new key becomes
the only one. The preshared keys are renewed with it.

--now is for a key that somebody may have stolen. The new key replaces all keys of
the Secret at once, also those that cannot be read. Sessions end, and each peer is
out of reach until its manager has read the new key, a second or so. Without a way
to its API server that takes until there is one. A gateway that is cut off from its
API server answers to the former key until it reads the Secret.

--abort drops the next key again, as long as no peer was told of it: for a gateway
that does not answer to it. Later there is no way back, since a peer that has moved
accepts the former key no more.`,
		Example:           "  isthmus rotate-key --context paris --wait 5m",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Wait < 0 || (o.Now || o.Abort) && o.Wait > 0 {
				return cli.Usage("--wait %v: want a duration, such as 5m, and neither with --now nor with --abort", o.Wait)
			}
			if o.Now && o.Abort {
				return cli.Usage("--now and --abort: want one of them")
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
	cmd.Flags().BoolVar(&o.Abort, "abort", false, "drop the next key while no peer was told of it")
	cmd.Flags().DurationVar(&o.Wait, "wait", 0, "how long to wait for the end of the rotation; 0: only begin it")
	return cmd
}
