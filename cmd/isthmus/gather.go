package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/gather"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

func newGatherCommand() *cobra.Command {
	var access cluster.Access
	var name string
	o := gather.Options{Version: cli.Version()}
	cmd := &cobra.Command{
		Use:   "gather",
		Short: "Write the state of a cluster into an archive for a bug report",
		Long: `Write an archive for a bug report: the objects of Isthmus in a cluster, the output of
status and diagnose, the logs of the components, and the state of gateways and route
agents: flows, drops, metrics, desired routes and rules. Begin with its summary.md.

The archive has no secrets. Values of Secrets of the installation and of peerings are
removed everywhere, also in base64 and hexadecimal digits, and so is everything that
looks like a private key, a token or a password. The command changes nothing in the
cluster.

summary.md lists everything that could not be read, with the reason. The exit code is
0 if there is an archive, and 2 if the cluster could not be reached.`,
		Example: "  isthmus gather --context paris\n  isthmus gather --context paris --file - | tar tz",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.LogLines < 1 {
				return cli.Usage("--log-lines %d: want a number from 1", o.LogLines)
			}
			c, err := connect(access)
			if err != nil {
				return err
			}
			o.Report = func(line string) { fmt.Fprintln(cmd.ErrOrStderr(), line) }
			write := func(w io.Writer) error {
				missing, err := gather.Write(cmd.Context(), c, w, o)
				for _, m := range missing {
					fmt.Fprintf(cmd.ErrOrStderr(), "not read: %s: %s\n", safetext.Of(m.What), safetext.Of(m.Why))
				}
				return clusterError(err)
			}
			if name == "-" {
				return write(cmd.OutOrStdout())
			}
			to := cmp.Or(name, "isthmus-gather-"+time.Now().UTC().Format("20060102T150405Z")+".tar.gz")
			if err := writeNew(to, write); err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), to)
			return err
		},
	}
	addAccessFlags(cmd, &access, "", "")
	cmd.Flags().StringVar(&name, "file", "", "name of the archive, which must not exist yet; - means standard output (default isthmus-gather-TIME.tar.gz)")
	cmd.Flags().Int64Var(&o.LogLines, "log-lines", 5000, "number of lines of each log, from its end")
	return cmd
}

// writeNew creates a file that only its owner may read, and calls write to fill it. On an error, it
// removes the file.
func writeNew(name string, write func(io.Writer) error) (err error) {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			_ = os.Remove(name)
		}
	}()
	return write(f)
}
