package gateway

import (
	"net"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
)

// Packets that the kernel drops in the gateway's namespace are counted in a metric. An example is
// a peer's packet with a bad inner header.
func TestKernelDropsAreCounted(t *testing.T) {
	namespace, err := rtnl.NewNamespace()
	if err != nil {
		t.Skip(err)
	}
	defer namespace.Close()
	g, text := newTestLoop(t), ""
	if err := rtnl.Do(namespace, func() error {
		if _, err := net.Dial("udp", "192.0.2.1:9"); err == nil {
			t.Error("a namespace without devices has a route")
		}
		text = g.scrape(t)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if want := `isthmus_kernel_ip_drops_total{reason="no_route"} 1` + "\n"; !strings.Contains(text, want) {
		t.Errorf("no %s", want)
	}
}
