package main

import (
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/demo"
	"github.com/isthmus-net/isthmus/internal/kubenodes"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/source/kube"
)

func newDemoCommand() *cobra.Command {
	var o demo.Options
	var kubernetes bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Join three clusters with the same PodCIDR on this machine and show what works (root)",
		Long: `Make three clusters out of network namespaces of this machine, each with two nodes
and an API server of its own, all with the same PodCIDR; peer each pair by the
command line and show with real traffic what works and what is refused. Each step
is checked; the exit code is 0 when all went well. Nothing is left behind, also
after Ctrl-C.

It needs etcd and kube-apiserver, which it builds from source where they are
missing. That takes some minutes, once, and works in a checkout of the source.

With --kubernetes there are two clusters with real nodes instead: kubelet, containerd,
the bridge CNI plugin and kube-proxy. Isthmus is installed as everywhere, and the time
of each step is shown, until a pod of one cluster has an HTTP answer of the other.`,
		Args: cobra.NoArgs,
		RunE: needsRoot(func(cmd *cobra.Command, _ []string) (err error) {
			if err := lab.Available(); err != nil {
				return cli.Usage("%w", err)
			}
			if o.Binary, err = program(o.Binary); err != nil {
				return err
			}
			o.Out = cmd.OutOrStdout()
			o.Color = o.Out == os.Stdout && isTerminal(os.Stdout)
			if kubernetes {
				if err := kubenodes.Available(); err != nil {
					return cli.Usage("%w", err)
				}
				if o.Kube, err = kubetest.BuildNodes(cmd.Context(), cmd.ErrOrStderr()); err != nil {
					return err
				}
				kube.UseLogger(slog.New(slog.DiscardHandler)) // the client library would ask for one
				return downHint(demo.RunKubernetes(cmd.Context(), o), o.Name)
			}
			fmt.Fprintln(o.Out, "Three clusters of two nodes on this machine, peered, with real traffic between their pods: under a minute.")
			if o.Kube, err = kubetest.Build(cmd.Context(), cmd.ErrOrStderr()); err != nil {
				return err
			}
			return downHint(demo.Run(cmd.Context(), o), o.Name)
		}),
	}
	addProgramFlag(cmd.Flags(), &o.Binary)
	cmd.Flags().BoolVar(&kubernetes, "kubernetes", false, "two clusters with real kubelets, from nothing to the first HTTP answer")
	cmd.Flags().BoolVar(&o.Keep, "keep", false, "let the clusters stand at the end, until Ctrl-C")
	cmd.Flags().StringVar(&o.Name, "name", "demo", "name of the lab")
	return cmd
}

// isTerminal tells whether colours make sense on f (https://no-color.org has its say).
func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}
