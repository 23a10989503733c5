package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/internal/source/file"
)

func newGatewayCommand() *cobra.Command {
	var dir, level string
	cmd := &cobra.Command{
		Use:   "gateway --config DIR",
		Short: "Run a gateway in this network namespace (root)",
		Long: `Run a gateway with the configuration in a directory: gateway.yaml and the
TunnelEndpoint and NatMapping objects that "kubectl get -o yaml" prints. A change
of the files is applied without disturbing other peers; a broken file is reported
and the last good configuration stays in force. SIGTERM removes everything that
the gateway made.

It needs CAP_NET_ADMIN, CAP_SYS_ADMIN and /dev/net/tun.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" {
				return &codeError{exitUsage, errors.New("want --config DIR")}
			}
			var l slog.Level
			if err := l.UnmarshalText([]byte(level)); err != nil {
				return &codeError{exitUsage, fmt.Errorf("--log-level %q: want debug, info, warn or error", level)}
			}
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
			defer stop()
			context.AfterFunc(ctx, stop) // a second signal ends at once
			shareProcessors()
			return gateway.Run(ctx, gateway.Options{
				Source:  fileSource(dir),
				Log:     slog.New(slog.NewJSONHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: l})),
				Version: version(),
			})
		},
	}
	cmd.Flags().StringVar(&dir, "config", "", "directory with the configuration")
	cmd.Flags().StringVar(&level, "log-level", "info", "debug, info, warn or error")
	return cmd
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
		MTU:            int(s.Gateway.MTU), // AutoMTU is 0 in both
		MaxFlows:       s.Gateway.MaxFlows,
		MetricsAddress: s.Gateway.MetricsAddress,
		StatusAddress:  s.Gateway.StatusAddress,
	}
}
