package verify

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func ends(cluster string, nodes int) (all []End) {
	for i, place := range []string{gatewayNode, other}[:nodes] {
		for j, network := range []string{podNetwork, hostNetwork} {
			all = append(all, End{Cluster: cluster, Network: network, Place: place, Node: fmt.Sprint(i), Seen: netip.AddrFrom4([4]byte{10, 0, byte(i), byte(j)})})
		}
	}
	return all
}

// Every sender sends to every pod of the other cluster, with each protocol and size. No Pod sends
// to a host of the other cluster, or within its own cluster.
func TestThePlanHasEveryPairInBothDirections(t *testing.T) {
	a, b := ends("a", 2), ends("b", 1)
	seen := map[Check]bool{}
	for _, c := range Plan(a, b, Only{}, nil) {
		if seen[c] || c.To.Network != podNetwork || c.From.Cluster == c.To.Cluster {
			t.Errorf("%+v", c)
		}
		seen[c] = true
	}
	each := len(Sizes[TCP]) + len(Sizes[UDP]) + len(Sizes[ICMP])
	if want := each * (4*1 + 2*2); len(seen) != want {
		t.Errorf("%d checks, want %d", len(seen), want)
	}
}

func TestParseOnlySelectsTheNamedChecks(t *testing.T) {
	a, b := ends("a", 2), ends("b", 2)
	for words, keeps := range map[string]func(Check) bool{
		"tcp":         func(c Check) bool { return c.Protocol == TCP },
		"tcp,udp":     func(c Check) bool { return c.Protocol != ICMP },
		"pod":         func(c Check) bool { return c.From.Network == podNetwork },
		"out":         func(c Check) bool { return c.From.Cluster == "a" },
		"in,host,udp": func(c Check) bool { return c.From == b[1] || c.From == b[3] },
	} {
		only, err := ParseOnly(strings.Split(words, ","))
		if err != nil {
			t.Fatal(err)
		}
		got := Plan(a, b, only, nil)
		if len(got) == 0 || len(got) == len(Plan(a, b, Only{}, nil)) {
			t.Errorf("%s: %d checks", words, len(got))
		}
		for _, c := range got {
			if !keeps(c) {
				t.Errorf("%s keeps %+v", words, c)
			}
		}
	}
	if _, err := ParseOnly([]string{"tpc"}); err == nil || !strings.Contains(err.Error(), `"tpc": want tcp`) {
		t.Errorf("%v", err)
	}
	for _, c := range Plan(a, b, Only{}, map[string][]int{UDP: {9000}}) {
		if c.Protocol == UDP && c.Size != 9000 {
			t.Errorf("%+v", c)
		}
	}
}

// A report states the octets that were really sent, and the Answer to the smallest question
// fits.
func TestProbesBelowTheMinimumSizeAreNotPlanned(t *testing.T) {
	sizes := map[string][]int{}
	for protocol := range Sizes {
		sizes[protocol] = []int{1, 2, 9000}
	}
	got := map[string][]int{}
	for _, c := range Plan(ends("a", 1)[:1], ends("b", 1)[:1], Only{directions: []string{"out"}}, sizes) {
		got[c.Protocol] = append(got[c.Protocol], c.Size)
	}
	if want := map[string][]int{TCP: {1, 2, 9000}, UDP: {96, 9000}, ICMP: {16, 9000}}; !maps.EqualFunc(got, want, slices.Equal) {
		t.Errorf("%v, want %v", got, want)
	}
	longest := seenBy(net.UDPAddrFromAddrPort(netip.MustParseAddrPort("[fd00:1111:2222:3333:4444:5555:6666:7777]:65535")))
	if cookie+len(longest) > minSize[UDP] {
		t.Errorf("%s: %d octets in %d", longest, len(longest), minSize[UDP]-cookie)
	}
}

func TestTargetsAreProbedByPingOrConnection(t *testing.T) {
	only, err := ParseOnly([]string{"pod"})
	if err != nil {
		t.Fatal(err)
	}
	a := ends("a", 2)
	got := Targets(a, only, []Target{{Host: "10.9.0.1"}, {Host: "web.shop.svc:80"}, {Host: "2001:db8::1"}, {Host: "[2001:db8::1]:443"}})
	if len(got) != 4*2 {
		t.Fatalf("%d checks", len(got))
	}
	for i, c := range got {
		if want := []string{ICMP, Connect, ICMP, Connect}[i/2]; c.Protocol != want || c.From.Network != podNetwork || c.To != (End{}) || c.receiver() != c.Target {
			t.Errorf("%+v, want %s", c, want)
		}
	}
}

// serve runs Serve on free ports.
func serve(t *testing.T) (echo, control uint16) {
	t.Helper()
	for range 10 { // another process may take a port in the meantime
		for _, p := range []*uint16{&echo, &control} {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			*p = uint16(l.Addr().(*net.TCPAddr).Port)
			defer l.Close()
			l.Close()
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- Serve(ctx, echo, control, 0) }()
		for {
			resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/ready", control))
			if err == nil {
				resp.Body.Close()
				t.Cleanup(func() {
					cancel()
					if err := <-done; err != nil {
						t.Error(err)
					}
				})
				return echo, control
			}
			select {
			case <-done:
			case <-time.After(10 * time.Millisecond):
				continue
			}
			break
		}
		cancel()
	}
	t.Fatal("no ports")
	return 0, 0
}

func request(t *testing.T, control uint16, requests []Request) (answers []Answer) {
	t.Helper()
	body, err := json.Marshal(requests)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Post(fmt.Sprintf("http://127.0.0.1:%d/run", control), "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&answers); err != nil || len(answers) != len(requests) {
		t.Fatalf("%d answers: %v", len(answers), err)
	}
	return answers
}

func TestProbesOfEverySizeAreAnswered(t *testing.T) {
	echo, control := serve(t)
	var requests []Request
	for protocol, sizes := range Sizes {
		if protocol == ICMP && os.Geteuid() != 0 {
			continue // needs raw sockets
		}
		for _, size := range append([]int{0, 1}, sizes...) {
			requests = append(requests, Request{Protocol: protocol, Host: "127.0.0.1", Port: echo, Size: size})
		}
	}
	for i, a := range request(t, control, requests) {
		if r := requests[i]; a.Error != "" || a.Tries < 1 || a.Seconds <= 0 || (r.Protocol != ICMP) != (a.SeenAs == netip.MustParseAddr("127.0.0.1")) {
			t.Errorf("%+v: %+v", r, a)
		}
	}
	requests = []Request{{Protocol: Connect, Host: "localhost", Port: echo}}
	if os.Geteuid() == 0 {
		requests = append(requests, Request{Protocol: ICMP, Host: "127.0.0.1", Size: 56})
	}
	for _, a := range request(t, control, requests) {
		if a.Error != "" {
			t.Errorf("%+v", a)
		}
	}
	for _, a := range request(t, control, []Request{
		{Protocol: Connect, Host: "nowhere.invalid", Port: 80, Once: true},
		{Protocol: UDP, Host: "127.0.0.1", Port: 9, Once: true}, // no process listens at this port
		{Protocol: "sctp", Host: "127.0.0.1", Port: echo}, {Protocol: TCP, Host: "127.0.0.1", Port: echo, Size: maxSize + 1}, {Protocol: TCP, Host: "127.0.0.1", Port: echo, Size: -1},
	}) {
		if a.Error == "" {
			t.Errorf("%+v", a)
		}
	}
}

// A transfer that makes progress is not abandoned, however slow the machine is. A transfer that
// stops is abandoned.
func TestASlowTransferIsNotReportedLost(t *testing.T) {
	const size = 160 << 10
	for _, tc := range []struct {
		name  string
		pause time.Duration // pause before each of ten parts of the answer
		limit int           // octets of the answer that are sent
		want  string        // part of the error; empty: none
	}{
		{"slow", 1500 * time.Millisecond, 1 << 20, ""},
		{"too slow", 2500 * time.Millisecond, 1 << 20, "too slow: about "},
		{"stands still", 0, size / 2, "too slow: about "},
		{"nothing comes back", 0, 0, "i/o timeout"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				here, there := net.Pipe()
				done := make(chan struct{})
				go func() {
					defer close(done)
					defer there.Close()
					payload, err := readPiece(there)
					if err != nil {
						t.Error(err)
						return
					}
					var answer bytes.Buffer
					_ = writePiece(&answer, []byte("{}"))
					_ = writePiece(&answer, payload)
					for b := answer.Next(min(tc.limit, answer.Len())); len(b) > 0; {
						time.Sleep(tc.pause)
						n, err := there.Write(b[:min(len(b), size/10+1)])
						if b = b[n:]; err != nil {
							return // the client has given up
						}
					}
					_, _ = there.Read(make([]byte, 1)) // wait until the client closes
				}()
				_, err := exchange(here, size)
				here.Close()
				<-done
				if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
					t.Errorf("after %d octets: %v; want %q", size, err, tc.want)
				}
			})
		})
	}
}

// Anybody can reach an echo. So it must not trust a length, and must not send more than it
// received.
func TestEchoSendsNoMoreThanItReceived(t *testing.T) {
	echo, _ := serve(t)
	addr := fmt.Sprintf("127.0.0.1:%d", echo)
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(binary.BigEndian.AppendUint32(nil, 0xffffffff)); err != nil {
		t.Fatal(err)
	}
	if b, _ := io.ReadAll(c); len(b) != 0 {
		t.Errorf("%d octets for nothing", len(b))
	}
	u, err := net.Dial("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	for _, n := range []int{1, cookie, cookie + 1, cookie + 5} { // too short to be answered: the first two
		if _, err := u.Write(append([]byte{question}, make([]byte, n-1)...)); err != nil {
			t.Fatal(err)
		}
	}
	b := make([]byte, 1000)
	for _, want := range []int{cookie + 1, cookie + 5} {
		if err := u.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if n, err := u.Read(b); err != nil || n != want {
			t.Errorf("%d octets, %v; want %d", n, err, want)
		}
	}
}

// fakeSocket is a socket with datagrams to read, which records the datagrams that are written.
type fakeSocket struct {
	net.PacketConn
	from [][2]string // address and payload of each datagram
	sent [][2]string
}

func (*fakeSocket) LocalAddr() net.Addr {
	return net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.IPv6Unspecified(), echoPort))
}

func (h *fakeSocket) ReadFrom(b []byte) (int, net.Addr, error) {
	if len(h.from) == 0 {
		return 0, nil, io.EOF
	}
	one := h.from[0]
	h.from = h.from[1:]
	return copy(b, one[1]), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(one[0])), nil
}

func (h *fakeSocket) WriteTo(b []byte, to net.Addr) (int, error) {
	h.sent = append(h.sent, [2]string{to.String(), string(b)})
	return len(b), nil
}

// A datagram with a forged source must not make two echoes answer each other for ever, whether
// they use echoPort or an address translation has changed the port.
func TestAnEchoDoesNotAnswerAnEcho(t *testing.T) {
	request := string([]byte{question | 5}) + strings.Repeat("x", 100)
	c := &fakeSocket{from: [][2]string{
		{"10.0.0.1:7468", request}, {"[::ffff:10.0.0.1]:7468", request}, {"[fd00::1]:7468", request}, // the source looks like an echo
		{"10.0.0.1:40000", request}, {"[fd00::1]:40001", request},
	}}
	if err := echoUDP(c); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if len(c.sent) != 2 || c.sent[0][0] != "10.0.0.1:40000" || c.sent[1][0] != "[fd00::1]:40001" {
		t.Fatalf("%q", c.sent)
	}
	answers := &fakeSocket{from: c.sent}
	if err := echoUDP(answers); !errors.Is(err, io.EOF) || len(answers.sent) != 0 {
		t.Errorf("%v: answers are answered: %q", err, answers.sent)
	}
}

func TestReportIsPrintedAsTableAndJUnit(t *testing.T) {
	a, b := ends("a", 1), ends("b\x1b[31m", 1)
	r := &Report{Local: "a", Remote: "b", At: time.Unix(0, 0)}
	r.add(Result{Check{From: a[0], To: b[0], Protocol: UDP, Size: 100}, Answer{Seconds: 0.0012, Tries: 1, SeenAs: netip.MustParseAddr("10.9.0.1")}, ""},
		Result{Check{From: a[1], To: b[0], Protocol: ICMP, Size: 56}, Answer{Seconds: 0.002, Tries: 2}, ""},
		Result{Check{From: b[0], To: a[0], Protocol: TCP, Size: 1000}, Answer{Error: "no answer\x1b[0m within 3s", Tries: 3}, ""},
		Result{Check{From: b[0], To: a[0], Protocol: TCP, Size: 1000}, Answer{}, "API server\x1b[0m away"})
	var table, junit bytes.Buffer
	if err := r.Print(&table); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"1.2ms", "10.9.0.1", "ok, attempt 2", `no answer\u001b[0m within 3s`, "4 checks, 1 failed, 1 unknown", `unknown: API server\u001b[0m away`} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("no %q in\n%s", want, &table)
		}
	}
	if err := r.JUnit(&junit); err != nil {
		t.Fatal(err)
	}
	var suite struct {
		Tests    int `xml:"tests,attr"`
		Failures int `xml:"failures,attr"`
		Errors   int `xml:"errors,attr"`
		Cases    []struct {
			Name    string `xml:"name,attr"`
			Failure *struct {
				Message string `xml:"message,attr"`
			} `xml:"failure"`
			Error *struct{} `xml:"error"`
		} `xml:"testcase"`
	}
	if err := xml.Unmarshal(junit.Bytes(), &suite); err != nil {
		t.Fatalf("%v\n%s", err, &junit)
	}
	if suite.Tests != 4 || suite.Failures != 1 || suite.Errors != 1 || len(suite.Cases) != 4 || suite.Cases[3].Error == nil || suite.Cases[3].Failure != nil || suite.Cases[2].Failure == nil || suite.Cases[0].Failure != nil {
		t.Errorf("%s", &junit)
	}
}

// If a Pod may not send pings, that is no failure of the path that its TCP and UDP packets use.
func TestForbiddenPingsAreLeftOut(t *testing.T) {
	const why = "Pod web-0: it may not send them"
	may, mayNot := End{Cluster: "a", Pod: "shop/web-1"}, End{Cluster: "a", Pod: "shop/web-0"}
	unable := func(c Check) Result {
		return Result{Check: c, Answer: Answer{Unable: "it may not send them"}, Unknown: why}
	}
	results := []Result{
		{Check: Check{From: may, Protocol: ICMP}}, unable(Check{From: mayNot, Protocol: ICMP, Size: 56}), unable(Check{From: mayNot, Protocol: ICMP, Size: 1300}),
		{Check: Check{From: mayNot, Protocol: UDP}}, unable(Check{From: mayNot, Protocol: ICMP, Target: "10.80.0.1", What: "mapped address"}), // its target can only be pinged
		unable(Check{From: mayNot, Protocol: ICMP, Target: "192.0.2.1"}), // a person requested this target
	}
	some, leftOut := withoutUnable(results, Only{})
	r := &Report{LeftOut: leftOut}
	r.add(some...)
	if r.Checks != 4 || r.Unknown != 2 || some[2].What != "mapped address" || some[3].Target != "192.0.2.1" || !slices.Equal(leftOut, []string{"pings: " + why}) {
		t.Errorf("%+v", r)
	}
	var b strings.Builder
	if err := r.Print(&b); err != nil {
		t.Error(err)
	}
	if !strings.HasSuffix(b.String(), "4 checks, 0 failed, 2 unknown\nleft out: pings: "+why+"\n") {
		t.Error(b.String())
	}
	b.Reset()
	if err := r.JUnit(&b); err != nil {
		t.Error(err)
	}
	for _, want := range []string{`tests="5" failures="0" errors="2" skipped="1"`, `<skipped message="pings: ` + why + `">`} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %s in\n%s", want, &b)
		}
	}
	selected, err := ParseOnly([]string{ICMP, UDP})
	if err != nil {
		t.Fatal(err)
	}
	if some, leftOut := withoutUnable(results, selected); len(some) != len(results) || leftOut != nil {
		t.Errorf("asked for: %d of %d, %v", len(some), len(results), leftOut)
	}
}

func TestLineSummarizesLosses(t *testing.T) {
	a, b := ends("a", 1)[0], ends("b", 1)[0]
	if got := Line([]Loss{{From: a, To: b, Sent: 10}}); got != "10 sent, 0 lost (0.00 %)" {
		t.Error(got)
	}
	got := Line([]Loss{{From: a, To: b, Sent: 10}, {From: b, To: a, Sent: 10, Lost: 1, Last: time.Unix(0, 0).UTC(), Why: "gone"}})
	if got != "20 sent, 1 lost (5.00 %), last 00:00:00 from b: pod, gateway's node to a: pod, gateway's node: gone" {
		t.Error(got)
	}
	got = Line([]Loss{{From: a, To: b, Sent: 10, NotAsked: 2, WhyNot: "away"}, {From: b, To: a, Sent: 10}})
	if got != "20 sent, 0 lost (0.00 %), 2 not requested: away" {
		t.Error(got)
	}
}

// A roundTripper is an http.RoundTripper in place of the connection to a Pod.
type roundTripper func(*http.Request) (*http.Response, error)

func (w roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return w(r) }

// healthyPod is the connection to a Pod whose requests are all answered.
func healthyPod(r *http.Request) (*http.Response, error) {
	var requests []Request
	if err := json.NewDecoder(r.Body).Decode(&requests); err != nil {
		return nil, err
	}
	text, err := json.Marshal(make([]Answer, len(requests)))
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(text)), Request: r}, err
}

// lostPod is the connection to a Pod whose node was powered off.
func lostPod(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// twoSites returns two clusters with one Pod each, and the checks between them.
func twoSites(a, b roundTripper) (sites [2]*site, checks []Check) {
	for i, w := range []roundTripper{a, b} {
		end := ends(string(rune('a'+i)), 1)[0]
		sites[i] = &site{pods: []*member{{End: end, name: "verify-" + end.Cluster, http: &http.Client{Transport: w}}}}
	}
	return sites, Plan(sites[0].ends(), sites[1].ends(), Only{}, nil)
}

func TestPodOnALostNodeIsNotAwaitedForever(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sites, checks := twoSites(healthyPod, lostPod)
		start := time.Now()
		defer func() {
			if took := time.Since(start); took > time.Minute {
				t.Errorf("it took %v", took)
			}
		}()
		for _, r := range send(t.Context(), sites, checks) {
			if unknown := r.Unknown != ""; unknown != (r.From.Cluster == "b") || r.Error != "" {
				t.Errorf("%+v", r)
			}
		}
	})
}

// While one Pod does not answer requests, all others continue to send each second.
func TestOtherPodsContinueWhenANodeIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sites, checks := twoSites(healthyPod, lostPod)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second+time.Millisecond)
		defer cancel()
		reports := 0
		var last []Loss
		watch(ctx, sites, pairs(checks), func(l []Loss) { reports, last = reports+1, l })
		if reports < 100 || len(last) != 2 || last[0].Sent < 100 || last[0].Lost != 0 {
			t.Errorf("told %d times: %+v", reports, last)
		}
		if second := last[1]; second.Sent != 0 || second.Lost != 0 || second.NotAsked < 10 || second.WhyNot == "" {
			t.Errorf("of the Pod that is gone: %+v", second)
		}
	})
}

// Interrupting a continuous run is no error, unless Pods cannot be removed.
func TestInterruptingAContinuousRunIsNotAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sites, _ := twoSites(healthyPod, healthyPod)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		sent := 0
		err := verify(ctx, sites, [2][]Target{}, Options{Continuous: func(l []Loss) { sent = l[0].Sent }}, new(Report))
		if err != nil || sent < 9 {
			t.Errorf("%v, %d sent", err, sent)
		}
		if err := verify(ctx, sites, [2][]Target{}, Options{Report: func(string) {}}, new(Report)); err == nil {
			t.Error("an interrupted run says that it is whole")
		}
	})
}

func TestCheckPodsAcceptsOnlyValidUniqueNames(t *testing.T) {
	for text, good := range map[string]bool{"shop/web-0": true, "shop/web-0,db/web-0": true, "web-0": false, "/web-0": false, "shop/": false, "shop/web/0": false, "a/b,a/b": false, "Shop/web": false} {
		if err := CheckPods(strings.Split(text, ",")); (err == nil) != good {
			t.Errorf("%s: %v", text, err)
		}
	}
	if got := (End{Cluster: "a", Pod: "shop/web-0"}).String(); got != "a: shop/web-0" {
		t.Error(got)
	}
}

// The container added to a given Pod cannot be deleted. So it ends when it gets the request to
// end, or gets no request for a while.
func TestProbeEndsOnRequestOrWhenIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sent time.Time
		begin := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		alive := afterIdle(time.Minute, func() { sent = time.Now(); cancel() })
		time.Sleep(50 * time.Second)
		alive()
		<-ctx.Done()
		if got := sent.Sub(begin); got != 110*time.Second {
			t.Errorf("ended after %v", got)
		}
	})
	_, control := serve(t)
	for {
		resp, err := http.Post(fmt.Sprintf("http://127.0.0.1:%d/end", control), "", nil)
		if err != nil {
			return // the server has ended
		}
		resp.Body.Close()
	}
}

func TestAnInterruptedWaitIsReported(t *testing.T) {
	last := errors.New("ContainerCreating")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := waitError(ctx, last); !errors.Is(err, context.Canceled) || !errors.Is(err, last) {
		t.Error(err)
	}
	late, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Hour))
	defer cancel()
	if err := waitError(late, last); !errors.Is(err, last) || errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}
