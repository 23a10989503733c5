package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/demo"
	"github.com/isthmus-net/isthmus/internal/lab"
)

func newDemoCommand() *cobra.Command {
	var o demo.Options
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Join three clusters with the same PodCIDR on this machine and show what works (root)",
		Long: `Make three clusters out of network namespaces of this machine, all with the same
PodCIDR, join each pair and show with real traffic what works and what is refused.
Each step is checked; the exit code is 0 when all went well. Nothing is left behind,
also after Ctrl-C, unless --keep is given.`,
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
			err = labHint(demo.Run(ctx, o), o.Name)
			if !o.Keep {
				return err
			}
			l, e := lab.Open(o.Name)
			if e != nil {
				return err // the demo did not come to make one
			}
			fmt.Fprintf(o.Out, "\nThe lab stands:\n\n")
			return errors.Join(err, startLabServer(cmd.Context(), l, o.Binary), labShow(o.Out, l))
		},
	}
	cmd.Flags().BoolVar(&o.Keep, "keep", false, "leave the lab standing")
	cmd.Flags().StringVar(&o.Name, "name", "demo", "name of the lab")
	return cmd
}

// isTerminal tells whether colours make sense on f (https://no-color.org has its say).
func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}
