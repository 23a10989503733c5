package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/gateway/tun"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/source/file"
	"github.com/isthmus-net/isthmus/internal/source/kube"
)

func newGatewayCommand() *cobra.Command {
	var dir, level, udpOffload, profileAddress string
	var cleanup bool
	var options gateway.Options
	replica := kubeGateway{port: file.DefaultListenPort}
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "Run a gateway in this network namespace (root)",
		Long: `Run a gateway as a replica of a Kubernetes cluster: it watches TunnelEndpoints and
NatMappings, makes or reads the key Secret wireguard-pubkey, and stands for
election by the Lease isthmus-gateway. The active replica connects the peers, marks
itself (Pod label, annotation of the Service) and writes the status of each
TunnelEndpoint; the others wait with everything read. An active gateway goes on
when the API server is away. One that starts then waits for it, unless it was the
active one in the last ten minutes: with --state-directory it keeps what it needs,
the private key included, and carries on until the API server answers.

With --config it needs no cluster: it reads a directory with gateway.yaml and the
TunnelEndpoint and NatMapping objects that "kubectl get -o yaml" prints. A change
of the files is applied without disturbing other peers; a broken file is reported
and the last good configuration stays in force.

SIGTERM removes what the gateway made in the kernel, but the host goes on refusing
packets for its peers, since they have no other way than in the clear. --cleanup
removes that as well, and what is in --state-directory.

In a cluster it is an ordinary Pod, in whose network the overlay of the nodes ends: it
needs CAP_NET_ADMIN and /dev/net/tun, UDP port 4800 from all nodes, UDP and TCP 5870 from the
other gateways, POD_NAME, POD_IP, NODE_NAME and POD_NAMESPACE by the downward API, and
probes need "--metrics-address :5872". With --host-network, and with --config, it needs
CAP_SYS_ADMIN besides and the network of its node; probes have "host: 127.0.0.1".`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch udpOffload {
			case "on":
				options.UDPOffload = true
			case "auto":
				options.UDPOffload = tun.TrustsUSO()
			}
			log := logger(cmd, level)
			options.Log, options.Version = log, cli.Version()
			if cleanup {
				return cleanUp(replica.stateDirectory, log)
			}
			serve := func(ctx context.Context) error {
				options.Source = fileSource(dir, log)
				return gateway.Run(ctx, options)
			}
			if dir == "" {
				if err := replica.complete(); err != nil {
					return err
				}
				serve = func(ctx context.Context) error { return replica.run(ctx, options) }
			} else if name := firstChanged(cmd, kubeGatewayFlags()); name != "" {
				return cli.Usage("--%s is for a gateway without --config; with it, gateway.yaml says that", name)
			}
			if err := checkProfileAddress(profileAddress); err != nil {
				return err
			}
			shareProcessors()
			servers, err := serveProfiles(profileAddress, log)
			if err != nil {
				return err
			}
			defer servers.Close()
			return serve(cmd.Context())
		},
	}
	cmd.Flags().StringVar(&dir, "config", "", "directory with the configuration, instead of a cluster")
	cli.AddChoiceFlag(cmd, &level, "log-level", "info", "how much is logged", "debug", "info", "warn", "error")
	cli.AddChoiceFlag(cmd, &udpOffload, "udp-offload", "auto", "let UDP superpackets cross the TUN (Linux 6.2 and later); auto is on from Linux 6.18 on", "auto", "on", "off")
	cmd.Flags().Lookup("udp-offload").NoOptDefVal = "on"
	cmd.Flags().StringVar(&profileAddress, "pprof-address", "", "loopback TCP address of /debug/pprof, such as 127.0.0.1:6060; empty: none")
	cmd.Flags().BoolVar(&cleanup, "cleanup", false, "remove what a gateway that ended left in the kernel, and end")
	replica.addFlags(cmd.Flags())
	return cmd
}

// cleanUp removes what gateways left on this node.
func cleanUp(stateDirectory string, log *slog.Logger) error {
	var forgotten error
	if stateDirectory != "" {
		forgotten = kube.Forget(stateDirectory)
	}
	return errors.Join(gateway.Clear(false, log), forgotten)
}

// firstChanged returns the first of the flags that the user gave.
func firstChanged(cmd *cobra.Command, names []string) string {
	for _, name := range names {
		if cmd.Flags().Changed(name) {
			return name
		}
	}
	return ""
}

// shareProcessors lets the gateway use half of the processors that it may have, at least one,
// unless GOMAXPROCS says otherwise. See docs/decisions/0005.
func shareProcessors() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(max(1, runtime.GOMAXPROCS(0)/2))
	}
}

// fileSource watches a directory.
func fileSource(dir string, log *slog.Logger) gateway.Source {
	return func(ctx context.Context, deliver func(gateway.Config, error)) {
		file.Watch(ctx, dir, func(s file.Snapshot, err error) {
			if s.OpenKey != "" {
				log.Warn("others than its owner may use the private key: whoever reads it is this gateway to all peers; chmod 600", "file", s.OpenKey)
			}
			deliver(configOf(s), err)
		})
	}
}

func configOf(s file.Snapshot) gateway.Config {
	return gateway.Config{
		Gateway:        s.Gateway,
		PrivateKey:     gateway.Key(s.PrivateKey),
		ListenPort:     s.File.ListenPort,
		Tunnels:        s.File.Tunnels,
		MTU:            int(s.File.MTU), // AutoMTU is 0 in both
		NAT:            s.File.NAT.Config(),
		MetricsAddress: s.File.MetricsAddress,
		StatusAddress:  s.File.StatusAddress,
		FlowLog:        gateway.FlowLog{File: s.File.FlowLog, Sample: s.File.FlowLogSample, PerSecond: s.File.FlowLogPerSecond},
	}
}
