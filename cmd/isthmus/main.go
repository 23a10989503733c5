// Command isthmus joins the pod networks of Kubernetes clusters. It contains the components
// that run in a cluster, and the commands for people.
//
//	isthmus install | uninstall      in a cluster
//	isthmus peer | unpeer            join two clusters, separate them
//	isthmus status                   state of the cluster and its peerings
//	isthmus diagnose                 the first broken part of the path to a peer
//	isthmus verify                   traffic between two clusters, both ways
//	isthmus gather                   an archive for a bug report
//	isthmus trace SRC DST            what a gateway would do with a packet
//	isthmus manager                  the control plane, once per cluster
//	isthmus gateway                  the data plane, on some nodes
//	isthmus route-agent              routes to the gateway, on every node
//	isthmus genkey | pubkey          WireGuard keys
//
// The program isthmus-lab builds clusters for trials.
package main

//go:generate sh -ec "{ cat cli.md; go run . reference; go run ../isthmus-lab reference; } > ../../docs/cli.md"

import (
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cli"
)

func main() {
	root := newRootCommand()
	cli.As(root, os.Args[0])
	os.Exit(cli.Run(root, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "isthmus",
		Short: "Join the pod networks of Kubernetes clusters, even with the same PodCIDR",
		Long: `Isthmus joins the pod networks of independent Kubernetes clusters over WireGuard,
in userspace. Pods reach remote pods by IP, even when the clusters use the same
PodCIDR.

` + cli.ExitCodes,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.AddCommand(
		newManagerCommand(),
		newGatewayCommand(),
		newRouteAgentCommand(),
		newInstallCommand(),
		newUninstallCommand(),
		newPeerCommand(),
		newUnpeerCommand(),
		newRotateKeyCommand(),
		newReleaseGatewayCommand(),
		newStatusCommand(),
		newDiagnoseCommand(),
		newTraceCommand(),
		newVerifyCommand(),
		newGatherCommand(),
		newProbeCommand(),
		newCaptureCommand(),
		newGenkeyCommand(),
		newPubkeyCommand(),
	)
	return root
}

// logger returns a logger that writes machine-readable lines. level has been validated with the
// flags.
func logger(cmd *cobra.Command, level string) *slog.Logger {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		panic(err)
	}
	return slog.New(slog.NewJSONHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: l}))
}
