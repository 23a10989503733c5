package managertest

import (
	"context"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/manager/ipam"
)

// A Store holds the IPAM state in memory. Its methods may be called concurrently.
type Store struct {
	mu    sync.Mutex
	state ipam.State
}

// Update changes the State.
func (b *Store) Update(_ context.Context, f func(ipam.State) (ipam.State, error)) (ipam.State, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	state, err := f(b.state)
	if err == nil {
		b.state = state
	}
	return b.state, err
}

// Now returns the time of this machine.
func (b *Store) Now(context.Context) (time.Time, error) { return time.Now(), nil }

// State returns the State.
func (b *Store) State() ipam.State {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state
}
