package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/peering"
)

func newPeerCommand() *cobra.Command {
	var local, remote cluster.Access
	var o peering.PeerOptions
	var output cli.Output
	var chosen claimFlags
	var inBand bool
	cmd := &cobra.Command{
		Use:   "peer --context A {--remote-context B | NAME}",
		Short: "Join two clusters, or show a peer's changed networks and agree to them",
		Long: `Join two clusters in which Isthmus is installed, and wait until traffic flows.

In each cluster the command creates a namespace for the peering, a ServiceAccount with
which the other cluster can write only its own objects in that namespace, a Secret with
the identity (the credentials for the other cluster), and a Peering. When repeated, it
restores missing objects and renews a revoked identity. The command refuses a cluster that
was recreated with the same ID and name, unless --replace is set.

At the end it shows for each network whether the other side uses it unchanged or
remaps it, and why. If a peer later advertises other networks, and its pods would get new
addresses here, the old networks stay in force until you agree. With the NAME of a Peering
or of the other cluster, the command shows the changed networks, and needs only this
cluster. --consent agrees to exactly these networks, and fails if the peer has changed
them meanwhile.

The exit code is 1 if the clusters were not joined in time, or if changed networks wait for
consent. The command prints what is missing, and on which side.`,
		Example: `  isthmus peer --context paris --remote-context oslo
  isthmus peer --context paris oslo
  isthmus peer --context paris oslo --consent 10.48.0.0/14,10.60.0.0/20`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: completePeering(&local),
		RunE: func(cmd *cobra.Command, args []string) error {
			both := otherCluster(&local, &remote)
			switch {
			case !both && len(args) == 0:
				return cli.Usage("want --remote-context or --remote-kubeconfig to join another cluster, or the NAME of a Peering to show it")
			case both && len(args) > 0:
				return cli.Usage("%q: want either the NAME of a Peering, to show it, or --remote-context, to join two clusters", args[0])
			case o.Timeout < 0:
				return cli.Usage("--timeout %v: want a duration, or 0 not to wait", o.Timeout)
			}
			if cmd.Flags().Changed("in-band") {
				o.InBand = &inBand
			}
			if !cmd.Flags().Changed("services") {
				o.Services = nil
			}
			for _, name := range o.Services {
				if name != "*" && len(validation.IsDNS1123Label(name)) > 0 {
					return cli.Usage("--services %q: want names of namespaces, or *", name)
				}
			}
			var err error
			if !both {
				err = aboutOne(cmd, args[0])
			}
			if err == nil {
				o.Claims, err = chosen.claims(cmd)
			}
			if err != nil {
				return err
			}
			o.Report = reporter(cmd)
			if output != "" {
				o.Report = func(line string) { fmt.Fprintln(cmd.ErrOrStderr(), line) }
			}
			a, err := connect(local)
			if err != nil {
				return err
			}
			result := map[string]any{}
			if both {
				err = join(cmd, a, remote, o, result)
			} else {
				err = review(cmd, a, args[0], o, result)
			}
			if output != "" && len(result) > 0 {
				err = errors.Join(err, output.Print(cmd.OutOrStdout(), result))
			}
			return clusterError(err)
		},
	}
	addAccessFlags(cmd, &local, "", "")
	addAccessFlags(cmd, &remote, "remote-", " of the other cluster")
	cmd.Flags().StringVar(&local.Server, "server", "", "URL by which the other cluster reaches this cluster's API server (default from the kubeconfig)")
	cmd.Flags().StringVar(&remote.Server, "remote-server", "", "URL by which this cluster reaches the other cluster's API server (default from the kubeconfig)")
	cmd.Flags().StringVar(&o.Name, "name", "", "name of the Peering in this cluster (default the other cluster's name and six digits)")
	cmd.Flags().StringVar(&o.RemoteName, "remote-name", "", "name of the Peering in the other cluster")
	cmd.Flags().BoolVar(&o.Replace, "replace", false, "accept a cluster that was recreated with the same ID and name, and revoke the rights of the old one. A cluster with a new certificate authority counts as recreated unless it has a valid identity of the other cluster")
	chosen.add(cmd)
	cmd.Flags().StringSliceVar(&o.Services, "services", nil, "namespaces whose exported Services the clusters share (spec.services); '*' means all, '' none")
	cmd.Flags().BoolVar(&inBand, "in-band", false, "connect the managers to each other's API servers through the tunnel (spec.inBand), so only UDP between the gateways has to be open")
	cmd.Flags().DurationVar(&o.Timeout, "timeout", time.Minute, "how long to wait; 0: do not wait")
	cli.AddOutputFlag(cmd, &output, "print both Peerings at the end, and the progress on standard error")
	return cmd
}

// join peers two clusters and stores their Peerings in result.
func join(cmd *cobra.Command, a *cluster.Cluster, remote cluster.Access, o peering.PeerOptions, result map[string]any) error {
	b, err := connect(remote)
	if err != nil {
		return err
	}
	peerings, err := peering.Peer(cmd.Context(), a, b, o)
	if peerings[0] != nil {
		result["local"], result["remote"] = peerings[0], peerings[1]
	}
	return err
}

// aboutOne returns an error if the command concerns only one cluster, but the user has set a flag
// that is for joining two clusters.
func aboutOne(cmd *cobra.Command, name string) error {
	for _, flag := range []string{"name", "remote-name", "replace", "services", "in-band", "server", "remote-server", "remote-namespace"} {
		if cmd.Flags().Changed(flag) {
			return cli.Usage("--%s is only for joining two clusters; add --remote-context to join them, or remove --%[1]s to show the Peering %[2]s", flag, name)
		}
	}
	return nil
}

// review changes the claims of the named Peering according to o, reports the result, and stores
// the Peering in result.
func review(cmd *cobra.Command, a *cluster.Cluster, name string, o peering.PeerOptions, result map[string]any) error {
	p, err := peering.Review(cmd.Context(), a, name, o)
	if p != nil {
		result["local"] = p
	}
	return err
}

// claimFlags are the flags about the networks that the other cluster advertises.
type claimFlags struct {
	allowed     []string
	alwaysRemap bool
	consent     string
}

func (f *claimFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringSliceVar(&f.allowed, "allow-claim", nil,
		"public network; if the other cluster advertises it or a part of it, this cluster may use it unchanged (spec.claims.allowed)")
	flags.BoolVar(&f.alwaysRemap, "always-remap", false, "this cluster remaps both networks of the other one (spec.claims.alwaysRemap)")
	flags.StringVar(&f.consent, "consent", "", "PODCIDR,EXTERNALCIDR: agree to exactly these networks of the other cluster (spec.claims.consent)")
}

func (f *claimFlags) claims(cmd *cobra.Command) (c peering.Claims, err error) {
	for _, text := range f.allowed {
		p, err := peering.ParseNetwork(text)
		if err != nil {
			return c, cli.Usage("--allow-claim: %w", err)
		}
		c.Allowed = append(c.Allowed, p)
	}
	if cmd.Flags().Changed("always-remap") {
		c.AlwaysRemap = &f.alwaysRemap
	}
	if f.consent != "" {
		claim, err := peering.ParseClaim(f.consent)
		if err != nil {
			return c, cli.Usage("--consent %q: want PODCIDR,EXTERNALCIDR as they were shown: %w", f.consent, err)
		}
		c.Consent = &claim
	}
	return c, nil
}
