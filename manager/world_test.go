package manager

import (
	"testing"

	"github.com/isthmus-net/isthmus/manager/managertest"
)

// A world is one cluster in which a test runs the whole manager.
type world struct{ *managertest.World }

// bare returns a world without a manager.
func bare(t *testing.T) *world {
	t.Helper()
	return &world{managertest.New(t)}
}
