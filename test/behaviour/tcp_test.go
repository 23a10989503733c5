package behaviour

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// RFC 5382, REQ-2 and REQ-4, with the TCP of real kernels at both ends: a pod of b calls a node of a, which is behind NAPT
// and has not called yet. Its SYN is dropped in silence, not refused, so that it goes on trying; when the node calls too, from
// the port that the pod expects, SYNs cross and there is one connection.
func TestRFC5382SimultaneousOpenThroughNAPT(t *testing.T) {
	s := newSite(t)
	node, pod := s.Cluster("a").Nodes[1], s.Cluster("b").Pods[1]
	natIP := podsAatB.Addr()
	const nodePort, podPort, nobody = 41000, 42000, 41001

	type result struct {
		conn net.Conn
		err  error
	}
	call := func(from *lab.Host, local, remote netip.AddrPort, patience time.Duration) chan result {
		done := make(chan result, 1)
		go func() {
			d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(local), Timeout: patience}
			var r result
			r.err = from.Do(func() (err error) {
				r.conn, err = d.DialContext(context.Background(), "tcp4", remote.String())
				return err
			})
			done <- r
		}()
		return done
	}
	inVain := call(pod.Host, netip.AddrPortFrom(pod.Addr, 42001), netip.AddrPortFrom(natIP, nobody), 7*time.Second)
	there := call(pod.Host, netip.AddrPortFrom(pod.Addr, podPort), netip.AddrPortFrom(natIP, nodePort), 30*time.Second)
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		n, err := s.Metric(t.Context(), s.Cluster("a"), "isthmus_drops_total", `direction="inbound"`, `reason="no_flow"`)
		if must(t, err); n >= 2 { // the first SYN of both calls
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v packets were dropped as no_flow, want the SYNs of two calls", n)
		}
	}
	here := call(node.Host, netip.AddrPortFrom(node.Addr, nodePort), netip.AddrPortFrom(pod.Addr, podPort), 30*time.Second)
	ours, theirs := <-here, <-there
	must(t, errors.Join(ours.err, theirs.err))
	defer ours.conn.Close()
	defer theirs.conn.Close()
	if got, want := theirs.conn.RemoteAddr().String(), netip.AddrPortFrom(natIP, nodePort).String(); got != want {
		t.Errorf("the pod is connected to %s, want %s", got, want)
	}
	for _, c := range [][2]net.Conn{{ours.conn, theirs.conn}, {theirs.conn, ours.conn}} {
		must(t, errors.Join(c[0].SetDeadline(time.Now().Add(10*time.Second)), c[1].SetDeadline(time.Now().Add(10*time.Second))))
		_, err := c[0].Write([]byte("hello"))
		must(t, err)
		b := make([]byte, 5)
		if _, err := c[1].Read(b); err != nil || string(b) != "hello" {
			t.Fatalf("read %q, %v", b, err)
		}
	}
	r, timeout := <-inVain, net.Error(nil)
	if !errors.As(r.err, &timeout) || !timeout.Timeout() {
		t.Errorf("a call that nobody answers: %v, want nothing for 7 s", r.err)
	}
}
