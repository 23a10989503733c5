// Package kube connects the gateway and the route agent with Kubernetes. It watches the objects
// that configure them, and delivers the configuration as values of package fabric. For the
// gateway it also elects the active replica, writes the status of the TunnelEndpoints, and
// rotates the key in the Secret. For a node it writes the agent's report. cmd/isthmus creates
// one Gateway or calls WatchNode.
//
//	TunnelEndpoints, NatMappings, key Secret ─ watch ─► Snapshot ─► gateway
//	TunnelEndpoint.status, labels, annotation ◄─ write ─ Report ◄──┘
//
// An event only triggers another evaluation. Each evaluation reads all objects from the cache,
// so lost or repeated events are harmless. While the API server is unavailable, the last
// Snapshot stays in force without a time limit.
package kube

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// UseLogger makes the Kubernetes libraries log to log, for the whole process.
func UseLogger(log *slog.Logger) {
	klog.SetLogger(logr.FromSlogHandler(log.Handler()))
	ctrllog.SetLogger(logr.FromSlogHandler(log.Handler()))
}

// newScheme returns a scheme with the kinds that this package reads and writes.
func newScheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, coordinationv1.AddToScheme, discoveryv1.AddToScheme, v1alpha1.AddToScheme, isthmus.AddToScheme} {
		if err := add(scheme); err != nil {
			panic(err) // only fails if one kind has two Go types, which no input can cause
		}
	}
	return scheme
}

// objects is a cache of the watched objects.
type objects struct {
	cache.Cache
	log *slog.Logger

	mu      sync.Mutex
	trouble map[string]error // kind → reason why it cannot be read now
}

// newObjects makes a cache of the given kinds only, each restricted to the objects that are needed.
// It fails if the API server does not serve these kinds.
func newObjects(config *rest.Config, kinds map[client.Object]cache.ByObject, log *slog.Logger) (*objects, error) {
	o := &objects{log: log, trouble: make(map[string]error)}
	var err error
	o.Cache, err = cache.New(config, cache.Options{
		Scheme:                      newScheme(),
		ByObject:                    kinds,
		DefaultTransform:            cache.TransformStripManagedFields(),
		ReaderFailOnMissingInformer: true,
		DefaultWatchErrorHandler: func(_ context.Context, r *toolscache.Reflector, err error) {
			o.failed(r.TypeDescription(), err)
		},
	})
	if meta.IsNoMatchError(err) {
		err = fmt.Errorf("the API server does not serve all kinds; install the CRDs (`isthmus install`): %w", err)
	}
	return o, err
}

// failed records why a kind could not be read. The informer retries by itself every few seconds.
func (o *objects) failed(kind string, err error) {
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return // the resource version was too old; the informer lists again
	}
	kind = kind[strings.LastIndexByte(kind, '.')+1:] // "*v1alpha1.TunnelEndpoint"
	o.mu.Lock()
	defer o.mu.Unlock()
	if before := o.trouble[kind]; before == nil || before.Error() != err.Error() {
		o.trouble[kind] = err
		o.log.Warn("cannot read objects; retrying; the objects read before stay in force", "kind", kind, "error", err)
	}
}

// watch starts the cache, calls notify for every change of the kinds, and returns once each
// kind has been read. It fails only if ctx ends. Until it returns, it calls waiting about once
// a second with the current problem.
func (o *objects) watch(ctx context.Context, notify func(), waiting func(error), kinds ...client.Object) error {
	return o.watchBy(ctx, toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { notify() },
		UpdateFunc: func(before, after any) {
			if !sameButVersion(before, after) {
				notify()
			}
		},
		DeleteFunc: func(any) { notify() },
	}, waiting, kinds...)
}

// watchBy is like watch, but passes each change to a handler. When watchBy returns, the handler
// has received all objects read so far.
func (o *objects) watchBy(ctx context.Context, handler toolscache.ResourceEventHandler, waiting func(error), kinds ...client.Object) error {
	for _, kind := range kinds {
		name := strings.TrimPrefix(fmt.Sprintf("%T", kind), "*")
		name = name[strings.LastIndexByte(name, '.')+1:]
		var registered toolscache.ResourceEventHandlerRegistration
		err := retry(ctx, waiting, func() error {
			informer, err := o.GetInformer(ctx, kind, cache.BlockUntilSynced(false))
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			registered, err = informer.AddEventHandler(handler)
			return err
		})
		if err != nil {
			return err
		}
		err = retry(ctx, waiting, func() error {
			if registered.HasSynced() {
				return nil
			}
			o.mu.Lock()
			defer o.mu.Unlock()
			if why := o.trouble[name]; why != nil {
				return fmt.Errorf("%s: not read yet: %w", name, why)
			}
			return fmt.Errorf("%s: not read yet", name)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// sameButVersion reports whether an object is unchanged in all fields that this package reads. The
// transforms of the cache drop all other fields. The kubelets' heartbeats update each Node every
// few minutes, and these updates must not cause work.
func sameButVersion(before, after any) bool {
	a, ok := before.(client.Object)
	b, also := after.(client.Object)
	if !ok || !also {
		return false
	}
	a = a.DeepCopyObject().(client.Object) // the original belongs to the cache
	a.SetResourceVersion(b.GetResourceVersion())
	return equality.Semantic.DeepEqual(a, b)
}

// retry calls try until it succeeds or ctx ends. The first retries are quick; later ones follow
// once a second.
func retry(ctx context.Context, waiting func(error), try func() error) error {
	pause := 10 * time.Millisecond
	for {
		err := try()
		if err == nil {
			return nil
		}
		if pause *= 2; pause > time.Second {
			pause = time.Second
			waiting(err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// A signal wakes its receiver if something may have changed since the last receive.
type signal chan struct{}

func newSignal() signal { return make(signal, 1) }

// set sends the signal. It never blocks.
func (s signal) set() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// Changes with one cause arrive close together. Therefore coalesce waits until no signal has
// arrived for coalesceQuiet, but at most for coalesceLimit.
const (
	coalesceQuiet = 20 * time.Millisecond
	coalesceLimit = 200 * time.Millisecond
)

// coalesce calls evaluate once for each group of signals, until ctx ends. For an urgent signal it
// calls evaluate at once, and then not again for coalesceQuiet.
func (s signal) coalesce(ctx context.Context, urgent signal, evaluate func()) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-urgent:
			evaluate()
			select {
			case <-ctx.Done():
			case <-time.After(coalesceQuiet):
			}
			continue
		case <-s:
		}
		limit := time.After(coalesceLimit)
	group:
		for {
			select {
			case <-ctx.Done():
				return
			case <-s:
			case <-urgent:
				break group
			case <-time.After(coalesceQuiet):
				break group
			case <-limit:
				break group
			}
		}
		evaluate()
	}
}
