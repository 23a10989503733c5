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

// RFC 5382, REQ-2 and REQ-4, with TCP of real kernels at both ends. A pod of b connects to a node
// of a, which is behind NAPT and has not sent a packet yet. The gateway must drop the pod's SYN
// without an answer, so that the pod repeats it. Then the node connects to the pod, from the port
// to which the pod connects. The two SYNs must result in one connection.
func TestRFC5382SimultaneousOpenSucceedsThroughNAPT(t *testing.T) {
	s := newSite(t)
	node, pod := s.Cluster("a").Nodes[1], s.Cluster("b").Pods[1]
	natIP := podsAatB.Addr()
	const nodePort, podPort, nobody = 41000, 42000, 41001

	type result struct {
		conn net.Conn
		err  error
	}
	call := func(from *lab.Host, local, remote netip.AddrPort, most time.Duration) chan result {
		done := make(chan result, 1)
		go func() {
			d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(local), Timeout: most}
			var r result
			r.err = from.Do(func() (err error) {
				r.conn, err = d.DialContext(context.Background(), "tcp4", remote.String())
				return err
			})
			done <- r
		}()
		return done
	}
	dropped := func(least float64) (n float64) {
		for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
			var err error
			n, err = s.Metric(t.Context(), s.Cluster("a"), "isthmus_drops_total", `direction="inbound"`, `reason="no_flow"`)
			if must(t, err); n >= least {
				return n
			}
			if time.Now().After(deadline) {
				t.Fatalf("%v packets were dropped as no_flow, want the SYNs of calls: %v", n, least)
			}
		}
	}
	// The calls are made one after the other, so that a repeated SYN of one call cannot be mistaken
	// for a SYN of the other.
	there := call(pod.Host, netip.AddrPortFrom(pod.Addr, podPort), netip.AddrPortFrom(natIP, nodePort), 3*patience)
	dropped(1)
	here := call(node.Host, netip.AddrPortFrom(node.Addr, nodePort), netip.AddrPortFrom(pod.Addr, podPort), 3*patience)
	ours, theirs := <-here, <-there
	must(t, errors.Join(ours.err, theirs.err))
	before := dropped(1)
	inVain := call(pod.Host, netip.AddrPortFrom(pod.Addr, 42001), netip.AddrPortFrom(natIP, nobody), 7*time.Second)
	defer ours.conn.Close()
	defer theirs.conn.Close()
	if got, want := theirs.conn.RemoteAddr().String(), netip.AddrPortFrom(natIP, nodePort).String(); got != want {
		t.Errorf("the pod is connected to %s, want %s", got, want)
	}
	for _, c := range [][2]net.Conn{{ours.conn, theirs.conn}, {theirs.conn, ours.conn}} {
		must(t, errors.Join(c[0].SetDeadline(time.Now().Add(patience)), c[1].SetDeadline(time.Now().Add(patience))))
		_, err := c[0].Write([]byte("hello"))
		must(t, err)
		b := make([]byte, 5)
		if _, err := c[1].Read(b); err != nil || string(b) != "hello" {
			t.Fatalf("read %q, %v", b, err)
		}
	}
	r, timeout := <-inVain, net.Error(nil)
	if !errors.As(r.err, &timeout) || !timeout.Timeout() {
		t.Errorf("a call to a port without a listener: %v, want no answer for 7 s", r.err)
	}
	dropped(before + 1)
}
