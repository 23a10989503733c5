package gateway

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/cputime"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// startFlowLog starts a flow log, which runs until stop is called.
func startFlowLog(t *testing.T, c FlowLog) (l *flowLog, stop func()) {
	t.Helper()
	l, err := openFlowLog(c, func(a netip.Addr) fabric.Owner {
		return map[netip.Addr]fabric.Owner{
			netip.MustParseAddr("172.16.0.9"): {Node: "n1"}, netip.MustParseAddr("fd00::1"): {Pod: "shop/web", Node: "n2"},
		}[a]
	}, slog.New(slog.NewTextHandler(new(bytes.Buffer), nil)))
	if err != nil {
		t.Fatal(err)
	}
	done, ended := make(chan struct{}), make(chan struct{})
	l.setNames([]*fabric.GatewayPeer{{ID: "b", Name: "name of b"}})
	go func() { l.run(done); close(ended) }()
	return l, func() { close(done); <-ended }
}

func readFlowLog(t *testing.T, name string) (all []FlowRecord) {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		var r FlowRecord
		d := json.NewDecoder(strings.NewReader(line))
		d.DisallowUnknownFields()
		if err := d.Decode(&r); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		all = append(all, r)
	}
	return all
}

var closedFlow = natengine.FlowEvent{
	Change: natengine.FlowClosed, Kind: "napt", Proto: 6, End: natengine.FlowEvicted, Lasted: 1500 * time.Millisecond,
	Local: netip.MustParseAddrPort("172.16.0.9:4000"), Mapped: netip.MustParseAddrPort("10.71.0.0:4001"), Remote: netip.MustParseAddrPort("10.71.0.5:80"),
}

func TestFlowLogWritesOneJSONObjectPerLine(t *testing.T) {
	name := filepath.Join(t.TempDir(), "flows.json")
	l, stop := startFlowLog(t, FlowLog{File: name})
	engine := natengine.New(natengine.Config{})
	if err := engine.SetPeers([]natengine.Peer{{ID: "b", RemotePods: []netip.Prefix{netip.MustParsePrefix("10.71.0.0/18")},
		Pods: []natengine.Remap{{From: netip.MustParsePrefix("10.244.0.0/16"), To: netip.MustParsePrefix("10.246.0.0/16")}}}}); err != nil {
		t.Fatal(err)
	}
	ev := closedFlow
	ev.Peer = engine.Peers()[0]
	l.observe(ev)
	l.observe(natengine.FlowEvent{Change: natengine.FlowRefused, Direction: natengine.Inbound, Proto: 17, Drop: natengine.DropNoFlow,
		Local: netip.MustParseAddrPort("[fd00::1]:5"), Remote: netip.MustParseAddrPort("[fd00::2]:0")})
	l.observe(natengine.FlowEvent{Change: natengine.FlowRefused, Direction: natengine.Outbound, Proto: 17, Drop: natengine.DropNoPeer,
		Local: netip.MustParseAddrPort("[fd00::1]:5"), Remote: netip.MustParseAddrPort("[fd00::2]:0")})
	stop()
	all := readFlowLog(t, name)
	if len(all) != 3 || time.Since(all[0].Time) > time.Hour {
		t.Fatalf("%+v", all)
	}
	if r := all[0]; r.Seconds == nil || *r.Seconds != 1.5 {
		t.Errorf("%+v: want 1.5 seconds", r)
	}
	all[0].Seconds = nil
	for i, want := range []FlowRecord{
		{Event: "closed", Peer: "b", PeerName: "name of b", Kind: "napt", Protocol: "tcp", Local: "172.16.0.9:4000", LocalNode: "n1", Mapped: "10.71.0.0:4001", Remote: "10.71.0.5:80", Reason: "evicted"},
		{Event: "refused", Direction: "inbound", Protocol: "udp", Local: "[fd00::1]:5", Remote: "fd00::2", Reason: "no_flow"}, // as the peer sees it
		{Event: "refused", Direction: "outbound", Protocol: "udp", Local: "[fd00::1]:5", LocalPod: "shop/web", LocalNode: "n2", Remote: "fd00::2", Reason: "no_peer"},
	} {
		want.Time = all[i].Time
		if all[i] != want {
			t.Errorf("got %+v, want %+v", all[i], want)
		}
	}
}

// Events beyond the rate are left out and counted. Reporting an event never blocks.
func TestFlowLogOmitsAndCountsEventsBeyondItsRate(t *testing.T) {
	name := filepath.Join(t.TempDir(), "flows.json")
	l, stop := startFlowLog(t, FlowLog{File: name, PerSecond: 10})
	const events = 3 * flowQueue
	for range events {
		l.observe(closedFlow)
	}
	deadline := time.Now().Add(time.Minute)
	for {
		all, omitted, lines := readFlowLog(t, name), uint64(0), 0
		for _, r := range all {
			if omitted += r.Count; r.Event == "closed" {
				lines++
			}
		}
		if omitted > events-flowQueue-1000 && omitted < events {
			if lines > 1000 {
				t.Errorf("%d lines, though 10 a second are allowed", lines)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the log reports %d of %d events as omitted", omitted, events)
		}
		time.Sleep(50 * time.Millisecond)
	}
	stop()
}

func TestFlowLogReopensItsFileAfterRotation(t *testing.T) {
	name := filepath.Join(t.TempDir(), "flows.json")
	l, stop := startFlowLog(t, FlowLog{File: name})
	defer stop()
	if err := os.Rename(name, name+".1"); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(time.Minute)
	for {
		l.observe(closedFlow)
		if info, err := os.Stat(name); err == nil && info.Size() > 0 {
			if info.Mode().Perm() != 0o600 {
				t.Errorf("mode %v", info.Mode())
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("no new file after a minute")
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func TestGatewayFailsToStartIfTheFlowLogCannotBeOpened(t *testing.T) {
	_, err := openFlowLog(FlowLog{File: filepath.Join(t.TempDir(), "nowhere", "flows.json")}, nil, nil)
	if err == nil || !strings.HasPrefix(err.Error(), "flow log: open ") {
		t.Errorf("%v", err)
	}
}

// BenchmarkFlowLog measures the time of a packet in the engine, without a flow log and with one
// that writes to a file. There are four kinds of packets: of one known NAPT flow, from a pod, of a
// new flow each, and refused ones. Compare only results of the same run:
//
//	for i in 1 2 3 4 5 6; do go test -run '^$' -bench FlowLog ./gateway; done
func BenchmarkFlowLog(b *testing.B) {
	from := func(src string, i int) []byte {
		sport := uint16(1024 + i%60_000)
		return packettest.Build(packettest.IP{Src: netip.MustParseAddr(src).Next(), Dst: netip.MustParseAddr("10.71.0.5")}, packettest.UDP{SrcPort: sport, DstPort: 53})
	}
	for _, load := range []struct {
		name    string
		packets int
		packet  func(i int) []byte
	}{
		{"known", 1, func(i int) []byte { return from("172.16.0.1", i) }},
		{"pod", 1, func(i int) []byte { return from("10.244.1.1", i) }},
		{"new", 60_000, func(i int) []byte { return from("172.16.0.1", i) }},
		{"refused", 1, func(i int) []byte { return from("127.0.0.1", i) }},
	} {
		for _, on := range []FlowLog{{}, {Sample: 1}, {Sample: 100}} {
			name := "off"
			if on.Sample > 0 {
				name = fmt.Sprintf("1-in-%d", on.Sample)
			}
			b.Run(fmt.Sprintf("%s/log=%s", load.name, name), func(b *testing.B) {
				e := natengine.New(natengine.Config{MaxFlows: 10_000, MaxFlowsPerHost: 10_000})
				if err := e.SetPeers([]natengine.Peer{{ID: "b", RemotePods: []netip.Prefix{netip.MustParsePrefix("10.71.0.0/18")}, MSS: 1380,
					Pods: []natengine.Remap{{From: netip.MustParsePrefix("10.244.0.0/16"), To: netip.MustParsePrefix("10.246.0.0/16")}}}}); err != nil {
					b.Fatal(err)
				}
				if on.Sample > 0 {
					on.File = filepath.Join(b.TempDir(), "flows.json")
					l, err := openFlowLog(on, nil, slog.New(slog.DiscardHandler))
					if err != nil {
						b.Fatal(err)
					}
					done, ended := make(chan struct{}), make(chan struct{})
					l.setNames([]*fabric.GatewayPeer{{ID: "b", Name: "name of b"}})
					go func() { l.run(done); close(ended) }()
					defer func() { close(done); <-ended }()
					e.Observe(l.observe, on.Sample)
				}
				packets := make([][]byte, load.packets)
				for i := range packets {
					packets[i] = load.packet(i)
				}
				var v packet.View
				scratch := make([]byte, 64)
				before := cputime.Used(b)
				for i := 0; b.Loop(); i++ {
					p := scratch[:copy(scratch, packets[i%len(packets)])]
					if err := v.Parse(p, packet.ChecksumComplete); err != nil {
						b.Fatal(err)
					}
					e.Outbound(&v, time.Second)
				}
				b.ReportMetric(float64((cputime.Used(b)-before).Nanoseconds())/float64(b.N), "cpu-ns/packet")
			})
		}
	}
}

// The collectors' test data (test/otel) must be the lines that the gateway really writes.
func TestCollectorTestDataMatchesTheFlowLog(t *testing.T) {
	l, stop := startFlowLog(t, FlowLog{File: filepath.Join(t.TempDir(), "flows.json")})
	defer stop()
	opened, refused := closedFlow, closedFlow
	opened.Change, opened.Local = natengine.FlowOpened, netip.MustParseAddrPort("[fd00::1]:4000")
	refused.Change, refused.Drop, refused.Kind, refused.Mapped = natengine.FlowRefused, natengine.DropNoMapping, "", netip.AddrPort{}
	var b bytes.Buffer
	lines := json.NewEncoder(&b)
	records := []FlowRecord{l.record(opened), l.record(closedFlow), l.record(refused), {Event: "omitted", Count: 512}}
	for i, r := range records {
		r.Time = time.Date(2026, 11, 23, 3, 10, 11, i*200_000_100, time.UTC) // the first one has no fraction of a second
		if err := lines.Encode(r); err != nil {
			t.Fatal(err)
		}
	}
	const name = "testdata/flows.json"
	want, err := os.ReadFile(name)
	if err != nil || string(want) != b.String() {
		t.Errorf("%s (%v) has\n%sthe gateway writes\n%s", name, err, want, &b)
	}
}
