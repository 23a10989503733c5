package main

import (
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/demo"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

func newDemoCommand() *cobra.Command {
	var o demo.Options
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Join three clusters with the same PodCIDR on this machine and show what works (root)",
		Long: `Make three clusters out of network namespaces of this machine, each with two nodes
and an API server of its own, all with the same PodCIDR; peer each pair by the
command line and show with real traffic what works and what is refused. Each step
is checked; the exit code is 0 when all went well. Nothing is left behind, also
after Ctrl-C.

It needs etcd and kube-apiserver, which it builds from source where they are
missing. That takes some minutes, once, and works in a checkout of the source.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
			defer stop()
			var err error
			if o.Binary, err = os.Executable(); err != nil {
				return err
			}
			o.Out = cmd.OutOrStdout()
			o.Color = o.Out == os.Stdout && isTerminal(os.Stdout)
			if o.Kube, err = kubetest.Build(ctx, cmd.ErrOrStderr()); err != nil {
				return err
			}
			return labHint(demo.Run(ctx, o), o.Name)
		},
	}
	cmd.Flags().BoolVar(&o.Keep, "keep", false, "let the clusters stand at the end, until Ctrl-C")
	cmd.Flags().StringVar(&o.Name, "name", "demo", "name of the lab")
	return cmd
}

// isTerminal tells whether colours make sense on f (https://no-color.org has its say).
func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}
