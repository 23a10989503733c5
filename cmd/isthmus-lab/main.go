// Command isthmus-lab builds clusters out of network namespaces on one machine, for trials and
// demonstrations.
//
//	isthmus-lab demo        three clusters with API servers, peered, with real traffic, step by step
//	isthmus-lab up | down   clusters without API servers, whose gateways are configured by files
//	isthmus-lab kube        build etcd, kube-apiserver and kube-controller-manager for the demo
//
// The clusters run the program isthmus.
package main

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/lab"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run executes the program with these arguments and returns its exit code.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	return cli.Run(newRootCommand(), args, stdin, stdout, stderr)
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "isthmus-lab",
		Short: "Make clusters of network namespaces on this machine (root)",
		Long: `Make clusters of network namespaces on this machine: nodes, pods and a gateway for
each cluster, and an underlay that connects the gateways. Nothing outside the
namespaces changes. A lab exists until "isthmus-lab down" or a reboot.

` + cli.ExitCodes,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.AddCommand(
		newDemoCommand(),
		newUpCommand(),
		newDownCommand(),
		newListCommand(),
		newShowCommand(),
		newExecCommand(),
		newPingCommand(),
		newServeCommand(),
		newKubeCommand(),
	)
	return root
}

// needsRoot returns a function that calls do if the user is root, and otherwise returns an error.
// Other users would see only some of the processes of a lab.
func needsRoot(do func(*cobra.Command, []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		if os.Geteuid() != 0 {
			return cli.Usage("%s needs root, to make network namespaces; run it with sudo", cmd.CommandPath())
		}
		return do(cmd, args)
	}
}

func addProgramFlag(f *pflag.FlagSet, path *string) {
	f.StringVar(path, "isthmus", "", "path of the program isthmus (default: in the directory of this program)")
}

// program returns the absolute path of the program isthmus.
func program(path string) (string, error) {
	if path != "" {
		found, err := exec.LookPath(path)
		if err != nil && !errors.Is(err, exec.ErrDot) {
			return "", cli.Usage("--isthmus: %w", err)
		}
		return filepath.Abs(found)
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	beside, err := exec.LookPath(filepath.Join(filepath.Dir(self), "isthmus"))
	if err != nil {
		return "", cli.Usage("no program isthmus in %s, the directory of this program; run make build, or set --isthmus to its path", filepath.Dir(self))
	}
	return beside, nil
}

const defaultName = "lab"

func addNameFlag(cmd *cobra.Command, name *string) {
	cmd.Flags().StringVar(name, "name", defaultName, "name of the lab; several labs may exist at a time")
	_ = cmd.RegisterFlagCompletionFunc("name", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		names, _ := lab.List() // on an error the list is empty, and the shell completes nothing
		return names, cobra.ShellCompDirectiveNoFileComp
	})
}

// completeHosts completes the names of hosts, for up to limit arguments.
func completeHosts(name *string, limit int) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) (hosts []string, _ cobra.ShellCompDirective) {
		if l, err := lab.Open(*name); err == nil && len(args) < limit {
			for _, h := range l.Hosts() {
				hosts = append(hosts, h.Name)
			}
		}
		return hosts, cobra.ShellCompDirectiveNoFileComp
	}
}

// hint returns the flag that selects the lab, for commands in messages to users. The result is
// empty for the default lab.
func hint(name string) string {
	if name == defaultName {
		return ""
	}
	return " --name " + name
}
