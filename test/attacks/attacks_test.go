// Package attacks runs every attack of docs/attacks.md against a fleet of three clusters. Each
// cluster has its own API server, manager, gateways and route agents:
//
//	a   the victim: three nodes; its gateways are Pods or, with -long, also on their nodes' network
//	b   honest, a peer of a and of c; its PodCIDR overlaps a's
//	c   the attacker's, with all keys and identities of a peer
//
// Pods of a and b ping each other during all attacks, and must not lose any packet.
//
// The rows of the table are in this package, each beside its test code. `go test -run Table
// -update` in this folder generates docs/attacks.md from the rows. Running the attacks needs
// root.
package attacks

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/test/internal/programs"
)

var (
	update = flag.Bool("update", false, "write docs/attacks.md")
	open   = flag.Bool("open", false, "run the attacks that still work, too")
	long   = flag.Bool("long", false, "run all once more against gateways that have the network of their nodes")
)

const patience = expect.Patience

// An attack is a row of the table with its test.
type attack struct {
	attacker, attempt string
	now               string // the defense, or the effect that remains
	open              bool   // the attack is still possible
	run               func(t *testing.T, s *site)
}

// A chapter is a group of attacks with a common preparation.
type chapter struct {
	title   string
	prepare func(t *testing.T, s *site) // nil: no preparation; prepare reverts its changes by functions that it passes to s.after
	attacks []attack
	closes  bool // the attacks stop traffic even if the defense works, so the talks end before this chapter
}

// chapters returns all chapters, ordered so that no chapter affects a later one. The last chapter
// stops traffic.
func chapters() []chapter {
	return []chapter{overlayChapter(), podChapter(), tunnelChapter(), inBandChapter(), claimChapter(), servicesChapter(), rightsChapter(), serverChapter(), insideChapter(),
		partingChapter(), closingChapter()}
}

// isthmus is the path of the isthmus program, and kube the folder of etcd and kube-apiserver.
// TestMain builds both.
var isthmus, kube string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if address := os.Getenv(asUnprivileged); address != "" {
		return hold(address)
	}
	return programs.Run(m, &isthmus, &kube)
}

func TestAttacksFail(t *testing.T) { runChapters(t, newSite(t, true)) }

// Gateways on their nodes' network (--host-network) must withstand the same attacks.
func TestAttacksFailOnTheNodeNetwork(t *testing.T) {
	if !*long {
		t.Skip("takes minutes: -long runs it")
	}
	runChapters(t, newSite(t, false))
}

func runChapters(t *testing.T, s *site) {
	t.Helper()
	for _, c := range chapters() {
		t.Run(c.title, func(t *testing.T) {
			if c.closes {
				s.endWithoutLoss(t)
			}
			s.undo = nil
			defer func() {
				for i := len(s.undo) - 1; i >= 0; i-- {
					s.undo[i](t)
				}
			}()
			if c.prepare != nil {
				c.prepare(t, s)
			}
			for _, a := range c.attacks {
				t.Run(a.attacker+": "+a.attempt, func(t *testing.T) {
					if a.open && !*open {
						t.Skip("STILL WORKS: " + a.now)
					}
					a.run(t, s)
					s.checkTraffic(t)
				})
			}
		})
	}
	s.endWithoutLoss(t)
}

// docs/attacks.md must list exactly the attacks that this package runs.
func TestTableInDocsListsTheAttacks(t *testing.T) {
	const file = "../../docs/attacks.md"
	want := table()
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(file)
	if err != nil || string(have) != want {
		t.Errorf("%s is not what the attacks say (%v): go test ./attacks -run Table -update, in test/", file, err)
	}
}

func table() string {
	var b strings.Builder
	b.WriteString(`# Attacks

For reviewers: the attacks that ` + "`test/attacks`" + ` runs, and their results. Written by ` + "`go test ./attacks -run Table -update`" + ` in test/.
All attacks run against one live fleet of three clusters: *a* is the victim, *b* an honest peer, *c* the attacker's cluster.
Meanwhile pods of a and b talk to each other and lose nothing. The gateways of a are Pods; with ` + "`-long`" + ` the same attacks run
against gateways with ` + "`--host-network`" + `. A node's *pod-side address* is its address in the pod network, such as cni0's.
[security.md](security.md) has the threat model, the defences and the remaining risks.
`)
	for _, c := range chapters() {
		fmt.Fprintf(&b, "\n## %s\n\n| attacker | attempt | result |\n|---|---|---|\n", c.title)
		for _, r := range rows(c.attacks) {
			if r.open {
				r.now = "**STILL WORKS:** " + r.now
			}
			fmt.Fprintf(&b, "| %s | %s | %s |\n", r.attacker, r.attempt, r.now)
		}
	}
	return b.String()
}

// rows joins consecutive attacks of one attacker that have the same result.
func rows(attacks []attack) (all []attack) {
	for _, a := range attacks {
		if last := len(all) - 1; last >= 0 && a.attacker == all[last].attacker && a.open == all[last].open && (a.now == all[last].now || a.now == "the same") {
			for _, verb := range []string{"advertises ", "its gateway is at "} {
				if strings.HasPrefix(all[last].attempt, verb) {
					a.attempt = strings.TrimPrefix(a.attempt, verb)
				}
			}
			all[last].attempt += "; " + a.attempt
			continue
		}
		all = append(all, a)
	}
	return all
}
