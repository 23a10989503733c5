package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/owncluster"
	"github.com/isthmus-net/isthmus/internal/source/kube"
	"github.com/isthmus-net/isthmus/internal/voting"
	"github.com/isthmus-net/isthmus/routeagent"
)

// Ports of the route agent, beside those of a gateway on the same node.
const (
	agentMetricsAddress = "127.0.0.1:5874"
	agentStatusAddress  = "127.0.0.1:5875"
)

func newRouteAgentCommand() *cobra.Command {
	var kubeconfig, namespace, level string
	var cleanup, started bool
	var secure metricsFlags
	o := routeagent.Options{Version: cli.Version(), Pod: os.Getenv("POD_UID")}
	cmd := &cobra.Command{
		Use:   "route-agent",
		Short: "Run the route agent of a node, in the node's network namespace (root)",
		Long: fmt.Sprintf(`Run the route agent of a node: it connects the nodes of the cluster by VXLAN (device
%s, UDP port %d) and leads packets for remote clusters to the Pod of the active
gateway, or to its node where the gateway has --host-network, and packets from them to
pods. It reads its Node, the pods on it, the gateway's Pods and Service and the
NetworkAllocations, and TunnelEndpoints where these do not say enough; where a gateway has
--host-network, all Nodes and Pods too. While the API server is away, everything stays
as it is. It writes
one object, the NodeNetworks of its node: the networks that the node reaches by itself
and its DNS servers, which the manager gives to no peer, and for which peers it
refuses packets: the manager tells of a network only when all nodes do.

What somebody else deletes or changes of it is back within a second. From the moment
at which a network is granted to a peer, the node refuses packets for it that cannot go
through the tunnel. That holds without an agent, too: it leaves everything as it is when
it ends, and keeps in --state-directory what to refuse after a reboot. One that starts
beside another follows it as soon as that one ends. --cleanup takes everything away. It needs CAP_NET_ADMIN, the host's network, and dnsPolicy Default for
the node's own DNS servers; probes have "host: 127.0.0.1".`, kernel.OverlayDevice, kernel.OverlayPort),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cleanup {
				err := routeagent.Cleanup(logger(cmd, level), o.StateDirectory)
				if err == nil && o.StateDirectory != "" {
					err = errors.Join(voting.RemovePromise(o.StateDirectory), kube.ForgetNode(o.StateDirectory))
				}
				return err
			}
			if started {
				return routeagent.Started(cmd.Context(), o.Pod)
			}
			if o.Node == "" {
				return cli.Usage("want --node-name NAME, or NODE_NAME in the environment: the Node on which this runs")
			}
			if err := secure.complete(); err != nil {
				return err
			}
			config, err := owncluster.RESTConfig(kubeconfig)
			if err != nil {
				return cli.Unreachable(err)
			}
			o.Log = logger(cmd, level)
			if o.MetricsSecure, err = secure.secure(kubeconfig, o.Log); err != nil {
				return err
			}
			kube.UseLogger(o.Log)
			installed := cmp.Or(namespace, os.Getenv("POD_NAMESPACE"), deploy.Namespace)
			var voter *voting.Voter
			if o.StateDirectory != "" { // a promise that is forgotten is worth nothing
				voter = &voting.Voter{Node: o.Node, Directory: o.StateDirectory, Log: o.Log}
				o.Voter = voter
			}
			o.Source = func(ctx context.Context, deliver func(fabric.NodeIntent, []fabric.Problem)) error {
				return kube.WatchNode(ctx, config, installed, o.Node, voter, o.Log, deliver)
			}
			reporter, err := kube.NewNodeReporter(config, installed, o.Node)
			if err != nil {
				return err
			}
			o.Tell, o.TellRefused = reporter.Tell, reporter.TellRefused
			var events *kube.PodEvents
			if pod := os.Getenv("POD_NAME"); pod != "" {
				events, err = kube.NewPodEvents(config, "route-agent", installed, pod, types.UID(os.Getenv("POD_UID")))
				if err != nil {
					return err
				}
				o.TellReady = func(ctx context.Context, problem string) error {
					if problem == "" {
						return events.Mended(ctx, "the node is as it should be again")
					}
					return events.Warn(ctx, "NotApplied", problem)
				}
			}
			err = routeagent.Run(cmd.Context(), o)
			if err != nil && cmd.Context().Err() == nil { // the last that this process can say
				if untold := events.Warn(cmd.Context(), "Failed", "the route agent ended: "+err.Error()); untold != nil {
					o.Log.Warn("nobody is told why", "error", untold)
				}
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&kubeconfig, "kubeconfig", "", "how to reach the API server; without it as a Pod does")
	f.StringVar(&namespace, "namespace", "", "namespace of the installation (default: $POD_NAMESPACE, else "+deploy.Namespace+")")
	f.StringVar(&o.Node, "node-name", os.Getenv("NODE_NAME"), "name of the Node on which this runs")
	cli.AddChoiceFlag(cmd, &level, "log-level", "info", "how much is logged", "debug", "info", "warn", "error")
	f.StringVar(&o.MetricsAddress, "metrics-address", agentMetricsAddress, "host:port of /metrics, /healthz and /readyz; empty for none")
	secure.add(f)
	f.StringVar(&o.StatusAddress, "status-address", agentStatusAddress, "host:port of /status; empty for none")
	f.StringVar(&o.StateDirectory, "state-directory", "", "where to keep what is refused after a reboot until the API server answers; empty: nowhere")
	f.StringVar(&o.Resolvers, "resolv-conf", "/etc/resolv.conf", "file with the DNS servers of the node")
	f.BoolVar(&started, "started", false, "say by the exit code whether the agent of this Pod ($POD_UID) runs, or could follow the one that does: a startup probe")
	f.BoolVar(&cleanup, "cleanup", false, "remove everything that route agents made on this node, and end")
	return cmd
}
