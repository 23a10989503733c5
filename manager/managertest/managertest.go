// Package managertest supports the tests of the manager's packages. It provides an API server with
// our CRDs for each package, a cluster in it for each test, and simulated peers.
package managertest

import (
	"context"
	"encoding/base64"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr"
	networkingv1 "k8s.io/api/networking/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

// Server is the API server of all tests of a package, with our CRDs. Each test uses its own
// namespaces and cluster IDs. Tests that use Server must not run in parallel, because each manager
// sees all namespaces.
var (
	Server *kubetest.Server
	Config *rest.Config
	Client client.Client // reads and writes without a cache

	ServesServiceCIDRs bool // Kubernetes 1.31 and 1.32 do not serve the kind
)

// SomeKey and AnotherKey are public keys.
const (
	SomeKey    = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE="
	AnotherKey = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI="
)

// Key returns a key of 32 octets with the value b.
func Key(b byte) (key [32]byte) {
	for i := range key {
		key[i] = b
	}
	return key
}

// KeyText returns Key(b) in base64.
func KeyText(b byte) string {
	key := Key(b)
	return base64.StdEncoding.EncodeToString(key[:])
}

// Main starts an API server, runs the tests of a package, and ends the process. TestMain calls it.
// With -short, no API server is started.
func Main(m *testing.M, name string) {
	flag.Parse()
	ctrl.SetLogger(logr.Discard())
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	code := 1
	err := func() (err error) {
		if testing.Short() {
			code = m.Run()
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute) // the first run builds the server
		defer cancel()
		if Server, err = kubetest.Start(ctx, kubetest.Options{Name: name, Controllers: true}); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, Server.Stop()) }()
		if Config, Client, err = Connect(ctx, Server); err != nil {
			return err
		}
		err = Client.List(ctx, &networkingv1.ServiceCIDRList{}, client.Limit(1))
		if ServesServiceCIDRs = err == nil; kubeerr.IgnoreUnknown(err) != nil {
			return err
		}
		code = m.Run()
		return nil
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// ServicesWherePlanned returns the ServiceCIDR for an AddressPlan, or an invalid prefix if a
// manager can detect the ServiceCIDR on the Server.
func ServicesWherePlanned() (cidr netip.Prefix) {
	if !ServesServiceCIDRs {
		cidr = netip.MustParsePrefix("10.96.0.0/12")
	}
	return cidr
}

// Root returns the path of the module's root, relative to the directory of the running test.
func Root() string {
	dir := "."
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil || len(dir) > 100 {
			return dir
		}
		dir = filepath.Join(dir, "..")
	}
}

// Connect installs our CRDs and returns the configuration and a client of the server.
func Connect(ctx context.Context, server *kubetest.Server) (*rest.Config, client.Client, error) {
	return ConnectWith(ctx, server, filepath.Join(Root(), "deploy/crds"))
}

// ConnectWith installs the CRDs in a directory, and returns the configuration and a client of the
// server.
func ConnectWith(ctx context.Context, server *kubetest.Server, crds string) (*rest.Config, client.Client, error) {
	cfg, err := server.Config()
	if err != nil {
		return nil, nil, err
	}
	api, err := server.Client()
	if err != nil {
		return nil, nil, err
	}
	return cfg, api, ApplyCRDs(ctx, api, crds)
}

// ApplyCRDs creates the CRDs in a directory and waits until they are served.
func ApplyCRDs(ctx context.Context, api client.Client, dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("CRDs in %s: none (%w)", dir, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var crd apiextensions.CustomResourceDefinition
		if err := yaml.UnmarshalStrict(text, &crd); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		if err := api.Create(ctx, &crd); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		var list unstructured.UnstructuredList
		list.SetGroupVersionKind(schema.GroupVersionKind{Group: crd.Spec.Group, Version: crd.Spec.Versions[0].Name, Kind: crd.Spec.Names.ListKind})
		for err := api.List(ctx, &list); err != nil; err = api.List(ctx, &list) { // the API server does not serve all kinds at once
			if ctx.Err() != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}
