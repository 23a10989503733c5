package gateway

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/datapath"
)

// names is a name server.
type names struct {
	mu      sync.Mutex
	answer  []netip.Addr
	err     error
	asked   int
	changes int
}

func (n *names) lookup(context.Context, string) ([]netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked++
	return n.answer, n.err
}

func (n *names) set(err error, addrs ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.answer, n.err = nil, err
	for _, a := range addrs {
		n.answer = append(n.answer, netip.MustParseAddr(a))
	}
}

func named1(endpoint string) []fabric.GatewayPeer {
	return []fabric.GatewayPeer{{ID: "b", Endpoint: endpoint, Port: 5871, AllowedIPs: [2]netip.Prefix{
		netip.MustParsePrefix("10.246.0.0/16"), netip.MustParsePrefix("10.247.0.0/16")}}}
}

// resolving runs a test with a resolver, a name server and a clock of its own. step lets seconds
// pass.
func resolving(t *testing.T, test func(r *resolver, n *names, step func(seconds int), at func() string)) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{}
		r := newResolver(n.lookup, func() { n.mu.Lock(); n.changes++; n.mu.Unlock() }, quiet)
		defer r.close()
		test(r, n, func(seconds int) {
			for range seconds {
				r.tick(time.Now())
				synctest.Wait()
				time.Sleep(time.Second)
			}
		}, func() string {
			ap, _ := r.endpoint("b")
			return ap.String()
		})
	})
}

func TestALiteralEndpointIsNeverLookedUp(t *testing.T) {
	resolving(t, func(r *resolver, n *names, step func(int), at func() string) {
		r.set(named1("192.0.2.1"))
		r.heard("b", false)
		step(100)
		if at() != "192.0.2.1:5871" || n.asked != 0 {
			t.Errorf("%s, asked %d times", at(), n.asked)
		}
	})
}

func TestANameIsResolvedPreferringIPv4AndKeepsItsAnswer(t *testing.T) {
	resolving(t, func(r *resolver, n *names, step func(int), at func() string) {
		n.set(nil, "2001:db8::1", "192.0.2.2", "192.0.2.1")
		r.set(named1("gw.example"))
		if at() != "invalid AddrPort" {
			t.Errorf("before the answer: %s", at())
		}
		step(1)
		if at() != "192.0.2.2:5871" || n.changes != 1 {
			t.Errorf("%s after %d changes", at(), n.changes)
		}
		n.set(nil, "192.0.2.1", "192.0.2.2")
		r.heard("b", false)
		step(30)
		if at() != "192.0.2.2:5871" || n.changes != 1 {
			t.Errorf("%s after %d changes, although the old answer is among the new", at(), n.changes)
		}
		// The same peer with another port, then with another name.
		moved := named1("gw.example")
		moved[0].Port = 9999
		r.set(moved)
		if at() != "192.0.2.2:9999" {
			t.Errorf("other port: %s", at())
		}
		r.set(named1("other.example"))
		if at() != "invalid AddrPort" {
			t.Errorf("other name: %s", at())
		}
	})
}

func TestANewAnswerWaitsUntilThePeerIsSilent(t *testing.T) {
	resolving(t, func(r *resolver, n *names, step func(int), at func() string) {
		n.set(nil, "192.0.2.1")
		r.set(named1("gw.example"))
		r.heard("b", true)
		step(2)
		n.set(nil, "192.0.2.9")
		step(130)
		if at() != "192.0.2.1:5871" {
			t.Errorf("moved to %s although the peer is heard", at())
		}
		if n.asked > 4 {
			t.Errorf("asked %d times in two minutes", n.asked)
		}
		r.heard("b", false)
		step(1)
		if at() != "192.0.2.9:5871" || n.changes != 2 {
			t.Errorf("%s after %d changes", at(), n.changes)
		}
		// Silent and the name changes: soon.
		n.set(nil, "192.0.2.10")
		r.heard("b", false)
		step(11)
		if at() != "192.0.2.10:5871" {
			t.Errorf("%s 11 s later", at())
		}
	})
}

func TestAFailedLookupKeepsTheAnswerAndIsRepeated(t *testing.T) {
	resolving(t, func(r *resolver, n *names, step func(int), at func() string) {
		n.set(errors.New("server misbehaving"))
		r.set(named1("gw.example"))
		step(25)
		if _, err := r.endpoint("b"); err == nil || !strings.Contains(err.Error(), "resolving gw.example: server misbehaving") {
			t.Errorf("%v", err)
		}
		if n.asked != 3 {
			t.Errorf("asked %d times in 25 s", n.asked)
		}
		n.set(nil, "192.0.2.1")
		step(10)
		n.set(errors.New("server misbehaving"))
		r.heard("b", false)
		step(30)
		if at() != "192.0.2.1:5871" {
			t.Errorf("forgot the answer: %s", at())
		}
	})
}

func TestAnAnswerThatCannotBeAGatewayIsRefused(t *testing.T) {
	for addr, text := range map[string]string{
		"127.0.0.1":   "no address of a gateway",
		"224.0.0.1":   "no address of a gateway",
		"0.0.0.0":     "no address of a gateway",
		"169.254.0.1": "no address of a gateway",
		"10.246.0.1":  "inside 10.246.0.0/16",
	} {
		remotes := []netip.Prefix{netip.MustParsePrefix("10.246.0.0/16")}
		if got, err := choose([]netip.Addr{netip.MustParseAddr(addr)}, netip.Addr{}, remotes); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %s, %v", addr, got, err)
		}
		other := netip.MustParseAddr("192.0.2.1")
		if got, err := choose([]netip.Addr{netip.MustParseAddr(addr), other}, netip.Addr{}, remotes); got != other || err != nil {
			t.Errorf("%s and %s: %s, %v", addr, other, got, err)
		}
	}
}

func TestAPeerIsDownWithoutASession(t *testing.T) {
	begin := time.Unix(1_700_000_000, 0)
	s := session{since: begin}
	at := func(seconds int, stats datapath.Stats) bool {
		s = s.after(stats, begin.Add(time.Duration(seconds)*time.Second))
		return s.down
	}
	handshake := datapath.Stats{Handshake: begin.Add(40 * time.Second), Received: 148}
	for _, tc := range []struct {
		seconds int
		stats   datapath.Stats
		down    bool
	}{
		{1, datapath.Stats{}, false}, // its first packets wait for the handshake
		{29, datapath.Stats{}, false},
		{31, datapath.Stats{}, true},
		{41, handshake, false},
		{40 + 194, handshake, false},
		{40 + 196, handshake, true},
	} {
		if got := at(tc.seconds, tc.stats); got != tc.down {
			t.Errorf("after %d s: down %v", tc.seconds, got)
		}
	}
	if heard := begin.Add(41 * time.Second); !s.heard.Equal(heard) {
		t.Errorf("heard at %v, want %v", s.heard, heard)
	}
}
