// Package programs builds what the tests of a package run as processes.
package programs

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"testing"

	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
	kubesource "github.com/isthmus-net/isthmus/internal/source/kube"
	"github.com/isthmus-net/isthmus/internal/testbin"
)

// Run builds the program isthmus and the programs of a control plane, says in *isthmus and in *kube
// where they are (a file, and a folder as kubetest.Options wants it), runs the tests and returns what
// TestMain ends with. Clients of Kubernetes log nothing meanwhile. Where no lab can be made nothing is
// built, and the tests say why they are skipped.
func Run(m *testing.M, isthmus, kube *string) int {
	kubesource.UseLogger(slog.New(slog.DiscardHandler))
	if lab.Available() != nil {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "isthmus-test-")
	if err != nil {
		return failed(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if *isthmus, err = testbin.Isthmus(dir); err != nil {
		return failed(err)
	}
	if *kube, err = kubetest.Build(context.Background(), os.Stderr); err != nil {
		return failed(err)
	}
	return m.Run()
}

func failed(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}
