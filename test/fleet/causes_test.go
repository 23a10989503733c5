package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/test/internal/hosts"
)

// A cause is a fault of one peer, with the reasons that the two gateways report.
type cause struct {
	fault       string // name in docs/troubleshooting.md
	here, there string // the reasons at cluster a and at the peer; empty: that gateway cannot report a reason
	before      bool   // the fault exists before the peer's gateway first starts
	breaks      func(t *testing.T, s *causeSite)
	heals       func(t *testing.T, s *causeSite)
}

// causeSite is a lab with cluster a and one peer for each fault.
type causeSite struct {
	lab  *lab.Lab
	a, b *lab.Cluster // b is the peer with the current fault
}

// edit replaces matches of regular expressions in a cluster's configuration file for a peer.
func edit(t *testing.T, at, about *lab.Cluster, pairs ...[2]string) {
	t.Helper()
	path := lab.PeerFile(at, about)
	text, err := os.ReadFile(path)
	must(t, err)
	for _, p := range pairs {
		pattern := regexp.MustCompile("(?m)" + p[0])
		if !pattern.Match(text) {
			t.Fatalf("%s has no %s", path, pattern)
		}
		text = pattern.ReplaceAll(text, []byte(p[1]))
	}
	replaceFile(t, path, text)
}

// replaceFile replaces a file atomically, as an editor does.
func replaceFile(t *testing.T, path string, text []byte) {
	t.Helper()
	beside := filepath.Join(filepath.Dir(path), "."+filepath.Base(path))
	must(t, os.WriteFile(beside, text, 0o600))
	must(t, os.Rename(beside, path))
}

// rejoin restores both configuration files of a pair.
func rejoin(t *testing.T, s *causeSite) {
	t.Helper()
	atA, ok1 := s.lab.View(s.a, s.b)
	atB, ok2 := s.lab.View(s.b, s.a)
	if !ok1 || !ok2 {
		t.Fatalf("%s and %s are not joined", s.a, s.b)
	}
	must(t, s.lab.Join(s.a, s.b, lab.JoinOptions{AtA: atA, AtB: atB}))
}

// filter creates an nftables table called fault with one chain on a host. An empty chain removes
// the table.
func filter(t *testing.T, h *lab.Host, chain string) {
	t.Helper()
	rules := "add table ip fault; " + chain
	if chain == "" {
		rules = "delete table ip fault"
	}
	nft(t, h, rules)
}

// nft runs nft(8) on a host.
func nft(t *testing.T, h *lab.Host, rules string) {
	t.Helper()
	if out, err := h.Command(t.Context(), "nft", rules).CombinedOutput(); err != nil {
		t.Fatalf("nft on %s: %v\n%s", h, err, out)
	}
}

const aKey = "mNw5WJ9nOYIj6oNVw3Gz4zJcNk5vGSDhGJ0OxcuFx1E=" // the key of an unknown gateway

var causes = []cause{
	{
		fault: "the peer has a wrong public key of this cluster", here: "WrongKey", there: "WrongKey",
		breaks: func(t *testing.T, s *causeSite) { edit(t, s.b, s.a, [2]string{`publicKey: \S+`, "publicKey: " + aKey}) },
		heals:  rejoin,
	},
	{
		fault: "the peer's gateway was killed", here: "PeerSilent",
		breaks: func(t *testing.T, s *causeSite) { must(t, s.lab.KillGateway(s.b)) },
		heals:  func(t *testing.T, s *causeSite) { must(t, s.lab.StartGateway(t.Context(), s.b, binary)) },
	},
	{
		fault: "the peer's gateway has never run", here: "NoAnswer", before: true,
		heals: func(t *testing.T, s *causeSite) { must(t, s.lab.StartGateway(t.Context(), s.b, binary)) },
	},
	{
		fault: "the name of the peer's endpoint does not resolve", here: "EndpointName", before: true,
		breaks: func(t *testing.T, s *causeSite) {
			edit(t, s.a, s.b, [2]string{`endpointIP: \S+`, "endpointIP: gw.nowhere.invalid"})
		},
		heals: func(t *testing.T, s *causeSite) {
			rejoin(t, s)
			must(t, s.lab.StartGateway(t.Context(), s.b, binary))
		},
	},
	{
		fault: "a firewall in front of the peer drops UDP from this cluster", here: "AnswersLost", there: "PeerSilent",
		breaks: func(t *testing.T, s *causeSite) {
			filter(t, s.b.Gateway().Host, fmt.Sprintf("add chain ip fault in { type filter hook input priority 0; }; add rule ip fault in ip saddr %v udp dport 5871 drop", s.a.Gateway().Addr))
		},
		heals: func(t *testing.T, s *causeSite) { filter(t, s.b.Gateway().Host, "") },
	},
	{
		fault: "the packet filter of this gateway's machine refuses to send to the peer", here: "SendError",
		breaks: func(t *testing.T, s *causeSite) {
			filter(t, s.a.Gateway().Host, fmt.Sprintf("add chain ip fault out { type filter hook output priority 0; }; add rule ip fault out ip daddr %v udp dport 5871 drop", s.b.Gateway().Addr))
		},
		heals: func(t *testing.T, s *causeSite) { filter(t, s.a.Gateway().Host, "") },
	},
	{
		fault: "the two clusters disagree about the peer's networks", here: "RangesDisagree", there: "RangesDisagree",
		breaks: func(t *testing.T, s *causeSite) {
			edit(t, s.b, s.a, [2]string{`localNATPodCIDR: \S+`, "localNATPodCIDR: 100.64.0.0/16"}, [2]string{`localNATExternalCIDR: \S+`, "localNATExternalCIDR: 100.65.0.0/16"},
				[2]string{`^  externalCIDR: \S+`, "  externalCIDR: 100.65.0.0/16"}, [2]string{`169\.254\.0\.1: \S+`, "169.254.0.1: 100.65.0.1"})
		},
		heals: rejoin,
	},
	{
		fault: "the two clusters disagree about the peer's pods, and about nothing else", here: "RangesDisagree", there: "ProbeUnanswered",
		breaks: func(t *testing.T, s *causeSite) {
			edit(t, s.b, s.a, [2]string{`localNATPodCIDR: \S+`, "localNATPodCIDR: 100.66.0.0/16"})
		},
		heals: rejoin,
	},
	{
		fault: "this cluster has a wrong public key of the peer", here: "WrongKey", there: "WrongKey",
		breaks: func(t *testing.T, s *causeSite) { edit(t, s.a, s.b, [2]string{`publicKey: \S+`, "publicKey: " + aKey}) },
		heals:  rejoin,
	},
	{
		fault: "this gateway's machine has no route to the peer", here: "SendError",
		breaks: func(t *testing.T, s *causeSite) {
			ipCommand(t, s.a.Gateway().Host, "route", "add", "unreachable", s.b.Gateway().Addr.String())
		},
		heals: func(t *testing.T, s *causeSite) {
			ipCommand(t, s.a.Gateway().Host, "route", "del", "unreachable", s.b.Gateway().Addr.String())
		},
	},
}

// reasonAt returns the reason that a cluster's gateway reports for a peer.
func reasonAt(ctx context.Context, at, of *lab.Cluster) (reason, message string, err error) {
	text, err := at.Gateway().Get(ctx, "http://127.0.0.1:5873/status")
	if err != nil {
		return "", "", err
	}
	var status struct {
		Peers []struct{ ID, Reason, Message string }
	}
	if err := json.Unmarshal([]byte(text), &status); err != nil {
		return "", "", err
	}
	for _, p := range status.Peers {
		if p.ID == of.ID {
			return p.Reason, p.Message, nil
		}
	}
	return "", "", fmt.Errorf("%s does not know %s", at, of)
}

// One gateway has a peer with each of the faults at the same time. It must report a different
// reason for each, and no fault for the healthy peer.
func TestEachFaultOfAPeerHasItsOwnReason(t *testing.T) {
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	hosts.Need(t, "nft")
	t.Parallel()
	clusters := lab.Clusters(2 + len(causes))
	for i := range clusters {
		clusters[i].PodsPerNode = -1
	}
	l, err := lab.Up(t.Context(), lab.Spec{Name: lab.UniqueName("causes"), Clusters: clusters})
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the log of a's gateway:\n%s", l.GatewayTail(l.Clusters[0], 40))
		}
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	a, well := l.Clusters[0], l.Clusters[1]
	sites := make([]*causeSite, len(causes))
	for i := range causes {
		sites[i] = &causeSite{l, a, l.Clusters[2+i]}
		must(t, l.Join(a, sites[i].b, lab.JoinOptions{}))
	}
	must(t, l.Join(a, well, lab.JoinOptions{}))
	for i, c := range causes {
		if c.before && c.breaks != nil {
			c.breaks(t, sites[i])
		}
	}
	for _, x := range append([]*lab.Cluster{a, well}, running(sites)...) {
		must(t, l.StartGateway(t.Context(), x, binary))
	}
	is := func(at, of *lab.Cluster, want string) {
		t.Helper()
		eventually(t, fmt.Sprintf("%s of %s at %s", want, of, at), func() error {
			reason, message, err := reasonAt(t.Context(), at, of)
			if err == nil && reason != want {
				err = fmt.Errorf("%s: %s", reason, message)
			}
			return err
		})
	}
	is(a, well, "Connected")
	for i, c := range causes {
		if !c.before {
			is(a, sites[i].b, "Connected")
			is(sites[i].b, a, "Connected")
		}
	}
	begin := time.Now()
	for i, c := range causes {
		if !c.before {
			c.breaks(t, sites[i])
		}
	}
	for i, c := range causes {
		is(a, sites[i].b, c.here)
		if c.there != "" {
			is(sites[i].b, a, c.there)
		}
		t.Logf("%s: %s here, %s there, within %.0f s", c.fault, c.here, c.there, time.Since(begin).Seconds())
	}
	is(a, well, "Connected")
	is(well, a, "Connected")
	eventually(t, "all of them in isthmus status at once", func() error {
		out, err := a.Gateway().Command(t.Context(), binary, "status", "--gateway").CombinedOutput()
		if err == nil {
			return fmt.Errorf("exit code 0:\n%s", out)
		}
		for i, c := range causes {
			if !strings.Contains(string(out), "\n"+sites[i].b.Name+": "+c.here+": ") {
				return fmt.Errorf("it does not say %s of %s:\n%s", c.here, sites[i].b, out)
			}
		}
		return nil
	})
	for i, c := range causes {
		c.heals(t, sites[i])
	}
	for i := range causes {
		is(a, sites[i].b, "Connected")
		is(sites[i].b, a, "Connected")
	}
	eventually(t, "isthmus status with exit code 0 after healing", func() error {
		if out, err := a.Gateway().Command(t.Context(), binary, "status", "--gateway").CombinedOutput(); err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	})
}

// running returns the peers whose gateways start before the faults.
func running(sites []*causeSite) (all []*lab.Cluster) {
	for i, c := range causes {
		if !c.before {
			all = append(all, sites[i].b)
		}
	}
	return all
}
