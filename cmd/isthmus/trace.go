package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/source/file"
)

func newTraceCommand() *cobra.Command {
	var address, dir, direction string
	var output cli.Output
	var local, remote cluster.Access
	cmd := &cobra.Command{
		Use:   "trace SRC[:PORT] DST[:PORT] [tcp|udp|icmp]",
		Short: "Show the path of a packet without sending it",
		Long: `Show the path of a packet without sending it: the peer, the rule and the rewritten
addresses, or the reason why it would be dropped.

With a kubeconfig, the command computes the path from the cluster's objects: the pod's
node, the gateway, the tunnel, and the path of the answer. With --remote-context it
includes the other cluster. SRC and DST have one of these forms:
- an address, as this cluster sees it;
- NAMESPACE/POD;
- svc/NAME or svc/NAMESPACE/NAME, for the first ready endpoint of this Service;
- for DST, the name in clusterset.local of a Service that this cluster imports.

A Pod or Service in SRC is in this cluster. In DST, it is in the other cluster if
--remote-context is set. For an imported Service, the command chooses an endpoint in the
other cluster, else in any peer, else in this cluster. The first line shows this endpoint
and the number of endpoints in each cluster.

With --gateway or --address, or without a kubeconfig, the command queries the gateway on
this machine, and the result depends on the gateway's NAT flows. With --config, the
command reads the configuration in a directory. In both cases SRC and DST are the
addresses of the packet before the gateway rewrites it:
- outbound: SRC is our pod, and DST is the peer's pod as we see it;
- inbound: SRC is the peer's pod at its address here, and DST is our pod at its address
  there.

Without --direction the command chooses the direction that fits the addresses. For ICMP
the port is the identifier of an echo request.

If the peer is down, the last line reports it, with the reason. The exit code is 1 if the
packet would not arrive. It is 0 if the packet arrives, or leaves for a peer whose cluster
is not checked.`,
		Example: `  isthmus trace --context paris shop/web-0 10.246.1.20:80
  isthmus trace --context paris --remote-context oslo shop/web-0 db/postgres-0:5432
  isthmus trace --context paris shop/web-0 shop.prod.svc.clusterset.local:80
  isthmus trace --gateway 10.244.1.10 10.246.1.20:80
  isthmus trace --gateway 10.246.1.20 10.247.0.5:53 udp --direction in
  isthmus trace --config ./bug-report 10.244.1.10 10.246.1.20 icmp`,
		Args: cobra.RangeArgs(2, 3),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
			if len(args) != 2 {
				return completePlace(cmd, &local, &remote, args, begin)
			}
			return withPrefix([]string{"tcp", "udp", "icmp"}, begin)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			q := gateway.TraceQuery{Protocol: "tcp", Direction: direction}
			if len(args) == 3 {
				q.Protocol = args[2]
			}
			if !slices.Contains([]string{"tcp", "udp", "icmp"}, q.Protocol) {
				return cli.Usage("protocol %q: want tcp, udp or icmp", q.Protocol)
			}
			if dir == "" && aboutCluster(cmd) {
				t := clusterTrace{ctx: cmd.Context(), query: q}
				return t.run(cmd, local, remote, args[0], args[1], output)
			}
			var err error
			if q.Src, err = gateway.ParseTraceAddr(args[0]); err != nil {
				return cli.Usage("source: %w", err)
			}
			if q.Dst, err = gateway.ParseTraceAddr(args[1]); err != nil {
				return cli.Usage("destination: %w", err)
			}
			var steps []gateway.TraceStep
			if dir != "" {
				s, err := file.Load(dir)
				if err != nil {
					return cli.Unreachable(fmt.Errorf("configuration: %w", err))
				}
				if steps, err = gateway.TraceOffline(configOf(s), q); err != nil {
					return cli.Unreachable(err)
				}
			} else {
				query := url.Values{"src": {args[0]}, "dst": {args[1]}, "protocol": {q.Protocol}, "direction": {direction}}
				raw, err := request(cmd.Context(), address, "/trace?"+query.Encode())
				if err != nil {
					return err
				}
				if err := json.Unmarshal(raw, &steps); err != nil {
					return cli.Unreachable(fmt.Errorf("answer of %s: %w", address, err))
				}
			}
			if output.ForPrograms() {
				if err := output.Print(cmd.OutOrStdout(), steps); err != nil {
					return err
				}
			} else {
				printTrace(cmd.OutOrStdout(), steps)
			}
			for _, s := range steps {
				if s.Drop != "" || s.PeerDown != "" {
					return cli.ErrProblem
				}
			}
			return nil
		},
	}
	addAccessFlags(cmd, &local, "", "")
	addAccessFlags(cmd, &remote, "remote-", " of the other cluster")
	cmd.Flags().Bool("gateway", false, "use the gateway on this machine, not the cluster")
	addAddressFlag(cmd, &address)
	cmd.Flags().StringVar(&dir, "config", "", "use the configuration in this directory instead of a cluster or the running gateway")
	cli.AddChoiceFlag(cmd, &direction, "direction", "", "direction of the packet: out is towards the tunnel, in is from the tunnel; with a kubeconfig, show only the packet (out) or only its answer (in)", "out", "in")
	cli.AddOutputFlag(cmd, &output, "print for programs")
	return cmd
}

func printTrace(w io.Writer, steps []gateway.TraceStep) {
	for i, s := range steps {
		if i > 0 {
			fmt.Fprintln(w)
		}
		direction := "outbound, towards the tunnel"
		if s.Direction == "inbound" {
			direction = "inbound, from the tunnel"
		}
		fmt.Fprintf(w, "%s %s -> %s, %s\n", s.Protocol, s.Src, s.Dst, direction)
		line := func(what, text string) { fmt.Fprintf(w, "  %-12s %s\n", what, text) }
		if s.Peer != "" {
			line("peer", nameAndID(s.PeerName, s.Peer))
		}
		if s.Rule != "" {
			line("rule", s.Rule)
		}
		if s.Flow != "" {
			line("flow", s.Flow)
		}
		if s.Drop != "" {
			line("verdict", fmt.Sprintf("dropped: %s (%s)", s.Drop, s.Text))
			if s.PeerDown != "" {
				line("but", "the peer is down: "+s.PeerDown)
			}
			continue
		}
		rewritten := false
		if s.NewSrc != "" && s.NewSrc != s.Src {
			line("source", s.Src+" becomes "+s.NewSrc)
			rewritten = true
		}
		if s.NewDst != "" && s.NewDst != s.Dst {
			line("destination", s.Dst+" becomes "+s.NewDst)
			rewritten = true
		}
		if !rewritten {
			line("rewrite", "none, both addresses are unchanged")
		}
		switch s.Action {
		case "forward":
			if s.Direction == "inbound" {
				line("verdict", "forwarded to our pods")
			} else {
				line("verdict", "forwarded into the tunnel")
			}
		case "deliver":
			line("verdict", "for the gateway itself")
		default:
			line("verdict", s.Action)
		}
		if s.PeerDown != "" {
			line("but", "the peer is down: "+s.PeerDown)
		}
	}
}
