package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// Connections that need a flow in the gateway survive its end, whether a standby takes over or the gateway restarts and
// stays the active one. The reverse path filter is loose, for the sake of the mapped endpoint.
func TestConnectionsSurviveTheGateway(t *testing.T) {
	f := up(t, lab.Spec{RPFilter: lab.RPFilterLoose, Clusters: []lab.ClusterSpec{inPods(clusterSpec("10.244.0.0/16", 3)), clusterSpec("10.240.0.0/12", 2)}})
	a, b := f.Clusters[0], f.Clusters[1]
	peer(t, f, a, b)
	all := slices.Concat(dialogues(t, a, b), dialogues(t, b, a))
	for _, end := range []struct {
		name     string
		do       func(c *fleet.Cluster, component string) error
		restarts bool
	}{
		{"killed", (*fleet.Cluster).Kill, false},
		{"stopped", (*fleet.Cluster).Stop, false},
		{"killed and restarted", (*fleet.Cluster).Kill, true},
	} {
		for _, c := range []*fleet.Cluster{a, b} {
			was := active(t, c)
			eventually(t, "the standby's copy", func() error { return copied(t, c, 1-was, len(a.Nodes)+2) })
			time.Sleep(2 * time.Second) // what is established is told once a second
			must(t, end.do(c, fleet.Gateway(was)))
			if end.restarts {
				must(t, c.Start(t.Context(), fleet.Gateway(was)))
			} else {
				eventually(t, "another active gateway", func() error {
					if now := active(t, c); now == was {
						return fmt.Errorf("active: %s", c.Nodes[now])
					}
					return nil
				})
			}
			goOn(t, all, fmt.Sprintf("the gateway of %s %s", c, end.name))
			if now := active(t, c); end.restarts != (now == was) {
				t.Errorf("the gateway of %s %s: then %s is active, before %s", c, end.name, c.Nodes[now], c.Nodes[was])
			}
			if !end.restarts {
				must(t, c.Start(t.Context(), fleet.Gateway(was)))
			}
		}
	}
}

// copied wants gateway i of a cluster to have as many flows of the active one, or more.
func copied(t *testing.T, c *fleet.Cluster, i, want int) error {
	text, err := c.GatewayHost(i).Get(t.Context(), "http://127.0.0.1:5873/metrics")
	if err != nil {
		return err
	}
	for line := range strings.Lines(text) {
		if n := 0; strings.HasPrefix(line, "isthmus_gateway_copied_flows ") {
			if _, err := fmt.Sscanf(line, "isthmus_gateway_copied_flows %d", &n); err != nil || n < want {
				return fmt.Errorf("%s", line)
			}
			return nil
		}
	}
	return errors.New("no metric")
}

// A dialogue is a connection of which one end speaks all the time and the other end says everything back. It needs a
// flow in a gateway.
type dialogue struct {
	name   string
	echoes atomic.Int64
	broken atomic.Pointer[error]
}

// converse begins one between the two ends of a connection.
func converse(t *testing.T, name string, speaks, answers net.Conn) *dialogue {
	d := &dialogue{name: name}
	done := make(chan struct{})
	t.Cleanup(func() {
		close(done)
		speaks.Close()
		answers.Close()
	})
	fails := func(who string, err error) {
		err = fmt.Errorf("%s: %w", who, err)
		d.broken.CompareAndSwap(nil, &err)
	}
	go func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(50 * time.Millisecond):
			}
			if _, err := speaks.Write([]byte{1}); err != nil {
				fails("who speaks cannot", err)
				return
			}
		}
	}()
	go func() {
		_, err := io.Copy(answers, answers)
		fails("who answers hears no more", fmt.Errorf("%w", errOr(err, io.EOF)))
	}()
	go func() {
		b := make([]byte, 1<<10)
		for {
			n, err := speaks.Read(b)
			if d.echoes.Add(int64(n)); err != nil {
				fails("who speaks hears no more", err)
				return
			}
		}
	}()
	return d
}

func errOr(err, other error) error {
	if err == nil {
		return other
	}
	return err
}

// dialogues begins those between two clusters that need a flow in a gateway of cluster a: of nodes of a with pods of b, all
// from one port, so that all but one have another at the NAPT address; and of a pod of b with a mapped endpoint of a, whose
// either end speaks.
func dialogues(t *testing.T, a, b *fleet.Cluster) (all []*dialogue) {
	t.Helper()
	const port = 40404
	pod := podOn(t, b, len(b.Nodes)-1)
	at := seen(t, a, b, pod.Addr)
	server := listen(t, pod.Host, pod.Addr)
	for _, n := range a.Nodes {
		near, far := server.connect(t, n.Host, netip.AddrPortFrom(n.Addr, port), at)
		all = append(all, converse(t, "TCP of node "+n.Name, near, far))
	}
	var mapped netip.Addr
	eventually(t, "an address of "+a.OnPrem.Name, func() (err error) {
		mapped, err = a.MapEndpoint(t.Context(), a.OnPrem.Addr, b)
		return err
	})
	server = listen(t, a.OnPrem.Host, a.OnPrem.Addr)
	near, far := server.connect(t, pod.Host, netip.AddrPortFrom(pod.Addr, 0), mapped)
	all = append(all, converse(t, "TCP to a mapped endpoint, where the pod speaks", near, far))
	near, far = server.connect(t, pod.Host, netip.AddrPortFrom(pod.Addr, 0), mapped)
	return append(all, converse(t, "TCP to a mapped endpoint, which speaks", far, near))
}

// goOn wants all to go on, without a new connection.
func goOn(t *testing.T, all []*dialogue, after string) {
	t.Helper()
	for _, d := range all {
		before, begin := d.echoes.Load(), time.Now()
		for d.broken.Load() == nil && d.echoes.Load() == before && time.Since(begin) < time.Minute { // TCP waits ever longer
			time.Sleep(10 * time.Millisecond)
		}
		switch err := d.broken.Load(); {
		case err != nil:
			t.Errorf("%s: %s: broken: %v", after, d.name, *err)
		case d.echoes.Load() == before:
			t.Errorf("%s: %s: nothing comes any more", after, d.name)
		}
	}
}

// A listening is a TCP server of a test.
type listening struct {
	net.Listener
	port uint16
}

func listen(t *testing.T, h *lab.Host, addr netip.Addr) listening {
	t.Helper()
	l, err := h.Listen("tcp4", addr.String()+":0")
	must(t, err)
	t.Cleanup(func() { l.Close() })
	return listening{l, uint16(l.Addr().(*net.TCPAddr).Port)}
}

// connect dials the server at an address from another host, and returns both ends.
func (l listening) connect(t *testing.T, from *lab.Host, src netip.AddrPort, at netip.Addr) (near, far net.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	accepted := make(chan net.Conn, 1)
	go func() {
		if conn, err := l.Accept(); err == nil {
			accepted <- conn
		}
	}()
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(src), Control: func(_, _ string, c syscall.RawConn) (err error) {
		return c.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
	}}
	must(t, from.Do(func() (err error) {
		near, err = d.DialContext(ctx, "tcp4", netip.AddrPortFrom(at, l.port).String())
		return err
	}))
	select {
	case far = <-accepted:
	case <-ctx.Done():
		t.Fatalf("%s -> %v is not accepted", from, at)
	}
	return near, far
}
