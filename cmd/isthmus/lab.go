package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/lab"
)

func newLabCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "Clusters out of network namespaces of this machine, to play with (root)",
		Long: `Clusters made of network namespaces of this machine: nodes, pods, an underlay and
a gateway per cluster, joined with each other. Nothing outside the namespaces is
changed. A lab stands until "isthmus lab down" or the next start of the machine.`,
	}
	cmd.PersistentFlags().StringVar(&name, "name", "lab", "name of the lab; several stand side by side")
	cmd.AddCommand(
		newLabUpCommand(&name),
		newLabDownCommand(&name),
		newLabListCommand(),
		newLabShowCommand(&name),
		newLabExecCommand(&name),
		newLabPingCommand(&name),
		newLabServeCommand(&name),
	)
	return cmd
}

func newLabUpCommand(name *string) *cobra.Command {
	spec := lab.Spec{}
	var clusters, nodes, pods int
	var podCIDR, filter string
	var bare bool
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Make clusters, join each pair and start the gateways",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			prefix, err := netip.ParsePrefix(podCIDR)
			if err != nil {
				return fmt.Errorf("--pod-cidr: %w", err)
			}
			if pods == 0 {
				pods = -1
			}
			spec.Name, spec.RPFilter, spec.Clusters = *name, lab.RPFilter(filter), lab.Clusters(clusters)
			for i := range spec.Clusters {
				spec.Clusters[i].PodCIDR, spec.Clusters[i].Nodes, spec.Clusters[i].PodsPerNode = prefix, nodes, pods
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return labUp(ctx, cmd.OutOrStdout(), spec, bare)
		},
	}
	f := cmd.Flags()
	f.IntVar(&clusters, "clusters", 3, "number of clusters")
	f.IntVar(&nodes, "nodes", 1, "nodes per cluster; the gateway runs on the first")
	f.IntVar(&pods, "pods", 2, "pods per node")
	f.StringVar(&podCIDR, "pod-cidr", "10.244.0.0/16", "PodCIDR of every cluster")
	f.IntVar(&spec.Tunnels, "tunnels", 1, "tunnels between each two gateways, 1 to 16")
	f.IntVar(&spec.MTU, "mtu", 1500, "MTU of the underlay")
	f.StringVar(&filter, "rp-filter", string(lab.RPFilterLoose), "reverse path filter of the nodes: off, loose or strict")
	f.BoolVar(&bare, "bare", false, "write the gateways' configuration, but start none")
	return cmd
}

func labUp(ctx context.Context, out io.Writer, spec lab.Spec, bare bool) (err error) {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	l, err := lab.Up(ctx, spec)
	if err != nil {
		return labHint(err, spec.Name)
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
		if err := l.StartGateways(ctx, self); err != nil {
			return err
		}
	}
	if err := startLabServer(ctx, l, self); err != nil {
		return err
	}
	if err := l.Persist(); err != nil {
		return err
	}
	return labShow(out, l)
}

// labHint says how to get rid of a lab that is in the way.
func labHint(err error, name string) error {
	if errors.Is(err, lab.ErrExists) {
		return fmt.Errorf("%w; \"isthmus lab --name %s show\" shows it, \"isthmus lab --name %s down\" removes it", err, name, name)
	}
	return err
}

// startLabServer runs the lab's web server in a process of its own, as this one ends.
func startLabServer(ctx context.Context, l *lab.Lab, self string) error {
	cmd := l.Underlay.Command(context.Background(), self, "lab", "serve", "--name", l.Name)
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
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() }) // the read below then ends
	defer stop()
	if said, err := io.ReadAll(stdout); err != nil || string(said) != serving {
		_ = cmd.Process.Kill() // if it has not ended by itself
		return fmt.Errorf("the lab's web server: %w: %s", errors.Join(err, cmd.Wait()), strings.TrimSpace(text.String()))
	}
	return cmd.Process.Release()
}

// serving is what "lab serve" prints before it closes its standard output.
const serving = "serving\n"

func newLabServeCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use:    "serve",
		Short:  "Serve HTTP in the pods and servers of a lab, until ended",
		Hidden: true, // "up" starts it
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			l, err := lab.Open(*name)
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
			<-ctx.Done()
			return nil
		},
	}
}

func newLabDownCommand(name *string) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Remove a lab and everything that runs in it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			names := []string{*name}
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
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "every lab that no live process uses")
	return cmd
}

func newLabListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the labs of this machine",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			names, err := lab.List()
			if err != nil {
				return err
			}
			table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 3, ' ', 0)
			fmt.Fprintln(table, "NAME\tCLUSTERS\tHOSTS\tGATEWAYS")
			for _, name := range names {
				l, err := lab.Open(name)
				if err != nil {
					fmt.Fprintf(table, "%s\t(%v)\n", name, err)
					continue
				}
				running := 0
				for _, c := range l.Clusters {
					if _, ok := l.GatewayProcess(c); ok {
						running++
					}
				}
				fmt.Fprintf(table, "%s\t%d\t%d\t%d running\n", name, len(l.Clusters), len(l.Hosts()), running)
			}
			return table.Flush()
		},
	}
}

func newLabShowCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use:   "show",
		Short: "Show the hosts of a lab and their addresses, as each cluster sees them",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := lab.Open(*name)
			if err != nil {
				return err
			}
			return labShow(cmd.OutOrStdout(), l)
		},
	}
}

func labShow(out io.Writer, l *lab.Lab) error {
	if err := l.Describe(out); err != nil {
		return err
	}
	var flag string
	if l.Name != "lab" {
		flag = "--name " + l.Name + " "
	}
	from, to := l.Clusters[0], l.Clusters[len(l.Clusters)-1]
	gateway := from.Gateway()
	fmt.Fprintf(out, "\nThe configuration of the gateway of cluster %s: %s\nand what it prints: %s\n\nTry:\n",
		from, from.ConfigDir, l.GatewayLog(from))
	if _, joined := l.View(from, to); joined && len(from.Pods) > 0 && len(to.Pods) > 0 {
		seen, err := l.Seen(from, to, to.Pods[0].Addr)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "  isthmus lab %sping %s %s\n", flag, from.Pods[0], to.Pods[0])
		fmt.Fprintf(out, "  isthmus lab %sexec %s -- curl http://%v\n", flag, from.Pods[0], seen)
		fmt.Fprintf(out, "  isthmus lab %sexec %s -- isthmus trace %v %v icmp\n", flag, gateway, from.Pods[0].Addr, seen)
	}
	fmt.Fprintf(out, "  isthmus lab %sexec %s -- isthmus status\n", flag, gateway)
	fmt.Fprintf(out, "  isthmus lab %sdown\n", flag)
	return nil
}

func newLabExecCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use:   "exec HOST -- COMMAND [ARG...]",
		Short: "Run a command inside a host of a lab",
		Example: `  isthmus lab exec a-pod1 -- curl http://10.246.0.11
  isthmus lab exec a-node1 -- isthmus status`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			l, err := lab.Open(*name)
			if err != nil {
				return err
			}
			host, err := l.Host(args[0])
			if err != nil {
				return err
			}
			return host.Exec(args[1:])
		},
	}
}

func newLabPingCommand(name *string) *cobra.Command {
	var count int
	cmd := &cobra.Command{
		Use:     "ping FROM TO",
		Short:   "Ping from one host of a lab to another, or to an address",
		Long:    "Ping from one host of a lab to another. A name stands for the address under which\nthe first one's cluster sees the other.",
		Example: "  isthmus lab ping a-pod1 b-pod1\n  isthmus lab ping a-pod1 10.246.0.11",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			l, err := lab.Open(*name)
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
			return labPing(ctx, cmd.OutOrStdout(), from, to, count)
		},
	}
	cmd.Flags().IntVarP(&count, "count", "c", 3, "number of requests")
	return cmd
}

func labPing(ctx context.Context, out io.Writer, from *lab.Host, to netip.Addr, count int) error {
	answers := 0
	for i := range count {
		rtt, err := from.PingWith(ctx, to, lab.PingOptions{})
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			fmt.Fprintln(out, err)
		default:
			answers++
			fmt.Fprintf(out, "%v answers %s in %.2f ms\n", to, from, float64(rtt.Microseconds())/1000)
		}
		if i+1 < count {
			time.Sleep(200 * time.Millisecond)
		}
	}
	if answers == 0 {
		return fmt.Errorf("%v does not answer %s", to, from)
	}
	return nil
}
