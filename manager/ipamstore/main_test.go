package ipamstore

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

// All tests of this package share one API server. A cluster has one IpamStorage, so the tests do
// not run in parallel, and each begins without one.
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
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute) // the first run builds the API server
		defer cancel()
		server, err := kubetest.Start(ctx, kubetest.Options{Name: "ipamstore"})
		if err != nil {
			return err
		}
		defer server.Stop()
		if testConfig, testClient, err = managertest.Connect(ctx, server); err != nil {
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
