package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/natengine"
)

func TestCauseReportsTheFirstProblemToFix(t *testing.T) {
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	ago := func(seconds int) time.Time { return now.Add(-time.Duration(seconds) * time.Second) }
	lost := func(change func(*evidence)) evidence {
		e := evidence{
			now: now, check: check.Result{State: check.Disconnected, Since: ago(5)}, endpoint: netip.MustParseAddrPort("192.0.2.9:5871"), configured: "gw.example:5871",
			remote: ranges{netip.MustParsePrefix("10.246.0.0/16"), netip.MustParsePrefix("10.247.0.0/16")},
			local:  ranges{netip.MustParsePrefix("10.250.0.0/16"), netip.MustParsePrefix("10.251.0.0/16")},
		}
		change(&e)
		return e
	}
	session := func(e *evidence) { e.handshake, e.heard = ago(60), ago(1) }
	covered := map[string]bool{}
	for _, c := range []struct {
		name   string
		change func(*evidence)
		reason string
		says   string
	}{
		{"the peer answers", func(e *evidence) { session(e); e.check.State = check.Connected }, v1alpha1.CauseConnected, "answers"},
		{"the peer answers, and the path drops large packets", func(e *evidence) {
			session(e)
			e.check.State, e.check.Path = check.Connected, check.PathMTU{State: check.PathSearchComplete, Bytes: 1232, Ceiling: 1440}
		}, v1alpha1.CauseNarrowPath, "at most 1232 octets instead of 1440"},
		{"the peer answers, and the path drops packets of the base size", func(e *evidence) {
			session(e)
			e.check.State, e.check.Path = check.Connected, check.PathMTU{State: check.PathError, Bytes: 1200, Ceiling: 1440}
		}, v1alpha1.CausePathMTU, "which is 1260 octets"},
		{"configured a moment ago", func(e *evidence) { e.check.State = check.Connecting }, v1alpha1.CauseConnecting, "192.0.2.9:5871"},
		{"our kernel refuses the configuration", func(e *evidence) {
			session(e)
			e.check.State, e.failed = check.Connected, errors.New("ip link: no such device")
		}, v1alpha1.CauseNotApplied, "no such device"},
		{"the endpoint's name does not resolve", func(e *evidence) {
			e.endpoint, e.unresolved, e.check.State = netip.AddrPort{}, errors.New("resolving gw.example: no such host"), check.Connecting
		},
			v1alpha1.CauseEndpointName, "no such host"},
		{"a name server that is away does not matter to a peer that is found", func(e *evidence) { e.unresolved = errors.New("timeout") }, v1alpha1.CauseNoAnswer, "ever"},
		{"our firewall refuses outgoing messages", func(e *evidence) {
			session(e)
			e.signs.Unsent, e.signs.UnsentAt = fmt.Errorf("x: %w", unix.EPERM), ago(2)
		}, v1alpha1.CauseSendError, "packet filter"},
		{"no route to the peer", func(e *evidence) { e.signs.Unsent, e.signs.UnsentAt = unix.ENETUNREACH, ago(2) }, v1alpha1.CauseSendError, "network is unreachable"},
		{"no route to the peer a minute ago", func(e *evidence) { e.signs.Unsent, e.signs.UnsentAt = unix.ENETUNREACH, ago(60) }, v1alpha1.CauseNoAnswer, "ever"},
		{"a handshake for another key", func(e *evidence) { e.signs.OtherKey = ago(3) }, v1alpha1.CauseWrongKey, "of this cluster"},
		{"a handshake from another key", func(e *evidence) { e.signs.Refused = ago(3) }, v1alpha1.CauseWrongKey, "of the peer"},
		{"a handshake from another key beside a session", func(e *evidence) { session(e); e.signs.Refused = ago(3) }, v1alpha1.CauseProbeUnanswered, "`isthmus status --gateway`"},
		{"a handshake from another key after a session", func(e *evidence) { e.handshake, e.heard, e.signs.Refused = ago(60), ago(12), ago(3) }, v1alpha1.CauseWrongKey, "of the peer"},
		{"our answers to handshakes are lost", func(e *evidence) { e.signs.Answered, e.heard = ago(3), ago(3) }, v1alpha1.CauseAnswersLost, "drops UDP in that direction"},
		{"our answers to handshakes are lost while an older session lasts", func(e *evidence) { session(e); e.signs.Answered = ago(3) }, v1alpha1.CauseAnswersLost, "drops UDP in that direction"},
		{"the answer that made the session", func(e *evidence) { session(e); e.handshake, e.signs.Answered = ago(3), ago(3) }, v1alpha1.CauseProbeUnanswered, "arrive"},
		{"a handshake for another key through a Service", func(e *evidence) { e.alone, e.signs.RelayedOtherKey = true, ago(3) }, v1alpha1.CauseWrongKey, "our Service delivers handshakes for another public key than this gateway's"},
		{"a handshake from another key through a Service", func(e *evidence) {
			e.alone, e.handshake, e.heard, e.signs.RelayedRefused = true, ago(60), ago(12), ago(3)
		}, v1alpha1.CauseWrongKey, "because no peer here has their key"},
		{"somebody else's handshakes by way of a Service beside a session", func(e *evidence) { session(e); e.alone, e.signs.RelayedRefused = true, ago(3) }, v1alpha1.CauseProbeUnanswered, "arrive"},
		{"somebody else's by way of a Service, and answers that are lost", func(e *evidence) { e.signs.Answered, e.heard, e.signs.RelayedOtherKey = ago(3), ago(12), ago(3) }, v1alpha1.CauseAnswersLost, "drops UDP in that direction"},
		{"a handshake for another key through a Service, with two silent peers", func(e *evidence) { e.signs.RelayedOtherKey = ago(3) }, v1alpha1.CauseNoAnswer, "with a wrong key"},
		{"a handshake from another key through a Service, after a session", func(e *evidence) { e.handshake, e.heard, e.signs.RelayedRefused = ago(60), ago(12), ago(3) }, v1alpha1.CausePeerSilent, "through our Service"},
		{"nothing ever received", func(*evidence) {}, v1alpha1.CauseNoAnswer, "nothing has ever come from 192.0.2.9:5871"},
		{"nothing received since a session a minute ago", func(e *evidence) { e.handshake, e.heard = ago(60), ago(12) }, v1alpha1.CausePeerSilent, "since 11:59:48 UTC"},
		{"nothing received any more through a Service that hides the source", func(e *evidence) { e.handshake, e.heard, e.hidden = ago(60), ago(12), true }, v1alpha1.CausePeerSilent,
			"nothing has come from gw.example:5871 (our Service hides the source address of its packets) since"},
		{"our firewall refuses messages to such a Service", func(e *evidence) { e.hidden, e.signs.Unsent, e.signs.UnsentAt = true, unix.EPERM, ago(2) }, v1alpha1.CauseSendError, "send to 192.0.2.9:5871:"},
		{"nothing received since a session an hour ago", func(e *evidence) { e.handshake, e.heard = ago(3600), ago(3500) }, v1alpha1.CausePeerSilent, "since 11:01:40 UTC"},
		{"packets from outside the peer's networks", func(e *evidence) { session(e); e.source = ago(1) }, v1alpha1.CauseRangesDisagree, "the peer's networks; compare the TunnelEndpoints"},
		{"packets from and to wrong networks, while PINGs arrive", func(e *evidence) { session(e); e.check.Asked, e.source, e.destination = ago(2), ago(1), ago(1) },
			v1alpha1.CauseProbeUnanswered, "no answer to the connection check"},
		{"packets to outside our networks", func(e *evidence) { session(e); e.destination = ago(1) }, v1alpha1.CauseRangesDisagree, "this cluster's networks; compare the TunnelEndpoints"},
		{"a packet from outside the peer's networks a minute ago", func(e *evidence) { session(e); e.source = ago(60) }, v1alpha1.CauseProbeUnanswered, "source"},
		{"the peer answers, but its PINGs come from outside its networks", func(e *evidence) {
			session(e)
			e.check, e.source = check.Result{State: check.Connected, Since: ago(60), Asked: ago(11)}, ago(1)
		}, v1alpha1.CauseRangesDisagree, "the peer's PodCIDR; compare the TunnelEndpoints"},
		{"a packet from outside the peer's networks, while PINGs arrive", func(e *evidence) {
			session(e)
			e.check, e.source = check.Result{State: check.Connected, Since: ago(60), Asked: ago(3)}, ago(1)
		}, v1alpha1.CauseConnected, "answers"},
		{"a packet from outside the networks of a peer connected a moment ago", func(e *evidence) {
			session(e)
			e.check, e.source = check.Result{State: check.Connected, Since: ago(3)}, ago(1)
		}, v1alpha1.CauseConnected, "answers"},
		{"no PINGs arrive, and no packet is dropped", func(e *evidence) {
			session(e)
			e.check = check.Result{State: check.Connected, Since: ago(60)}
		}, v1alpha1.CauseConnected, "answers"},
		{"messages of an earlier session", func(e *evidence) { e.signs.Earlier = ago(1) }, v1alpha1.CauseNoAnswer, "of an earlier session come from 192.0.2.9:5871"},
		{"no answer for an unknown reason", session, v1alpha1.CauseProbeUnanswered, "or the log of Liqo's gateway"},
	} {
		e := lost(c.change)
		got := e.cause()
		if got.Reason != c.reason || !strings.Contains(got.Text, c.says) {
			t.Errorf("%s: %+v; want %s with %q", c.name, got, c.reason, c.says)
		}
		if got.Reason == v1alpha1.CauseProbeUnanswered && (strings.Contains(got.Text, "disagree") || !strings.HasPrefix(got.Text, "unanswered: ")) {
			t.Errorf("%s: the text gives a reason: %s", c.name, got.Text)
		}
		covered[c.reason] = true
	}
	for _, reason := range v1alpha1.Causes {
		if !covered[reason] {
			t.Errorf("%s is never the cause", reason)
		}
	}
	if len(covered) != len(v1alpha1.Causes) || !slices.Contains(v1alpha1.Causes, v1alpha1.CauseConnected) {
		t.Errorf("%v; want %v", covered, v1alpha1.Causes)
	}
}

func TestCauseIgnoresErrorsAboutOtherPeers(t *testing.T) {
	failed := errors.Join(fmt.Errorf("peer 1: its public key is the key of this gateway"), errors.Join(errors.New("peer 22: x")))
	for id, want := range map[string]string{"1": "peer 1: its public key is the key of this gateway", "2": "", "22": "peer 22: x"} {
		got := ""
		if err := failedOf(id, failed); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", id, got, want)
		}
	}
	if err := failedOf("1", errors.New("ip route: no such device")); err == nil {
		t.Error("an error that names no peer does not concern the peer")
	}
	if err := failedOf("1", nil); err != nil {
		t.Error(err)
	}
}

func TestOutageOfASinglePeerIsRecognized(t *testing.T) {
	g := newTestLoop(t, alphaBravo, charlie)
	for _, tc := range []struct{ first, second check.State }{{check.Connected, check.Connected}, {check.Disconnected, check.Connected}, {check.Connected, check.Disconnected}, {check.Disconnected, check.Connecting}} {
		g.tunnels[0].setStates(map[string]check.State{g.now.peers[0].ID: tc.first, g.now.peers[1].ID: tc.second})
		for i, v := range g.views(g.now, g.engine.Stats()) {
			lost, other := []check.State{tc.first, tc.second}[i], []check.State{tc.second, tc.first}[i]
			if lost != check.Connected && v.alone != (other == check.Connected) {
				t.Errorf("%v: alone %v", tc, v.alone)
			}
		}
	}
}

func TestDropTimesAreRecordedAndDeletedWithTheirPeer(t *testing.T) {
	g := newTestLoop(t, alphaBravo, charlie)
	begin := time.Now()
	g.tick(begin)
	if s := g.status(0); len(s.Peers[0].Drops) != 0 {
		t.Fatalf("drops before any: %+v", s.Peers[0].Drops)
	}
	g.send(t, natengine.Inbound, "10.246.1.1", "10.99.0.1", 1, 2) // the destination is not in our networks
	g.send(t, natengine.Outbound, "10.244.1.1", "10.99.0.1", 1, 2)
	if d := g.status(0).Peers[0].Drops; len(d) != 1 || d[0].LastSeen == nil || time.Since(*d[0].LastSeen) > time.Hour {
		t.Errorf("%+v before the first look; want the current time", d)
	}
	first := begin.Add(time.Second)
	g.tick(first)
	g.tick(first.Add(time.Minute))
	for _, drops := range [][]DropStatus{g.status(0).Peers[0].Drops, g.status(0).Drops} {
		if len(drops) != 1 || drops[0].LastSeen == nil || !drops[0].LastSeen.Equal(first) {
			t.Errorf("%+v; want one, last seen at %v", drops, first)
		}
	}
	g.send(t, natengine.Inbound, "10.246.1.1", "10.99.0.1", 1, 2)
	g.tick(first.Add(time.Hour))
	if d := g.status(0).Peers[0].Drops; len(d) != 1 || d[0].LastSeen == nil || !d[0].LastSeen.Equal(first.Add(time.Hour)) {
		t.Errorf("%+v; want the time of the second", d)
	}
	g.put0(t, charlie)
	g.tick(first.Add(2 * time.Hour))
	if n := len(g.drops.seen); n != 1 {
		t.Errorf("%d counters are remembered; want that of no peer alone", n)
	}
}

func TestMetricShowsTheReasonWhileAPeerIsDisconnected(t *testing.T) {
	g := newTestLoop(t, alphaBravo)
	const series = "isthmus_peer_reason{"
	if text := g.scrape(t); !strings.Contains(text, series+`peer="`+bravo+`",reason="`+v1alpha1.CauseConnecting+`"} 1`+"\n") {
		t.Errorf("no reason of a peer that has not answered:\n%s", text)
	}
	g.tunnels[0].setStates(map[string]check.State{bravo: check.Connected})
	if text := g.scrape(t); strings.Contains(text, series) {
		t.Error("a reason of a peer that answers")
	}
	g.now.applyErr = errors.New("ip link: no such device")
	g.publish()
	if text := g.scrape(t); !strings.Contains(text, series+`peer="`+bravo+`",reason="`+v1alpha1.CauseNotApplied+`"} 1`+"\n") {
		t.Error("no reason where the gateway's machine lacks something")
	}
}

func TestTraceReportsAPeerThatIsDown(t *testing.T) {
	g := newTestLoop(t, alphaBravo)
	trace := func() (steps []TraceStep) {
		w := httptest.NewRecorder()
		g.statusHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/trace?src=10.244.1.1&dst=10.246.1.1&protocol=tcp", nil))
		if err := json.Unmarshal(w.Body.Bytes(), &steps); err != nil || w.Code != 200 || len(steps) != 1 {
			t.Fatal(w.Code, err, w.Body)
		}
		return steps
	}
	for state, want := range map[check.State]string{check.Disconnected: v1alpha1.CauseNoAnswer + ": nothing has ever come from", check.Connected: ""} {
		g.tunnels[0].setStates(map[string]check.State{bravo: state})
		if s := trace()[0]; s.PeerName != "bravo" || s.Drop != "" || !strings.HasPrefix(s.PeerDown, want) || want == "" && s.PeerDown != "" {
			t.Errorf("%s: %+v", state, s)
		}
	}
}
