package services

import (
	"context"
	"fmt"
	"sync"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	discoveryclient "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
)

// sources watches the EndpointSlices of exported Services. Each Service has its own watch by label,
// because most endpoints of a cluster belong to Services that nobody exports. Its methods may be
// called concurrently.
type sources struct {
	client  discoveryclient.EndpointSlicesGetter
	changed func(Key)

	mu      sync.Mutex
	ctx     context.Context // context of run; nil while run is not running
	running sync.WaitGroup
	origins map[Key]*origin
}

// An origin is the watch for one Service.
type origin struct {
	store  toolscache.Store
	synced func() bool
	cancel context.CancelFunc
}

func newSources(config *rest.Config, changed func(Key)) (*sources, error) {
	config = rest.CopyConfig(config)
	config.ContentType = runtime.ContentTypeProtobuf
	client, err := discoveryclient.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("client for EndpointSlices: %w", err)
	}
	return &sources{client: client, changed: changed, origins: make(map[Key]*origin)}, nil
}

// run permits watches until ctx is done. It returns when all watches have ended.
func (s *sources) run(ctx context.Context) {
	s.mu.Lock()
	s.ctx = ctx
	s.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock()
	s.ctx = nil
	s.mu.Unlock()
	s.running.Wait()
}

// maxExports bounds the watched Services of one namespace. Each watch takes some 80 KB.
const maxExports = 512

// room reports whether a Service is watched, or whether there is room for another watch.
func (s *sources) room(key Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.origins[key] != nil {
		return true
	}
	n := 0
	for k := range s.origins {
		if k.Namespace == key.Namespace {
			n++
		}
	}
	return n < maxExports
}

// slices returns the EndpointSlices of a Service, which the caller must not change. wait is true if
// the slices are not known yet; sources then calls s.changed later.
func (s *sources) slices(key Key) (all []*discoveryv1.EndpointSlice, wait bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	src := s.origins[key]
	if src == nil {
		if s.ctx == nil {
			return nil, true
		}
		src = s.start(key)
	}
	if !src.synced() {
		return nil, true
	}
	for _, o := range src.store.List() {
		all = append(all, o.(*discoveryv1.EndpointSlice))
	}
	return all, false
}

// exists is called if want could not be created because its name is in use. It returns false if the
// slice with that name belongs to another service or manager. It returns true if the slice is ours,
// no longer exists or cannot be read.
func (s *sources) exists(ctx context.Context, want *discoveryv1.EndpointSlice) bool {
	list, err := s.client.EndpointSlices(want.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + want.Name})
	return err != nil || len(list.Items) == 0 || list.Items[0].Labels[LabelService] == want.Labels[LabelService] &&
		list.Items[0].Labels[discoveryv1.LabelManagedBy] == ManagedBy
}

// forget ends the watch for a Service.
func (s *sources) forget(key Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if src := s.origins[key]; src != nil {
		src.cancel()
		delete(s.origins, key)
	}
}

// start begins a watch. The caller holds s.mu.
func (s *sources) start(key Key) *origin {
	ctx, cancel := context.WithCancel(s.ctx)
	api, label := s.client.EndpointSlices(key.Namespace), discoveryv1.LabelServiceName+"="+key.Name
	notify := func() { s.changed(key) }
	store, controller := toolscache.NewInformerWithOptions(toolscache.InformerOptions{
		ListerWatcher: &toolscache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				o.LabelSelector = label
				return api.List(ctx, o)
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				o.LabelSelector = label
				return api.Watch(ctx, o)
			},
		},
		ObjectType: &discoveryv1.EndpointSlice{},
		Handler: toolscache.ResourceEventHandlerFuncs{
			AddFunc: func(any) { notify() }, UpdateFunc: func(any, any) { notify() }, DeleteFunc: func(any) { notify() },
		},
		Transform: toolscache.TransformFunc(func(o any) (any, error) {
			if slice, ok := o.(*discoveryv1.EndpointSlice); ok {
				slice.ManagedFields = nil
			}
			return o, nil
		}),
	})
	src := &origin{store: store, synced: controller.HasSynced, cancel: cancel}
	s.origins[key] = src
	s.running.Go(func() { controller.RunWithContext(ctx) })
	s.running.Go(func() {
		if toolscache.WaitForCacheSync(ctx.Done(), controller.HasSynced) {
			notify() // a Service without endpoints causes no event
		}
	})
	return src
}
