package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/verify"
)

func newVerifyCommand() *cobra.Command {
	var local, remote cluster.Access
	var o verify.Options
	var output cli.Output
	var only []string
	var sizes []int
	var continuous bool
	cmd := &cobra.Command{
		Use:   "verify --context A --remote-context B",
		Short: "Send traffic between two clusters from temporary Pods, and report the results",
		Long: `Test the traffic between two clusters with temporary Pods. In both clusters the command
creates them in the namespace of the installation: on the node of the active gateway and
on another one, in the pod network and in the host network. Each Pod sends ICMP, UDP and
TCP to every Pod of the other cluster, with sizes from small to beyond the MTU.

The Pods also test other targets in the other cluster, at most 16 of each kind:
- mapped endpoints, by ping: nodes and other hosts outside the pod network that the other
  cluster makes reachable for the Pods' cluster;
- Services whose EndpointSlices have pods of the other cluster without an import, as those
  that Liqo reflects: each TCP port, by the endpoint's address and by the Service's name;
- Services that the Pods' cluster imports from the other cluster: the first TCP port, by
  the name in clusterset.local. Any exporting cluster may answer;
- one endpoint of each of these imported Services: the same port, by address.

If a target does not answer in its own cluster either, it does not count as failed. The
command prints each answer, its time, and the source address that the receiver saw. The
Pods run the gateway's image. The command deletes them at the end, even if you interrupt
it.

--pod and --remote-pod use existing Pods of any namespace instead, so their network
policies apply. Each gets an ephemeral container without rights, which echoes at port
7468 of the Pod and ends with the run; Kubernetes keeps its record until the Pod is
deleted. If a Pod may not send pings (sysctl net.ipv4.ping_group_range), pings between
Pods are left out unless --only contains icmp, and pings to mapped endpoints count as
unknown.

--continuous sends one small UDP packet a second between all Pods until you interrupt it,
and counts lost packets; -o json prints the counts at the end.

The exit code is 0 if all targets answered, 1 if one did not, and 2 if a cluster could not
be reached or the two are not peered. If a Pod did not get the command to send, because
its node or the API server was unreachable, its packets count as unknown, not as lost. If
nothing failed, but packets are unknown, the exit code is 2. With --continuous, unknown
packets cause exit code 2 only if nothing was sent at all.`,
		Example: "  isthmus verify --context paris --remote-context oslo\n" +
			"  isthmus verify --context paris --remote-context oslo --only pod,tcp,out --sizes 1400,9000\n" +
			"  isthmus verify --context paris --remote-context oslo --pod shop/web-0 --remote-pod db/postgres-0\n" +
			"  isthmus verify --context paris --remote-context oslo --continuous",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if !otherCluster(&local, &remote) {
				return cli.Usage("want --remote-context, or --remote-kubeconfig: the other cluster")
			}
			if continuous && (len(sizes) > 0 || len(o.To) > 0 || output == "junit") {
				return cli.Usage("--continuous sends one small packet a second between the Pods: it cannot be combined with --sizes, --to or -o junit")
			}
			if o.Only, err = verify.ParseOnly(only); err != nil {
				return cli.Usage("--only: %w", err)
			}
			for flag, pods := range map[string][]string{"--pod": o.Pods, "--remote-pod": o.RemotePods} {
				if err := verify.CheckPods(pods); err != nil {
					return cli.Usage("%s: %w", flag, err)
				}
			}
			for _, target := range o.To {
				if err := verify.CheckTarget(target); err != nil {
					return cli.Usage("--to %w", err)
				}
			}
			if len(sizes) > 0 {
				o.Sizes = map[string][]int{}
				for _, protocol := range []string{verify.TCP, verify.UDP, verify.ICMP} {
					for _, n := range sizes {
						if n < 1 || n > 60000 {
							return cli.Usage("--sizes %d: want octets from 1 to 60000", n)
						}
					}
					o.Sizes[protocol] = sizes
				}
			}
			a, err := connect(local)
			if err != nil {
				return err
			}
			b, err := connect(remote)
			if err != nil {
				return err
			}
			o.Report = func(line string) { fmt.Fprintln(cmd.ErrOrStderr(), line) }
			if continuous {
				return watchLoss(cmd, a, b, o, output)
			}
			report, err := verify.Run(cmd.Context(), a, b, o)
			if report.Checks > 0 { // report the results even if the run was interrupted
				err = errors.Join(err, printReport(cmd, report, output))
			}
			switch {
			case errors.Is(err, verify.ErrNotPeered):
				return cli.Usage("%w", err)
			case err != nil:
				return clusterError(err)
			case report.Failed > 0:
				return cli.ErrProblem
			case report.Unknown > 0:
				return cli.Unreachable(fmt.Errorf("the results of %d of %d checks are unknown", report.Unknown, report.Checks))
			}
			return nil
		},
	}
	addAccessFlags(cmd, &local, "", "")
	addAccessFlags(cmd, &remote, "remote-", " of the other cluster")
	cmd.Flags().StringSliceVar(&only, "only", nil, "send only some packets: by protocol (tcp, udp, icmp), by network of the sender (pod, host), by direction (out is from A to B, in from B to A)")
	_ = cmd.RegisterFlagCompletionFunc("only", cobra.FixedCompletions(verify.Words, cobra.ShellCompDirectiveNoFileComp)) // fails only if the flag does not exist
	cmd.Flags().IntSliceVar(&sizes, "sizes", nil, "octets to send (default 56 to 4000, TCP up to 500000); UDP sends at least 96, ICMP 16")
	cmd.Flags().StringSliceVar(&o.To, "to", nil, "also ping HOST, or connect to HOST:PORT, from the Pods in A")
	cmd.Flags().StringSliceVar(&o.Pods, "pod", nil, "use this Pod of A, NAMESPACE/NAME, instead of temporary Pods")
	cmd.Flags().StringSliceVar(&o.RemotePods, "remote-pod", nil, "use this Pod of B, NAMESPACE/NAME, instead of temporary Pods")
	cmd.Flags().StringVar(&o.Image, "image", "", "image of the Pods (default that of the gateway in each cluster)")
	cmd.Flags().BoolVar(&continuous, "continuous", false, "send until interrupted, and count lost packets")
	cli.AddOutputFlag(cmd, &output, "print for programs", "junit")
	return cmd
}

func printReport(cmd *cobra.Command, r *verify.Report, output cli.Output) error {
	switch {
	case output == "junit":
		return r.JUnit(cmd.OutOrStdout())
	case output.ForPrograms():
		return output.Print(cmd.OutOrStdout(), r)
	}
	return r.Print(cmd.OutOrStdout())
}

// watchLoss prints the losses until it is interrupted. On a terminal, it updates one line.
// Otherwise it prints a new line every ten seconds. If the output is for programs, these lines go
// to standard error, and the final counts to standard output.
func watchLoss(cmd *cobra.Command, a, b *cluster.Cluster, o verify.Options, output cli.Output) error {
	out := cmd.OutOrStdout()
	if output.ForPrograms() {
		out = cmd.ErrOrStderr()
	}
	terminal := false
	if f, ok := out.(*os.File); ok {
		info, err := f.Stat()
		terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	var last []verify.Loss
	var printed time.Time
	o.Continuous = func(losses []verify.Loss) {
		last = losses
		switch {
		case terminal:
			fmt.Fprint(out, "\r\x1b[K"+verify.Line(losses))
		case time.Since(printed) >= 10*time.Second:
			printed = time.Now()
			fmt.Fprintln(out, printed.UTC().Format(time.RFC3339)+" "+verify.Line(losses))
		}
	}
	_, err := verify.Run(cmd.Context(), a, b, o)
	if terminal {
		fmt.Fprintln(out)
	}
	for _, l := range last {
		if l.Lost > 0 {
			fmt.Fprintf(out, "%v to %v: %d of %d lost\n", l.From, l.To, l.Lost, l.Sent)
		}
	}
	if last != nil {
		fmt.Fprintln(out, verify.Line(last))
	}
	if output.ForPrograms() {
		err = errors.Join(err, output.Print(cmd.OutOrStdout(), struct {
			Losses []verify.Loss `json:"losses"`
		}{last}))
	}
	return lossError(last, err)
}

// lossError returns the error of a run with --continuous. err is the error of verify.Run, and has
// precedence. Otherwise lossError returns an error if packets were lost or no packet was sent.
func lossError(losses []verify.Loss, err error) error {
	sent, lost := 0, 0
	for _, l := range losses {
		sent, lost = sent+l.Sent, lost+l.Lost
	}
	switch {
	case err != nil:
		return clusterError(err)
	case lost > 0:
		return cli.ErrProblem
	case sent == 0:
		return cli.Unreachable(errors.New("nothing was sent"))
	}
	return nil
}

// newProbeCommand returns the hidden command that `isthmus verify` runs in its Pods.
func newProbeCommand() *cobra.Command {
	var echo, control uint16
	var idle time.Duration
	cmd := &cobra.Command{
		Use:    "probe",
		Short:  "Echo packets, and send the packets that a client requests at a loopback port (the Pods of isthmus verify run this command)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if control == 0 {
				return cli.Usage("--control %s: want a port", strconv.Itoa(int(control)))
			}
			return verify.Serve(cmd.Context(), echo, control, idle)
		},
	}
	cmd.Flags().Uint16Var(&echo, "echo", 0, "TCP and UDP port to echo at; 0: none")
	cmd.Flags().DurationVar(&idle, "idle", 0, "exit after this time without a command; 0: never")
	cmd.Flags().Uint16Var(&control, "control", 0, "TCP port of the loopback address")
	return cmd
}
