package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// neverRead is a cache, an informer and a registration that has never read any object.
type neverRead struct{ cache.Cache }

func (u neverRead) GetInformer(context.Context, client.Object, ...cache.InformerGetOption) (cache.Informer, error) {
	return neverReadInformer{}, nil
}

type neverReadInformer struct{ cache.Informer }

func (neverReadInformer) AddEventHandler(toolscache.ResourceEventHandler) (toolscache.ResourceEventHandlerRegistration, error) {
	return neverReadRegistration{}, nil
}

type neverReadRegistration struct {
	toolscache.ResourceEventHandlerRegistration
}

func (neverReadRegistration) HasSynced() bool { return false }

func TestGatewayReportsUnreadableObjectsInPlainWords(t *testing.T) {
	var logged strings.Builder
	g := &Gateway{log: slog.New(slog.DiscardHandler), keeper: new(keeper)}
	o := &objects{Cache: neverRead{}, log: slog.New(slog.NewTextHandler(&logged, nil)), trouble: make(map[string]error)}
	refused := &url.Error{Op: "Get", URL: "https://10.96.0.1/api/v1/nodes", Err: &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}}
	for range 2 {
		o.failed("*v1.Node", refused)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	waiter := g.waiter()
	waiting := func(err error) { waiter(err); cancel() }
	if err := o.watch(ctx, func() {}, waiting, &corev1.Node{}); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(g.Ready()), "Node: not read yet: the API server does not answer: connection refused"; got != want {
		t.Errorf("reports %q, want %q", got, want)
	}
	if n := strings.Count(logged.String(), "dial tcp"); n != 1 {
		t.Errorf("the detail is in the log %d times, want 1:\n%s", n, &logged)
	}
}
