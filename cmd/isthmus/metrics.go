package main

import (
	"fmt"
	"log/slog"

	"github.com/spf13/pflag"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/httpserve"
	"github.com/isthmus-net/isthmus/internal/kubeauth"
	"github.com/isthmus-net/isthmus/internal/owncluster"
)

// metricsFlags control who may read the metrics.
type metricsFlags struct {
	on      bool
	certDir string
}

func (m *metricsFlags) add(f *pflag.FlagSet) {
	f.BoolVar(&m.on, "metrics-secure", false, "serve --metrics-address by HTTPS, and /metrics only with a token that the API server authorizes (isthmus install --metrics-auth)")
	f.StringVar(&m.certDir, "metrics-cert-dir", "", "directory with tls.crt and tls.key for --metrics-secure (default: a self-signed certificate)")
}

// secure returns the access control for the metrics. For each request, the API server authorizes
// the client. kubeconfig selects the API server; see owncluster.RESTConfig. Without
// --metrics-secure, the result is nil.
func (m *metricsFlags) secure(kubeconfig string, log *slog.Logger) (*httpserve.Secure, error) {
	if !m.on {
		return nil, nil
	}
	tls, err := httpserve.TLS(m.certDir)
	if err != nil {
		return nil, cli.Usage("--metrics-cert-dir: %w", err)
	}
	config, err := owncluster.RESTConfig(kubeconfig)
	if err != nil {
		return nil, cli.Unreachable(err)
	}
	reviewer, err := kubeauth.New(config, log)
	if err != nil {
		return nil, fmt.Errorf("--metrics-secure: %w", err)
	}
	return &httpserve.Secure{TLS: tls, Guard: reviewer.Guard}, nil
}

func (m *metricsFlags) complete() error {
	if m.certDir != "" && !m.on {
		return cli.Usage("--metrics-cert-dir needs --metrics-secure")
	}
	return nil
}
