// Package programs builds the programs that tests of a package run as processes.
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

// Run builds the isthmus program and the programs of a control plane, runs the tests, and returns
// the exit code for TestMain. It stores the program's path in *isthmus and the folder for
// kubetest.Options in *kube. It disables the log of Kubernetes clients. If labs cannot run on
// this machine, it builds nothing, and the tests skip themselves with the reason.
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
