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

// Ports of the route agent. They differ from those of a gateway on the same node.
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
		Long: fmt.Sprintf(`Run the route agent of a node. It connects the nodes of the cluster by VXLAN (device
%s, UDP port %d), routes packets for remote clusters to the Pod of the active
gateway (to its node where the gateway has --host-network), and delivers packets from
there to pods.

The agent reads its Node, the pods on it, the gateway's Pods and Service, and the
NetworkAllocations. It reads TunnelEndpoints only if the NetworkAllocations lack this
cluster's networks, or if the gateway's Service has no annotation with a gateway's Pod. It
reads all Nodes and Pods only if a gateway has --host-network. While the API server is
unreachable, everything stays in place.

The agent writes one object, the NodeNetworks of its node. This object reports
- the networks and DNS servers that the node reaches, which the manager allocates to no
  peer;
- the resourceVersion of the NetworkAllocations that the node has applied. Packets for the
  networks in them cannot bypass the tunnel on this node. The manager waits for this
  report, up to five seconds, before it publishes a network.

The agent restores its kernel objects within a second. As soon as a network is allocated
to a peer, the node refuses packets for it that cannot use the tunnel. The node continues
to refuse them after the agent ends, because the agent leaves its kernel objects in place,
and after a reboot, because --state-directory stores the networks. An agent that starts
while another one runs takes over when the other ends. --cleanup removes everything.

The agent needs CAP_NET_ADMIN, the host's network, and dnsPolicy Default for the node's
own DNS servers; probes need "host: 127.0.0.1".`, kernel.OverlayDevice, kernel.OverlayPort),
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
			if o.StateDirectory != "" { // only with a state directory: without it, a restarted agent could vote for a second gateway
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
			o.ReportNetworks, o.ReportRefused = reporter.WriteNetworks, reporter.WriteRefused
			var events *kube.PodEvents
			if pod := os.Getenv("POD_NAME"); pod != "" {
				events, err = kube.NewPodEvents(config, "route-agent", installed, pod, types.UID(os.Getenv("POD_UID")))
				if err != nil {
					return err
				}
				o.ReportReady = func(ctx context.Context, problem string) error {
					if problem == "" {
						return events.Mended(ctx, "the node's configuration is applied again")
					}
					return events.Warn(ctx, "NotApplied", problem)
				}
			}
			err = routeagent.Run(cmd.Context(), o)
			if err != nil && cmd.Context().Err() == nil {
				if eventErr := events.Warn(cmd.Context(), "Failed", "the route agent ended: "+err.Error()); eventErr != nil {
					o.Log.Warn("cannot send an Event about the failure", "error", eventErr)
				}
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file (default: the Pod's ServiceAccount)")
	f.StringVar(&namespace, "namespace", "", "namespace of the installation (default: $POD_NAMESPACE, else "+deploy.Namespace+")")
	f.StringVar(&o.Node, "node-name", os.Getenv("NODE_NAME"), "name of this Node")
	cli.AddChoiceFlag(cmd, &level, "log-level", "info", "minimum level of log lines", "debug", "info", "warn", "error")
	f.StringVar(&o.MetricsAddress, "metrics-address", agentMetricsAddress, "TCP address of /metrics, /healthz and /readyz; empty disables it")
	secure.add(f)
	f.StringVar(&o.StatusAddress, "status-address", agentStatusAddress, "TCP address of /status; empty disables it")
	f.StringVar(&o.StateDirectory, "state-directory", "", "directory that stores the peers' networks, so that the node refuses packets for them after a reboot until the API server answers; empty disables it")
	f.StringVar(&o.Resolvers, "resolv-conf", "/etc/resolv.conf", "file with the DNS servers of the node")
	f.BoolVar(&started, "started", false, "startup probe: exit with 0 if the agent of this Pod ($POD_UID) runs, or is ready to take over from another one")
	f.BoolVar(&cleanup, "cleanup", false, "remove everything that route agents created on this node, and exit")
	return cmd
}
