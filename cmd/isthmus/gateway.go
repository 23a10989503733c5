package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/gateway/tun"
	"github.com/isthmus-net/isthmus/internal/source/file"
)

func newGatewayCommand() *cobra.Command {
	var dir, level, transport, udpOffload, profiles string
	var options gateway.Options
	kube := kubeGateway{port: file.DefaultListenPort}
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "Run a gateway in this network namespace (root)",
		Long: `Run a gateway as a replica of a Kubernetes cluster: it watches TunnelEndpoints and
NatMappings, makes or reads the key Secret wireguard-pubkey, and stands for
election by the Lease isthmus-gateway. The active replica connects the peers, marks
itself (Pod label, annotation of the Service) and writes the status of each
TunnelEndpoint; the others wait with everything read. An active gateway goes on
when the API server is away; one that starts then waits for it.

With --config it needs no cluster: it reads a directory with gateway.yaml and the
TunnelEndpoint and NatMapping objects that "kubectl get -o yaml" prints. A change
of the files is applied without disturbing other peers; a broken file is reported
and the last good configuration stays in force.

SIGTERM removes everything that the gateway made in the kernel. It needs
CAP_NET_ADMIN, CAP_SYS_ADMIN and /dev/net/tun.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var l slog.Level
			if err := l.UnmarshalText([]byte(level)); err != nil {
				return usage("--log-level %q: want debug, info, warn or error", level)
			}
			var err error
			if options.Transport, err = gateway.ParseTransport(transport); err != nil {
				return usage("--transport: %w", err)
			}
			switch udpOffload {
			case "on":
				options.UDPOffload = true
			case "auto":
				options.UDPOffload = tun.TrustsUSO()
			case "off":
			default:
				return usage("--udp-offload: %q; want auto, on or off", udpOffload)
			}
			log := slog.New(slog.NewJSONHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: l}))
			options.Log, options.Version = log, version()
			serve := func(ctx context.Context) error {
				options.Source = fileSource(dir)
				return gateway.Run(ctx, options)
			}
			if dir == "" {
				if err := kube.complete(); err != nil {
					return err
				}
				serve = func(ctx context.Context) error { return kube.run(ctx, options) }
			} else if name := firstChanged(cmd, kubeGatewayFlags()); name != "" {
				return usage("--%s is for a gateway without --config; with it, gateway.yaml says that", name)
			}
			if err := checkProfileAddress(profiles); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
			defer stop()
			context.AfterFunc(ctx, stop) // a second signal ends at once
			shareProcessors()
			stopProfiles, err := serveProfiles(profiles, log)
			if err != nil {
				return err
			}
			defer stopProfiles()
			return serve(ctx)
		},
	}
	cmd.Flags().StringVar(&dir, "config", "", "directory with the configuration, instead of a cluster")
	cmd.Flags().StringVar(&level, "log-level", "info", "debug, info, warn or error")
	cmd.Flags().StringVar(&transport, "transport", string(gateway.TransportInline), "how packets of established sessions travel: inline, or device (through wireguard-go's queues)")
	cmd.Flags().StringVar(&udpOffload, "udp-offload", "auto", "let UDP superpackets cross the TUN (Linux 6.2 and later): on, off, or auto, which is on from Linux 6.18 on")
	cmd.Flags().Lookup("udp-offload").NoOptDefVal = "on"
	cmd.Flags().StringVar(&profiles, "pprof-address", "", "loopback TCP address of /debug/pprof, such as 127.0.0.1:6060; empty: none")
	kube.addFlags(cmd.Flags())
	return cmd
}

func usage(format string, args ...any) error {
	return &codeError{exitUsage, fmt.Errorf(format, args...)}
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

// shareProcessors lets the gateway use half of the processors that it may have,
// at least one, unless GOMAXPROCS says otherwise. See docs/decisions/0005.
func shareProcessors() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(max(1, runtime.GOMAXPROCS(0)/2))
	}
}

// fileSource watches a directory.
func fileSource(dir string) gateway.Source {
	return func(ctx context.Context, deliver func(gateway.Config, error)) {
		file.Watch(ctx, dir, func(s file.Snapshot, err error) {
			deliver(configOf(s), err)
		})
	}
}

func configOf(s file.Snapshot) gateway.Config {
	return gateway.Config{
		Intent:         s.Intent,
		PrivateKey:     gateway.Key(s.PrivateKey),
		ListenPort:     s.Gateway.ListenPort,
		Tunnels:        s.Gateway.Tunnels,
		MTU:            int(s.Gateway.MTU), // AutoMTU is 0 in both
		NAT:            s.Gateway.NAT.Config(),
		MetricsAddress: s.Gateway.MetricsAddress,
		StatusAddress:  s.Gateway.StatusAddress,
	}
}
