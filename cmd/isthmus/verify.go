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
		Short: "Send traffic between two clusters from pods made for it, and say what arrives",
		Long: `Make Pods in the namespace of the installation of both clusters, on the node of the
active gateway and on another one, in the pod network and in the host network. Have
each send to every pod of the other cluster, both ways: ICMP, UDP and TCP, from
little to more than the MTU. Besides, ping the mapped addresses of the other cluster,
and connect to the TCP ports of Services that have endpoints there, by address and by
name, up to 16 of each. Connect to the first TCP port of Services imported from the
other cluster, up to 16 each way: by the name in clusterset.local, which any exporter
may answer, and at one endpoint of the other cluster. A target that does not answer in
its own cluster either does not count as failed. Say what was answered, how fast, and
from which address the receiver saw it come. The Pods run the image of the gateway and
are deleted at the end, also of an interrupted run.

--pod and --remote-pod take Pods that are there instead, in whatever namespace, so that
the policies for these count. Each gets an ephemeral container that asks for no rights,
and that ends with the run; Kubernetes keeps its record until the Pod goes. It echoes at
port 7468 of the Pod meanwhile. Pings between Pods are left out where a Pod may not send
them (sysctl net.ipv4.ping_group_range), and of those to mapped addresses nothing is
known; --only icmp asks for all.

--continuous goes on until it is interrupted, with one small UDP packet a second
between all of them, and counts what is lost; -o json prints the counts at the end.

The exit code is 0 when everything was answered, 1 when something was not, and 2
when a cluster could not be asked or the two are not peered. A Pod that could not be
told to send, since its node or the API server was away, has lost nothing: that is
counted apart as unknown, with exit code 2 where nothing failed; by --continuous,
where nothing was sent at all.`,
		Example: "  isthmus verify --context paris --remote-context oslo\n" +
			"  isthmus verify --context paris --remote-context oslo --only pod,tcp,out --sizes 1400,9000\n" +
			"  isthmus verify --context paris --remote-context oslo --pod shop/web-0 --remote-pod db/postgres-0\n" +
			"  isthmus verify --context paris --remote-context oslo --continuous",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if remote.Context == "" && remote.Kubeconfig == "" {
				return cli.Usage("want --remote-context, or --remote-kubeconfig: the other cluster")
			}
			if continuous && (len(sizes) > 0 || len(o.To) > 0 || output == "junit") {
				return cli.Usage("--continuous counts one small packet a second between the Pods: it goes without --sizes, --to and -o junit")
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
			if remote.Kubeconfig == "" {
				remote.Kubeconfig = local.Kubeconfig
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
			if report.Checks > 0 { // an interrupted run says what it knows
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
				return cli.Unreachable(fmt.Errorf("nothing is known of %d of %d checks", report.Unknown, report.Checks))
			}
			return nil
		},
	}
	addAccessFlags(cmd, &local, "", "")
	addAccessFlags(cmd, &remote, "remote-", " of the other cluster")
	cmd.Flags().StringSliceVar(&only, "only", nil, "not all: tcp, udp or icmp; from the pod or the host network; out is from A to B, in the other way")
	_ = cmd.RegisterFlagCompletionFunc("only", cobra.FixedCompletions(verify.Words, cobra.ShellCompDirectiveNoFileComp)) // fails for a flag that is not there
	cmd.Flags().IntSliceVar(&sizes, "sizes", nil, "octets to send instead of those chosen by protocol: 56 to 4000, by TCP 500000; UDP sends at least 96, ICMP 16")
	cmd.Flags().StringSliceVar(&o.To, "to", nil, "besides what is found, ping HOST, or connect to HOST:PORT, from the Pods in A")
	cmd.Flags().StringSliceVar(&o.Pods, "pod", nil, "send from and to this Pod of A, NAMESPACE/NAME, instead of Pods made for it")
	cmd.Flags().StringSliceVar(&o.RemotePods, "remote-pod", nil, "the same for B")
	cmd.Flags().StringVar(&o.Image, "image", "", "image of the Pods (default that of the gateway in each cluster)")
	cmd.Flags().BoolVar(&continuous, "continuous", false, "go on until interrupted, and count what is lost")
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

// watchLoss shows a line that changes on a terminal, and one every ten seconds elsewhere; for
// programs it shows that on standard error, and at the end what was counted. An interruption is how it
// ends.
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
	var told time.Time
	o.Continuous = func(losses []verify.Loss) {
		last = losses
		switch {
		case terminal:
			fmt.Fprint(out, "\r\x1b[K"+verify.Line(losses))
		case time.Since(told) >= 10*time.Second:
			told = time.Now()
			fmt.Fprintln(out, told.UTC().Format(time.RFC3339)+" "+verify.Line(losses))
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

// lossError says how --continuous ends: with what it counted, and the error of verify.Run.
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

// newProbeCommand is what the Pods of verify run.
func newProbeCommand() *cobra.Command {
	var echo, control uint16
	var idle time.Duration
	cmd := &cobra.Command{
		Use:    "probe",
		Short:  "Echo, and send what a port of the loopback address is told to (the Pods of isthmus verify run it)",
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
	cmd.Flags().DurationVar(&idle, "idle", 0, "end when nobody has told anything for so long; 0: never")
	cmd.Flags().Uint16Var(&control, "control", 0, "TCP port of the loopback address")
	return cmd
}
