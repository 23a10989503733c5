package services

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// A board collects the results of single reconciles, each for one service, for code that needs the
// results of all services. Its methods may be called concurrently.
type board struct {
	mu       sync.Mutex
	own      map[Key]*isthmus.ExportedService // exports of this cluster; nil: the export was checked and is invalid
	outcomes map[Key]map[string]outcome       // by service, and by cluster ID of the exporter
	omitted  map[string]map[Key]bool          // exports for which a peer's shards have no room, by cluster ID of the peer
}

// An outcome is the result of importing a service from one peer.
type outcome struct {
	served    bool
	endpoints int
	refusals  []Refusal
}

func (o outcome) equal(p outcome) bool {
	return o.served == p.served && o.endpoints == p.endpoints && slices.Equal(o.refusals, p.refusals)
}

func newBoard() *board {
	return &board{own: make(map[Key]*isthmus.ExportedService), outcomes: make(map[Key]map[string]outcome), omitted: make(map[string]map[Key]bool)}
}

// setOwn records an export of this cluster.
func (b *board) setOwn(key Key, s *isthmus.ExportedService) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.own[key] = s
}

// dropOwn removes an export, and reports whether it existed.
func (b *board) dropOwn(key Key) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, was := b.own[key]
	delete(b.own, key)
	return was
}

// checked reports whether the export has been checked.
func (b *board) checked(key Key) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, ok := b.own[key]
	return ok
}

// ownKeys returns the exports of this cluster, including invalid ones.
func (b *board) ownKeys() []Key {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Collect(maps.Keys(b.own))
}

// exports returns the valid exports of this cluster, sorted. The caller must not change them.
func (b *board) exports() (all []isthmus.ExportedService) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.own {
		if s != nil {
			all = append(all, *s)
		}
	}
	slices.SortFunc(all, func(a, b isthmus.ExportedService) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	return all
}

// setOmitted records the exports for which a peer's shards have no room. It returns the exports
// whose state changed.
func (b *board) setOmitted(id string, keys []Key) (changed []Key) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := b.omitted[id]
	now := make(map[Key]bool, len(keys))
	for _, key := range keys {
		if now[key] = true; !before[key] {
			changed = append(changed, key)
		}
	}
	for key := range before {
		if !now[key] {
			changed = append(changed, key)
		}
	}
	b.omitted[id] = now
	return changed
}

// omits reports whether the peer's shards have no room for an export.
func (b *board) omits(id string, key Key) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.omitted[id][key]
}

// setOutcomes records the outcomes of a service, by cluster ID. It returns the peers whose outcome
// changed.
func (b *board) setOutcomes(key Key, now map[string]outcome) (changed []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := b.outcomes[key]
	for id, o := range now {
		if was, ok := before[id]; !ok || !was.equal(o) {
			changed = append(changed, id)
		}
	}
	for id := range before {
		if _, ok := now[id]; !ok {
			changed = append(changed, id)
		}
	}
	if len(now) == 0 {
		delete(b.outcomes, key)
	} else {
		b.outcomes[key] = maps.Clone(now)
	}
	return changed
}

// outcome returns the outcome for one peer's service, or false if the service has not been checked
// yet.
func (b *board) outcome(key Key, id string) (outcome, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o, ok := b.outcomes[key][id]
	return o, ok
}

// Imports sums up the outcomes of a peer's services.
type Imports struct {
	Served, Endpoints int
	// Refused counts services that are not served, or only with changes.
	Refused int
	// Foreign lists services that are not imported, because an object of another implementation has
	// the name. The list is sorted.
	Foreign []string
}

func (b *board) imports(id string) (sum Imports) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, by := range b.outcomes {
		o, ok := by[id]
		if !ok {
			continue
		}
		if o.served {
			sum.Served++
			sum.Endpoints += o.endpoints
		}
		if len(o.refusals) > 0 {
			sum.Refused++
		}
		if slices.ContainsFunc(o.refusals, func(r Refusal) bool { return r.Reason == RefusedForeign }) {
			sum.Foreign = append(sum.Foreign, key.String())
		}
	}
	slices.Sort(sum.Foreign)
	return sum
}

// keys returns all services on the board.
func (b *board) keys() []Key {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make(map[Key]bool)
	for k := range b.own {
		all[k] = true
	}
	for k := range b.outcomes {
		all[k] = true
	}
	return slices.Collect(maps.Keys(all))
}
