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
		Long: `Run one of the gateways of a Kubernetes cluster. It watches TunnelEndpoints and
NatMappings, creates or reads the key Secret wireguard-pubkey, and takes part in the
election by the Lease isthmus-gateway. The active gateway connects to the peers, marks
itself (Pod label, annotation of the Service) and writes the status of each
TunnelEndpoint; the standbys are prepared to take over. An active gateway continues
while the API server is unreachable. A gateway that starts during this time waits for the
API server. With --state-directory, a gateway stores its configuration and private key. If
it was active in the last ten minutes, it starts with these and does not wait.

With --config the gateway needs no cluster: it reads a directory with gateway.yaml and with
TunnelEndpoint and NatMapping objects as "kubectl get -o yaml" prints them. A change
to one peer does not disturb the others. A broken file is reported, and the last good
configuration stays in force.

SIGTERM removes the gateway's objects from the kernel, except the routes that refuse
packets for its peers. Without these routes, such packets would leave in the clear.
--cleanup also removes these routes and the content of --state-directory.

In a cluster the gateway is an ordinary Pod. The Pod needs CAP_NET_ADMIN and /dev/net/tun,
UDP port 4800 from all nodes, UDP and TCP 5870 from the other gateways, and POD_NAME,
POD_IP, NODE_NAME and POD_NAMESPACE from the downward API. Probes of the Pod need the flag
--metrics-address :5872. A Pod with --host-network or --config also needs CAP_SYS_ADMIN
and hostNetwork: true; its probes need "host: 127.0.0.1" and not that flag.`,
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
				return cli.Usage("--%s has no effect with --config; set this in gateway.yaml", name)
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
	cmd.Flags().StringVar(&dir, "config", "", "directory with the configuration of a gateway without a cluster")
	cli.AddChoiceFlag(cmd, &level, "log-level", "info", "minimum level of log lines", "debug", "info", "warn", "error")
	cli.AddChoiceFlag(cmd, &udpOffload, "udp-offload", "auto", "send and receive many UDP packets in one system call, which needs Linux 6.2; auto means on from Linux 6.18 on", "auto", "on", "off")
	cmd.Flags().Lookup("udp-offload").NoOptDefVal = "on"
	cmd.Flags().StringVar(&profileAddress, "pprof-address", "", "loopback TCP address of /debug/pprof, such as 127.0.0.1:6060; empty disables it")
	cmd.Flags().BoolVar(&cleanup, "cleanup", false, "remove the kernel objects of a gateway that has ended, and exit")
	replica.addFlags(cmd.Flags())
	return cmd
}

// cleanUp removes everything that gateways left on this node.
func cleanUp(stateDirectory string, log *slog.Logger) error {
	var forgotten error
	if stateDirectory != "" {
		forgotten = kube.Forget(stateDirectory)
	}
	return errors.Join(gateway.Clear(false, log), forgotten)
}

// firstChanged returns the first of the named flags that the user has set.
func firstChanged(cmd *cobra.Command, names []string) string {
	for _, name := range names {
		if cmd.Flags().Changed(name) {
			return name
		}
	}
	return ""
}

// shareProcessors limits the gateway to half of the processors that it may use, at least one.
// GOMAXPROCS takes precedence. See docs/decisions/0005.
func shareProcessors() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(max(1, runtime.GOMAXPROCS(0)/2))
	}
}

// fileSource returns a source that watches a directory.
func fileSource(dir string, log *slog.Logger) gateway.Source {
	return func(ctx context.Context, deliver func(gateway.Config, error)) {
		file.Watch(ctx, dir, func(s file.Snapshot, err error) {
			for _, open := range s.OpenKeys {
				log.Warn("private key is readable by other users, who could pose as this gateway; run chmod 600", "file", open)
			}
			deliver(configOf(s), err)
		})
	}
}

func configOf(s file.Snapshot) gateway.Config {
	return gateway.Config{
		Gateway:        s.Gateway,
		PrivateKey:     gateway.Key(s.PrivateKey),
		NextKey:        gateway.Key(s.NextKey),
		ListenPort:     s.File.ListenPort,
		Tunnels:        s.File.Tunnels,
		MTU:            int(s.File.MTU), // AutoMTU is 0, as in gateway.Config
		NAT:            s.File.NAT.Config(),
		MetricsAddress: s.File.MetricsAddress,
		StatusAddress:  s.File.StatusAddress,
		FlowLog:        gateway.FlowLog{File: s.File.FlowLog, Sample: s.File.FlowLogSample, PerSecond: s.File.FlowLogPerSecond},
	}
}
