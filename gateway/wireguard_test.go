package gateway

import (
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/natengine"
)

func key(n byte) (k [32]byte) { k[0], k[31] = n, 64; return k }

var quiet = slog.New(slog.DiscardHandler)

// newEnd returns a tunnel end with real sockets and nothing else.
func newEnd(t *testing.T) *tunnelEnd {
	t.Helper()
	e := &tunnelEnd{Tunnel: datapath.New(memlink.NewLink("mem", 1420), bind.New(), natengine.New(natengine.Config{}), nil, datapath.Options{})}
	t.Cleanup(func() { _ = e.Close() })
	return e
}

func TestListenPortInUseIsReportedAndTheOldPortKept(t *testing.T) {
	taken, err := net.ListenPacket("udp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := netip.MustParseAddrPort(taken.LocalAddr().String()).Port()
	if err := portError(newEnd(t).Up(key(9), port), port); err == nil || !strings.Contains(err.Error(), "/udp is in use by another process") {
		t.Errorf("start: %v", err)
	}
	e := newEnd(t)
	if err := e.Up(key(9), 0); err != nil {
		t.Fatal(err)
	}
	free := e.Port()
	for range 2 { // the second time tests a retry
		if err := e.listen(port); err == nil || !strings.Contains(err.Error(), "is in use") {
			t.Errorf("change: %v", err)
		}
	}
	if e.Port() != free {
		t.Errorf("listens on %d, not on %d any more", e.Port(), free)
	}
	taken.Close()
	if err := e.listen(port); err != nil {
		t.Errorf("once it is free: %v", err)
	}
	if err := portFree(port); err == nil {
		t.Error("nothing listens on the new port")
	}
	if err := portFree(free); err != nil {
		t.Errorf("the old port: %v", err)
	}
}
