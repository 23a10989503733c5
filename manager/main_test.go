package manager

import (
	"log/slog"
	"testing"

	"github.com/isthmus-net/isthmus/manager/managertest"
)

func TestMain(m *testing.M) {
	logToSlog(slog.New(slog.DiscardHandler))
	managertest.Main(m, "manager-test")
}
