package ipamstore

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/yaml"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

// The API server of all tests of this package. A cluster has one IpamStorage, so the tests do not
// run in parallel, and each begins without one.
var (
	testScheme = kubetest.NewScheme()
	testConfig *rest.Config
	testClient client.Client
)

func TestMain(m *testing.M) {
	flag.Parse()
	ctrllog.SetLogger(logr.Discard())
	code := 1
	err := func() error {
		if testing.Short() {
			code = m.Run()
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute) // the first time it is built
		defer cancel()
		server, err := kubetest.Start(ctx, kubetest.Options{Name: "ipamstore"})
		if err != nil {
			return err
		}
		defer server.Stop()
		if testConfig, err = server.Config(); err != nil {
			return err
		}
		if testClient, err = server.Client(); err != nil {
			return err
		}
		if err := applyCRDs(ctx); err != nil {
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

func applyCRDs(ctx context.Context) error {
	files, err := filepath.Glob("../../deploy/crds/*.yaml")
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no CRDs (%w)", err)
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
		if err := testClient.Create(ctx, &crd); err != nil {
			return err
		}
	}
	for _, list := range []client.ObjectList{&v1alpha1.IpamStorageList{}, &v1alpha1.TunnelEndpointList{}, &v1alpha1.NetworkConfigList{}, &v1alpha1.NatMappingList{}, &isthmus.NetworkAllocationList{}} {
		for testClient.List(ctx, list) != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}
