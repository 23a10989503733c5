package routeagent

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
)

// If the source fails at the moment when the previous agent ends, the new agent must end, too,
// because it has no source.
func TestAgentEndsWhenItsSourceFailsDuringTakeover(t *testing.T) {
	failed := make(chan error, 1)
	wrong := errors.New("no rights any more")
	a := &agent{log: slog.New(slog.DiscardHandler)}
	_, err := a.follow(t.Context(), failed, func(ctx context.Context) (*rtnl.Kernel, error) {
		failed <- wrong
		<-ctx.Done()
		return &rtnl.Kernel{}, nil // it acquired the lock before the source failed
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.run(t.Context(), nil, failed); !errors.Is(err, wrong) {
		t.Errorf("the loop ends with %v, want %v", err, wrong)
	}
}
