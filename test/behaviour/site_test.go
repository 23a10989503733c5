package behaviour

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/testbin"
)

var must = expect.NoError

var (
	podsOfB  = netip.MustParsePrefix("10.50.32.0/20")
	podsOfC  = netip.MustParsePrefix("10.60.0.0/18")
	podsAatB = netip.MustParsePrefix("10.246.0.0/16")
	second   = netip.MustParseAddr("10.50.32.77") // second address of the server; the first is the address of b-pod1
)

// patience is the maximum time to wait for an expected event on a busy machine.
const patience = time.Minute

const serverPort, otherPort = 3478, 3479

// site is three joined clusters. serve adds the server.
type site struct {
	*lab.Lab
	server netip.Addr
}

func newSite(t *testing.T) *site {
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	binary, err := testbin.Isthmus(t.TempDir())
	must(t, err)
	l, err := lab.Up(t.Context(), lab.Spec{Name: lab.UniqueName("behaviour"), Clusters: []lab.ClusterSpec{
		{Name: "a", Nodes: 2}, {Name: "b", PodCIDR: podsOfB}, {Name: "c", PodCIDR: podsOfC},
	}})
	must(t, err)
	t.Cleanup(func() { must(t, l.Down()) })
	a, b, c := l.Cluster("a"), l.Cluster("b"), l.Cluster("c")
	must(t, l.Join(a, b, lab.JoinOptions{AtA: lab.View{Pod: podsOfB}, AtB: lab.View{Pod: podsAatB}}))
	must(t, l.Join(c, b, lab.JoinOptions{AtA: lab.View{Pod: podsOfB}, AtB: lab.View{Pod: podsOfC}}))
	must(t, l.StartGateways(t.Context(), binary))
	return &site{l, b.Pods[0].Addr}
}

// needCoturn skips the test if client and server are not installed.
func needCoturn(t *testing.T) {
	for _, c := range []string{"turnserver", "turnutils_natdiscovery"} {
		if _, err := exec.LookPath(c); err != nil {
			t.Skipf("needs the command %s: 'make deps' installs it", c)
		}
	}
}

// serve runs the server in a pod. The server gets a second address from the pod network of its
// node.
func (s *site) serve(t *testing.T, pod *lab.Pod) {
	route, err := pod.Node.Command(t.Context(), "ip", "route", "get", pod.Addr.String()).Output()
	must(t, err)
	dev := regexp.MustCompile(` dev (\S+)`).FindSubmatch(route)
	if dev == nil {
		t.Fatalf("no route to %v:\n%s", pod.Addr, route)
	}
	for _, c := range []*lab.Cmd{
		pod.Command(t.Context(), "ip", "address", "add", second.String(), "dev", "lo"),
		pod.Node.Command(t.Context(), "ip", "route", "add", second.String(), "via", pod.Addr.String(), "dev", string(dev[1]), "onlink"),
	} {
		_, err := c.Output()
		must(t, err)
	}
	dir := t.TempDir()
	log, err := os.Create(filepath.Join(dir, "log"))
	must(t, err)
	server := pod.Command(context.Background(), "turnserver", "-n", "--stun-only", "--no-auth", "--no-cli", "--no-tls", "--no-dtls", "--no-tcp",
		"--relay-threads=1", "--log-file=stdout", "--simple-log", "--pidfile="+filepath.Join(dir, "pid"), "--db="+filepath.Join(dir, "db"),
		"-L", pod.Addr.String(), "-L", second.String(), "-p", strconv.Itoa(serverPort), "--alt-listening-port="+strconv.Itoa(otherPort))
	server.Stdout, server.Stderr = log, log
	must(t, server.Start())
	t.Cleanup(func() {
		_ = server.Process.Kill()
		_ = server.Wait()
		log.Close()
		if text, err := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("turnserver: %v\n%s", err, text)
		}
	})
	c, err := s.Cluster("b").Pods[1].Dial(t.Context(), "udp", netip.AddrPortFrom(second, otherPort).String())
	must(t, err)
	defer c.Close()
	request := append([]byte{0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42}, "transaction1"...) // RFC 8489: a Binding request
	for deadline := time.Now().Add(patience); ; {
		_, _ = c.Write(request)
		must(t, c.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
		if n, err := c.Read(make([]byte, 1500)); n > 0 && err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the server does not answer")
		}
	}
}

// report is the result of one run of the client.
type report struct {
	text     string
	seen     []netip.AddrPort // its address as the server sees it, from each answer
	timeouts int              // requests without an answer within three seconds; the client repeats none
}

// concludes reports whether the client reached this conclusion.
func (r *report) concludes(conclusion string) bool {
	return strings.Contains(r.text, "\n"+conclusion+"!")
}

var reflexive = regexp.MustCompile(`reflexive addr: (\S+)`)

// discoverAgain runs discover up to five times, until exactly wantMissed requests have no answer.
// Any other number means that the machine was busy. The port increases by step with each attempt.
// If wantMissed is -1, discoverAgain runs discover once.
func (s *site) discoverAgain(ctx context.Context, from string, local, step uint16, wantMissed int, flags ...string) (r *report, port uint16, err error) {
	for again := range uint16(5) {
		port = local + step*again
		if r, err = s.discover(ctx, from, port, flags...); ctx.Err() != nil || wantMissed < 0 || err == nil && r.timeouts == wantMissed {
			break
		}
	}
	return r, port, err
}

// discover runs the client from an address and port of a host. Most of its time is spent
// waiting.
func (s *site) discover(ctx context.Context, from string, local uint16, flags ...string) (*report, error) {
	host, err := s.Host(from)
	if err != nil {
		return nil, err
	}
	addr, err := s.Lookup(host, from)
	if err != nil {
		return nil, err
	}
	flags = append(flags, "-L", addr.String(), "-l", strconv.Itoa(int(local)), "-p", strconv.Itoa(serverPort), s.server.String())
	out, err := host.Command(ctx, "turnutils_natdiscovery", flags...).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%s: turnutils_natdiscovery %v: %w\n%s", from, flags, err, out)
	}
	r := &report{text: string(out), timeouts: bytes.Count(out, []byte("receive timeout"))}
	for _, m := range reflexive.FindAllStringSubmatch(r.text, -1) {
		a, err := netip.ParseAddrPort(m[1])
		if err != nil {
			return nil, fmt.Errorf("%w in\n%s", err, out)
		}
		r.seen = append(r.seen, a)
	}
	return r, nil
}
