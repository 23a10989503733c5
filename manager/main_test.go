package manager

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/internal/kubetest"
)

// The API server of all tests of this package, with our CRDs. A test uses namespaces and cluster
// IDs of its own, and does not run in parallel with others that use it, because managers see
// everything.
var (
	testServer *kubetest.Server
	testConfig *rest.Config
	testClient client.Client // straight to the API server, without a cache

	servesServiceCIDRs bool // Kubernetes 1.31 and 1.32 do not
)

// servicesWherePlanned is the ServiceCIDR of an AddressPlan for the servers of this package: invalid where a manager finds it
// out by itself.
func servicesWherePlanned() (cidr netip.Prefix) {
	if !servesServiceCIDRs {
		cidr = netip.MustParsePrefix("10.96.0.0/12")
	}
	return cidr
}

func TestMain(m *testing.M) {
	flag.Parse()
	logToSlog(slog.New(slog.DiscardHandler))
	code := 1
	err := func() error {
		if testing.Short() {
			code = m.Run()
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute) // the first time it is built
		defer cancel()
		var err error
		if testServer, err = kubetest.Start(ctx, kubetest.Options{Name: "manager-test", Controllers: true}); err != nil {
			return err
		}
		defer testServer.Stop()
		if testConfig, testClient, err = connect(ctx, testServer); err != nil {
			return err
		}
		if servesServiceCIDRs, err = canList(ctx, testClient, &networkingv1.ServiceCIDRList{}); err != nil {
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

// connect returns the ways to a server, after our CRDs are there.
func connect(ctx context.Context, server *kubetest.Server) (*rest.Config, client.Client, error) {
	return connectWith(ctx, server, "../deploy/crds")
}

// connectWith is connect with the CRDs in a folder.
func connectWith(ctx context.Context, server *kubetest.Server, crds string) (*rest.Config, client.Client, error) {
	cfg, err := server.Config()
	if err != nil {
		return nil, nil, err
	}
	api, err := server.Client()
	if err != nil {
		return nil, nil, err
	}
	return cfg, api, applyCRDs(ctx, api, crds)
}

// applyCRDs creates the CRDs in a folder and waits until they are served.
func applyCRDs(ctx context.Context, api client.Client, dir string) error {
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
		for err := api.List(ctx, &list); err != nil; err = api.List(ctx, &list) { // each kind is served at a time of its own
			if ctx.Err() != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}
