package exchange

import (
	"maps"
	"slices"
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// forRoom is the key of requests that wait for room in the IPAM state.
const forRoom = "room"

// requests is a set of requests that can be looked up by key. The zero value is empty. Its methods
// may be called concurrently.
type requests struct {
	mu    sync.Mutex
	byKey map[string]map[reconcile.Request]struct{}
	keys  map[reconcile.Request][]string
}

// add adds a request, or replaces the keys of a request that is in the set.
func (s *requests) add(r reconcile.Request, keys ...string) {
	s.remove(r)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys == nil {
		s.byKey, s.keys = make(map[string]map[reconcile.Request]struct{}), make(map[reconcile.Request][]string)
	}
	s.keys[r] = keys
	for _, key := range keys {
		if s.byKey[key] == nil {
			s.byKey[key] = make(map[reconcile.Request]struct{})
		}
		s.byKey[key][r] = struct{}{}
	}
}

func (s *requests) remove(r reconcile.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range s.keys[r] {
		if delete(s.byKey[key], r); len(s.byKey[key]) == 0 {
			delete(s.byKey, key)
		}
	}
	delete(s.keys, r)
}

func (s *requests) with(key string) []reconcile.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.byKey[key]))
}
