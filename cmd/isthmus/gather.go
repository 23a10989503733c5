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
	"github.com/isthmus-net/isthmus/internal/gather"
	"github.com/isthmus-net/isthmus/internal/peering"
)

func newGatherCommand() *cobra.Command {
	var access peering.Access
	var name string
	o := gather.Options{Version: cli.Version()}
	cmd := &cobra.Command{
		Use:   "gather",
		Short: "Put what is to be known of a cluster into an archive for a bug report",
		Long: `Read the objects of Isthmus in a cluster, what status and diagnose say of them, the
logs of the components, and what gateways and route agents say of themselves: flows,
drops, metrics, and which routes and rules they want. Write it all into one archive.
summary.md in it is the page to begin with.

Secrets are taken out: what is in Secrets of the installation and of peerings is
looked for everywhere, in base64 and hexadecimal digits too, and whatever looks like
a private key, a token or a password goes as well. Nothing is changed in the cluster.

What cannot be read, for lack of rights or because somebody does not answer, is
listed in summary.md with the reason. The exit code is 0 when there is an archive,
and 2 when the cluster could not be asked.`,
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
					fmt.Fprintf(cmd.ErrOrStderr(), "not read: %s: %s\n", peering.Printable(m.What), peering.Printable(m.Why))
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
	cmd.Flags().StringVar(&name, "file", "", "name of the archive, which must not exist yet; - is standard output (default isthmus-gather-TIME.tar.gz)")
	cmd.Flags().Int64Var(&o.LogLines, "log-lines", 5000, "how much of each log: so many lines, the last ones")
	return cmd
}

// writeNew writes a file that others cannot read. After an error there is none.
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
