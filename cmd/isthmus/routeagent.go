package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/source/kube"
	"github.com/isthmus-net/isthmus/routeagent"
)

// Ports of the route agent, beside those of a gateway on the same node.
const (
	agentMetricsAddress = ":5874"
	agentStatusAddress  = "127.0.0.1:5875"
)

func newRouteAgentCommand() *cobra.Command {
	var kubeconfig, level string
	o := routeagent.Options{Version: version()}
	cmd := &cobra.Command{
		Use:   "route-agent",
		Short: "Run the route agent of a node, in the node's network namespace (root)",
		Long: fmt.Sprintf(`Run the route agent of a node: it connects the nodes of the cluster by VXLAN (device
%s, UDP port %d) and leads packets for remote clusters to the node with the
active gateway, and packets from them to the node of the pod. It reads Nodes, Pods
and TunnelEndpoints and writes nothing to the API server; while that is away,
everything stays as it is.

What somebody else deletes or changes of it is back within a second. SIGTERM removes
everything that the agent made. It needs CAP_NET_ADMIN and the host's network.`, fabric.OverlayDevice, fabric.OverlayPort),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var l slog.Level
			if err := l.UnmarshalText([]byte(level)); err != nil {
				return usage("--log-level %q: want debug, info, warn or error", level)
			}
			if o.Node == "" {
				return usage("want --node-name NAME, or NODE_NAME in the environment: the Node on which this runs")
			}
			config, err := kube.RESTConfig(kubeconfig)
			if err != nil {
				return unreachable(err)
			}
			o.Log = slog.New(slog.NewJSONHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: l}))
			kube.UseLogger(o.Log)
			o.Source = func(ctx context.Context, deliver func(fabric.NodeIntent, []fabric.Problem)) error {
				return kube.WatchNode(ctx, config, o.Log, deliver)
			}
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
			defer stop()
			context.AfterFunc(ctx, stop) // a second signal ends at once
			return routeagent.Run(ctx, o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&kubeconfig, "kubeconfig", "", "how to reach the API server; without it as a Pod does")
	f.StringVar(&o.Node, "node-name", os.Getenv("NODE_NAME"), "name of the Node on which this runs")
	f.StringVar(&level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&o.MetricsAddress, "metrics-address", agentMetricsAddress, "host:port of /metrics, /healthz and /readyz; empty for none")
	f.StringVar(&o.StatusAddress, "status-address", agentStatusAddress, "host:port of /status; empty for none")
	return cmd
}
