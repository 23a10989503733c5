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

// Connections with state in a gateway must survive the loss of the gateway, whether a standby takes
// over or the gateway restarts and remains active. In cluster a, the nodes vote for the active
// gateway; in cluster b, the Lease determines it. The mapped endpoint requires a loose reverse path
// filter.
func TestConnectionsSurviveTheLossOfAGateway(t *testing.T) {
	f := upWith(t, fleet.Options{Votes: true, Spec: lab.Spec{RPFilter: lab.RPFilterLoose, Clusters: []lab.ClusterSpec{
		inPods(clusterSpec("10.244.0.0/16", 3)), clusterSpec("10.240.0.0/12", 2),
	}}})
	a, b := f.Clusters[0], f.Clusters[1]
	peer(t, f, a, b)
	all := slices.Concat(dialogues(t, a, b), dialogues(t, b, a))
	start := func(c *fleet.Cluster, component string) error { return c.Start(t.Context(), component) }
	for _, end := range []struct {
		name     string
		do, undo func(c *fleet.Cluster, component string) error
		restarts bool
	}{
		{"killed", (*fleet.Cluster).Kill, start, false},
		{"stopped", (*fleet.Cluster).Stop, start, false},
		{"frozen", (*fleet.Cluster).Pause, (*fleet.Cluster).Resume, false},
		{"killed and restarted", (*fleet.Cluster).Kill, start, true},
	} {
		for _, c := range []*fleet.Cluster{a, b} {
			if c == a {
				eventually(t, "votes", func() error { return checkVoting(t, a, 3) })
			}
			was := active(t, c)
			eventually(t, "the standby's copy", func() error { return checkCopied(t, c, 1-was, 2*(len(c.Nodes)+2)) })
			time.Sleep(2 * time.Second) // established flows are copied to the standby once a second
			must(t, end.do(c, fleet.Gateway(was)))
			if end.restarts {
				must(t, end.undo(c, fleet.Gateway(was)))
			} else {
				eventually(t, "another active gateway", func() error {
					if now := active(t, c); now == was {
						return fmt.Errorf("active: %s", c.Nodes[now])
					}
					return nil
				})
			}
			requireContinued(t, all, fmt.Sprintf("the gateway of %s %s", c, end.name))
			// With votes, the standby may take over before the restarted gateway is ready.
			if now := active(t, c); end.restarts != (now == was) && !(end.restarts && c == a) {
				t.Errorf("the gateway of %s %s: then %s is active, before %s", c, end.name, c.Nodes[now], c.Nodes[was])
			}
			if !end.restarts {
				must(t, end.undo(c, fleet.Gateway(was)))
			}
		}
	}
}

// checkCopied returns an error unless gateway i of a cluster has copied at least the wanted number
// of flows from the active gateway.
func checkCopied(t *testing.T, c *fleet.Cluster, i, want int) error {
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

// A dialogue is a connection with state in a gateway. One side sends continuously and the other
// side echoes.
type dialogue struct {
	name   string
	echoes atomic.Int64
	broken atomic.Pointer[error]
}

// converse starts a dialogue on the two ends of a connection.
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

// dialogues starts dialogues between two clusters that have state in a gateway of cluster a. Nodes
// of cluster a connect to pods of cluster b. All use the same source port, so NAPT must change it
// for all nodes but one. A pod of cluster b connects to a mapped endpoint of cluster a, once with
// the pod and once with the endpoint as the sending side.
func dialogues(t *testing.T, a, b *fleet.Cluster) (all []*dialogue) {
	t.Helper()
	const port = 40404
	pod := podOn(t, b, len(b.Nodes)-1)
	at := seen(t, a, b, pod.Addr)
	var mapped netip.Addr
	eventually(t, "an address of "+a.OnPrem.Name, func() (err error) {
		mapped, err = a.MapEndpoint(t.Context(), a.OnPrem.Addr, b)
		return err
	})
	for _, listen := range []func(*testing.T, *lab.Host, netip.Addr) server{listenTCP, listenUDP} {
		s := listen(t, pod.Host, pod.Addr)
		for _, n := range a.Nodes {
			near, far := s.connect(t, n.Host, netip.AddrPortFrom(n.Addr, port), at)
			all = append(all, converse(t, fmt.Sprintf("%s of node %s", s.network(), n.Name), near, far))
		}
		s = listen(t, a.OnPrem.Host, a.OnPrem.Addr)
		near, far := s.connect(t, pod.Host, netip.AddrPortFrom(pod.Addr, 0), mapped)
		all = append(all, converse(t, s.network()+" to a mapped endpoint, where the pod speaks", near, far))
		near, far = s.connect(t, pod.Host, netip.AddrPortFrom(pod.Addr, 0), mapped)
		all = append(all, converse(t, s.network()+" to a mapped endpoint, which speaks", far, near))
	}
	return all
}

// requireContinued checks that all dialogues continue without a new connection.
func requireContinued(t *testing.T, all []*dialogue, after string) {
	t.Helper()
	for _, d := range all {
		before, begin := d.echoes.Load(), time.Now()
		for d.broken.Load() == nil && d.echoes.Load() == before && time.Since(begin) < time.Minute { // TCP retransmits at growing intervals
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

// A server accepts connections for a test.
type server interface {
	network() string
	// connect opens a connection from another host to an address of the server, and returns both
	// ends.
	connect(t *testing.T, from *lab.Host, src netip.AddrPort, at netip.Addr) (near, far net.Conn)
}

// shared is a socket option that lets several sockets use one port.
func shared(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
}

func dial(ctx context.Context, network string, from *lab.Host, src net.Addr, to string) (conn net.Conn, err error) {
	d := net.Dialer{LocalAddr: src, Control: shared}
	err = from.Do(func() (err error) {
		conn, err = d.DialContext(ctx, network, to)
		return err
	})
	return conn, err
}

type tcpServer struct{ net.Listener }

func listenTCP(t *testing.T, h *lab.Host, addr netip.Addr) server {
	t.Helper()
	l, err := h.Listen("tcp4", addr.String()+":0")
	must(t, err)
	t.Cleanup(func() { l.Close() })
	return tcpServer{l}
}

func (tcpServer) network() string { return "TCP" }

func (l tcpServer) connect(t *testing.T, from *lab.Host, src netip.AddrPort, at netip.Addr) (near, far net.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	accepted := make(chan net.Conn, 1)
	go func() {
		if conn, err := l.Accept(); err == nil {
			accepted <- conn
		}
	}()
	port := l.Addr().(*net.TCPAddr).AddrPort().Port()
	near, err := dial(ctx, "tcp4", from, net.TCPAddrFromAddrPort(src), netip.AddrPortFrom(at, port).String())
	must(t, err)
	select {
	case far = <-accepted:
	case <-ctx.Done():
		t.Fatalf("%s -> %v is not accepted", from, at)
	}
	return near, far
}

// A udpServer has a connected socket for each client, as a TCP server does. So it does not answer
// datagrams whose source address or port has changed.
type udpServer struct {
	net.PacketConn
	host *lab.Host
}

func listenUDP(t *testing.T, h *lab.Host, addr netip.Addr) server {
	t.Helper()
	s := udpServer{host: h}
	must(t, h.Do(func() (err error) {
		s.PacketConn, err = (&net.ListenConfig{Control: shared}).ListenPacket(t.Context(), "udp4", addr.String()+":0")
		return err
	}))
	t.Cleanup(func() { s.Close() })
	return s
}

func (udpServer) network() string { return "UDP" }

// A udpConn ignores errors about refused packets, as TCP does, which retransmits them. Nodes refuse
// packets for a peer while no gateway is active.
type udpConn struct{ net.Conn }

func (c udpConn) Write(b []byte) (int, error) {
	if n, err := c.Conn.Write(b); !errors.Is(err, unix.EHOSTUNREACH) {
		return n, err
	}
	return len(b), nil
}

func (c udpConn) Read(b []byte) (int, error) {
	for {
		if n, err := c.Conn.Read(b); !errors.Is(err, unix.EHOSTUNREACH) {
			return n, err
		}
	}
}

func (s udpServer) connect(t *testing.T, from *lab.Host, src netip.AddrPort, at netip.Addr) (near, far net.Conn) {
	t.Helper()
	port := s.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	near, err := dial(t.Context(), "udp4", from, net.UDPAddrFromAddrPort(src), netip.AddrPortFrom(at, port).String())
	must(t, err)
	eventually(t, "a datagram of "+from.Name, func() error {
		if _, err := near.Write([]byte{0}); err != nil {
			return err
		}
		must(t, s.SetReadDeadline(time.Now().Add(5*time.Second)))
		_, client, err := s.ReadFrom(make([]byte, 1))
		if err != nil {
			return err
		}
		far, err = dial(t.Context(), "udp4", s.host, s.LocalAddr(), client.String())
		return err
	})
	return udpConn{near}, udpConn{far}
}
