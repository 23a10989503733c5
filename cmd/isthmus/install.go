package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/peering"
)

func newInstallCommand() *cobra.Command {
	var access peering.Access
	var o peering.InstallOptions
	var service string
	cmd := &cobra.Command{
		Use:   "install --cluster-name NAME",
		Short: "Install the custom resource definitions and rights in a cluster",
		Long: `Apply what the components of Isthmus need in a cluster: the custom resource
definitions, a namespace, a ServiceAccount with the least rights for each
component, and the identity by which peers know the cluster. Repeating it changes
nothing, or brings an older installation up to date.`,
		Example: "  isthmus install --context paris --cluster-name paris --gateway-service LoadBalancer",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Service = corev1.ServiceType(service); service == "none" {
				o.Service = ""
			}
			if o.Port < 1 || o.Port > 65535 {
				return cli.Usage("--gateway-port %d: want 1 to 65535", o.Port)
			}
			if last := int(o.Port) + o.Tunnels - 1; o.Tunnels < 1 || o.Tunnels > fabric.MaxTunnels || last > 65535 {
				return cli.Usage("--tunnels %d: want 1 to %d, on UDP ports from --gateway-port up to 65535", o.Tunnels, fabric.MaxTunnels)
			}
			c, err := connect(access)
			if err != nil {
				return err
			}
			o.Report = reporter(cmd)
			return clusterError(c.Install(cmd.Context(), o))
		},
	}
	addAccessFlags(cmd, &access, "", "")
	cmd.Flags().StringVar(&o.Identity.ClusterName, "cluster-name", "", "how peers are to call the cluster (needed the first time)")
	cmd.Flags().StringVar(&o.Identity.ClusterID, "cluster-id", "", "what tells the cluster from all others (default the UID of its namespace kube-system)")
	cli.AddChoiceFlag(cmd, &service, "gateway-service", "none", "make the gateway's Service", "none", string(corev1.ServiceTypeNodePort), string(corev1.ServiceTypeLoadBalancer))
	cmd.Flags().Int32Var(&o.Port, "gateway-port", 5871, "UDP port of the gateway's Service")
	cmd.Flags().BoolVar(&o.MetricsAuth, "metrics-auth", false, "give the components the rights that their --metrics-secure needs, and make the ClusterRole isthmus-metrics-reader")
	cmd.Flags().IntVar(&o.Tunnels, "tunnels", 1, "ports of the gateway's Service, from --gateway-port upwards: as for isthmus gateway")
	return cmd
}

// addAccessFlags adds the flags that say which cluster is meant, as kubectl has them; prefix
// "remote-" is for the other one.
func addAccessFlags(cmd *cobra.Command, a *peering.Access, prefix, of string) {
	flags := cmd.Flags()
	flags.StringVar(&a.Kubeconfig, prefix+"kubeconfig", "", "kubeconfig file"+of+" (default $KUBECONFIG or ~/.kube/config)")
	flags.StringVar(&a.Context, prefix+"context", "", "context"+of+" in the kubeconfig (default the current one)")
	flags.StringVar(&a.Namespace, prefix+"namespace", deploy.Namespace, "namespace of the installation"+of)
	completeAccess(cmd, a, prefix)
}

func connect(a peering.Access) (*peering.Cluster, error) {
	c, err := peering.Connect(a)
	if err != nil {
		return nil, cli.Unreachable(err)
	}
	return c, nil
}

// clusterError gives an error its exit code.
func clusterError(err error) error {
	if errors.Is(err, peering.ErrUnreachable) && !errors.Is(err, peering.ErrNotReady) {
		return cli.Unreachable(err)
	}
	return err
}

// reporter prints a line at a time.
func reporter(cmd *cobra.Command) func(string) {
	return func(line string) { fmt.Fprintln(cmd.OutOrStdout(), line) }
}
