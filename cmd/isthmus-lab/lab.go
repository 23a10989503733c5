package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/lab"
)

func newUpCommand() *cobra.Command {
	spec := lab.Spec{}
	var clusters, nodes, pods int
	var name, podCIDR, filter, binary string
	var bare bool
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Make clusters, join each pair and start the gateways",
		Args:  cobra.NoArgs,
		RunE: needsRoot(func(cmd *cobra.Command, _ []string) error {
			prefix, err := netip.ParsePrefix(podCIDR)
			if err != nil {
				return cli.Usage("--pod-cidr %q: want a network such as 10.244.0.0/16", podCIDR)
			}
			if pods == 0 {
				pods = -1
			}
			spec.Name, spec.RPFilter, spec.Clusters = name, lab.RPFilter(filter), lab.Clusters(clusters)
			for i := range spec.Clusters {
				spec.Clusters[i].PodCIDR, spec.Clusters[i].Nodes, spec.Clusters[i].PodsPerNode = prefix, nodes, pods
			}
			if err := spec.Check(); err != nil {
				return cli.Usage("%w", err)
			}
			if binary, err = program(binary); err != nil {
				return err
			}
			return up(cmd.Context(), cmd.OutOrStdout(), spec, binary, bare)
		}),
	}
	f := cmd.Flags()
	addNameFlag(cmd, &name)
	addProgramFlag(f, &binary)
	f.IntVar(&clusters, "clusters", 3, "number of clusters")
	f.IntVar(&nodes, "nodes", 1, "nodes per cluster; the gateway runs on the first")
	f.IntVar(&pods, "pods", 2, "pods per node")
	f.StringVar(&podCIDR, "pod-cidr", "10.244.0.0/16", "PodCIDR of every cluster")
	f.IntVar(&spec.Tunnels, "tunnels", 1, "tunnels between each pair of gateways, 1 to 16")
	f.IntVar(&spec.MTU, "mtu", 1500, "MTU of the underlay")
	cli.AddChoiceFlag(cmd, &filter, "rp-filter", string(lab.RPFilterLoose), "reverse path filter of the nodes", string(lab.RPFilterOff), string(lab.RPFilterLoose), string(lab.RPFilterStrict))
	f.BoolVar(&bare, "bare", false, "write the gateways' configuration, but do not start them")
	return cmd
}

func up(ctx context.Context, out io.Writer, spec lab.Spec, binary string, bare bool) (err error) {
	l, err := lab.Up(ctx, spec)
	if err != nil {
		return downHint(err, spec.Name)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Down())
		}
	}()
	if err := l.JoinAll(); err != nil {
		return err
	}
	for _, c := range l.Clusters {
		if err := l.Map(c, c.OnPrem.Addr); err != nil {
			return err
		}
	}
	if !bare {
		if err := l.StartGateways(ctx, binary); err != nil {
			return err
		}
	}
	if err := startServer(ctx, l); err != nil {
		return err
	}
	if err := l.Persist(); err != nil {
		return err
	}
	return show(out, l)
}

// downHint returns err. If err is lab.ErrExists, downHint appends the commands that show and remove
// the lab.
func downHint(err error, name string) error {
	if errors.Is(err, lab.ErrExists) {
		return fmt.Errorf("%w; \"isthmus-lab show --name %s\" shows it, \"isthmus-lab down --name %s\" removes it", err, name, name)
	}
	return err
}

// startServer starts the lab's web server, a child process that continues after this process ends.
func startServer(ctx context.Context, l *lab.Lab) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := l.Underlay.Command(context.Background(), self, "serve", "--name", l.Name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	var text strings.Builder
	cmd.Stderr = &text
	if err := cmd.Start(); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() }) // killing the child ends the read below
	defer stop()
	if line, err := io.ReadAll(stdout); err != nil || string(line) != serving {
		_ = cmd.Process.Kill() // the child may still be running
		return fmt.Errorf("the lab's web server: %w: %s", errors.Join(err, cmd.Wait()), strings.TrimSpace(text.String()))
	}
	return cmd.Process.Release()
}

// serving is the line that "serve" prints before it closes its standard output.
const serving = "serving\n"

func newServeCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:    "serve",
		Short:  "Serve HTTP in the pods and servers of a lab, until interrupted",
		Hidden: true, // "up" starts this command
		Args:   cobra.NoArgs,
		RunE: needsRoot(func(cmd *cobra.Command, _ []string) error {
			l, err := lab.Open(name)
			if err != nil {
				return err
			}
			if err := l.ServeHosts(); err != nil {
				return err
			}
			if _, err := io.WriteString(os.Stdout, serving); err != nil {
				return err
			}
			os.Stdout.Close()
			<-cmd.Context().Done()
			return nil
		}),
	}
	addNameFlag(cmd, &name)
	return cmd
}

func newDownCommand() *cobra.Command {
	var all bool
	var name string
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Remove a lab and everything that runs in it",
		Args:  cobra.NoArgs,
		RunE: needsRoot(func(cmd *cobra.Command, _ []string) error {
			names := []string{name}
			if all {
				if err := lab.Sweep(); err != nil {
					return err
				}
				var err error
				if names, err = lab.List(); err != nil {
					return err
				}
			}
			var errs []error
			for _, n := range names {
				l, err := lab.Open(n)
				if err == nil {
					err = l.Down()
				}
				if all && errors.Is(err, lab.ErrInUse) {
					continue
				}
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "remove every lab that no running process uses")
	addNameFlag(cmd, &name)
	return cmd
}

// row is one lab in the output of "list".
type row struct {
	Name     string `json:"name"`
	Clusters int    `json:"clusters"`
	Hosts    int    `json:"hosts"`
	Gateways int    `json:"gateways"`          // number of running gateways
	Problem  string `json:"problem,omitempty"` // reason why the other fields are unknown; empty if they are known
}

func newListCommand() *cobra.Command {
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the labs of this machine",
		Args:  cobra.NoArgs,
		RunE: needsRoot(func(cmd *cobra.Command, _ []string) error {
			names, err := lab.List()
			if err != nil {
				return err
			}
			rows := []row{}
			for _, name := range names {
				rows = append(rows, rowOf(name))
			}
			if output.ForPrograms() {
				return output.Print(cmd.OutOrStdout(), rows)
			}
			table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 3, ' ', 0)
			fmt.Fprintln(table, "NAME\tCLUSTERS\tHOSTS\tGATEWAYS")
			for _, r := range rows {
				if r.Problem != "" {
					fmt.Fprintf(table, "%s\t(%s)\n", r.Name, r.Problem)
					continue
				}
				fmt.Fprintf(table, "%s\t%d\t%d\t%d running\n", r.Name, r.Clusters, r.Hosts, r.Gateways)
			}
			return table.Flush()
		}),
	}
	cli.AddOutputFlag(cmd, &output, "print for programs")
	return cmd
}

func rowOf(name string) row {
	l, err := lab.Open(name)
	if err != nil {
		return row{Name: name, Problem: err.Error()}
	}
	r := row{Name: name, Clusters: len(l.Clusters), Hosts: len(l.Hosts())}
	for _, c := range l.Clusters {
		if _, ok := l.GatewayProcess(c); ok {
			r.Gateways++
		}
	}
	return r
}

func newShowCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Show the hosts of a lab and their addresses, as each cluster sees them",
		Args:  cobra.NoArgs,
		RunE: needsRoot(func(cmd *cobra.Command, _ []string) error {
			l, err := lab.Open(name)
			if err != nil {
				return err
			}
			return show(cmd.OutOrStdout(), l)
		}),
	}
	addNameFlag(cmd, &name)
	return cmd
}

func show(out io.Writer, l *lab.Lab) error {
	if err := l.Describe(out); err != nil {
		return err
	}
	flag := hint(l.Name)
	from, to := l.Clusters[0], l.Clusters[len(l.Clusters)-1]
	gateway := from.Gateway()
	fmt.Fprintf(out, "\nConfiguration of the gateway of cluster %s: %s\nLog of this gateway: %s\n\nTry:\n",
		from, from.ConfigDir, l.GatewayLog(from))
	if _, joined := l.View(from, to); joined && len(from.Pods) > 0 && len(to.Pods) > 0 {
		seen, err := l.Seen(from, to, to.Pods[0].Addr)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "  isthmus-lab ping%s %s %s\n", flag, from.Pods[0], to.Pods[0])
		fmt.Fprintf(out, "  isthmus-lab exec%s %s -- curl http://%v\n", flag, from.Pods[0], seen)
		fmt.Fprintf(out, "  isthmus-lab exec%s %s -- isthmus trace %v %v icmp\n", flag, gateway, from.Pods[0].Addr, seen)
	}
	fmt.Fprintf(out, "  isthmus-lab exec%s %s -- isthmus status --gateway\n", flag, gateway)
	fmt.Fprintf(out, "  isthmus-lab down%s\n", flag)
	return nil
}

func newExecCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "exec HOST -- COMMAND [ARG...]",
		Short: "Run a command inside a host of a lab",
		Example: `  isthmus-lab exec a-pod1 -- curl http://10.246.0.11
  isthmus-lab exec a-node1 -- isthmus status --gateway`,
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: completeHosts(&name, 1),
		RunE: needsRoot(func(_ *cobra.Command, args []string) error {
			l, err := lab.Open(name)
			if err != nil {
				return err
			}
			host, err := l.Host(args[0])
			if err != nil {
				return err
			}
			return host.Exec(args[1:])
		}),
	}
	addNameFlag(cmd, &name)
	return cmd
}

func newPingCommand() *cobra.Command {
	var count int
	var name string
	cmd := &cobra.Command{
		Use:               "ping FROM TO",
		Short:             "Ping from one host of a lab to another, or to an address",
		Long:              "Ping from one host of a lab to another. A name means the address by which the first\nhost's cluster sees the other host.",
		Example:           "  isthmus-lab ping a-pod1 b-pod1\n  isthmus-lab ping a-pod1 10.246.0.11",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: completeHosts(&name, 2),
		RunE: needsRoot(func(cmd *cobra.Command, args []string) error {
			l, err := lab.Open(name)
			if err != nil {
				return err
			}
			from, err := l.Host(args[0])
			if err != nil {
				return err
			}
			to, err := l.Lookup(from, args[1])
			if err != nil {
				return err
			}
			return ping(cmd.Context(), cmd.OutOrStdout(), from, to, count)
		}),
	}
	cmd.Flags().IntVarP(&count, "count", "c", 3, "number of requests")
	addNameFlag(cmd, &name)
	return cmd
}

func ping(ctx context.Context, out io.Writer, from *lab.Host, to netip.Addr, count int) error {
	answers := 0
	for i := range count {
		rtt, err := from.PingWith(ctx, to, lab.PingOptions{})
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("after %d of %d requests: %w", i, count, ctx.Err())
		case err != nil:
			fmt.Fprintln(out, err)
		default:
			answers++
			fmt.Fprintf(out, "%v answers %s in %.2f ms\n", to, from, float64(rtt.Microseconds())/1000)
		}
		if i+1 < count {
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	}
	if answers == 0 {
		return fmt.Errorf("%v does not answer %s", to, from)
	}
	return nil
}
