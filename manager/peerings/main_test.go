package peerings

import (
	"testing"

	"github.com/isthmus-net/isthmus/manager/managertest"
)

func TestMain(m *testing.M) { managertest.Main(m, "peerings-test") }
