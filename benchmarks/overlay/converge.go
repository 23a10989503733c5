package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
)

const (
	probePort  = 5300
	probePause = 200 * time.Microsecond // between two datagrams of a probe
	probeLimit = 30 * time.Second
	repeats    = 4 // runs of a change in each round; the round's figure is their median
	// settling is the pause between two changes. Without it the next change would wait until the
	// kernel, in the background, has freed the rules of the previous one.
	settling = 200 * time.Millisecond
)

// sizes are the measured numbers of nodes and of peers.
var sizes = []int{10, 200}

// The measured changes.
const (
	moves     = "the gateway moves to another node"                      // the agents compare the filter and find it unchanged
	joins     = "a peer is added whose networks are already allocated"   // the filter is unchanged too, because it already contains the allocated networks
	allocates = "a peer is added and its networks are allocated at once" // the filter changes
)

// measureConvergence measures the time from the moment when all agents get a change until the first
// reply reaches the pod.
func (c *cluster) measureConvergence(rounds int) (string, error) {
	p, err := c.newProbe()
	if err != nil {
		return "", err
	}
	defer p.close()
	var b strings.Builder
	b.WriteString("\n| until packets flow, ms | without the filter | with it | ratio |\n|---|---|---|---|\n")
	for _, change := range []string{moves, joins, allocates} {
		for _, size := range sizes {
			var times [2][]float64 // without and with the filter
			for round := range rounds {
				for i := range times {
					reset := (i + round) % 2
					ms, err := c.converge(p, change, size, reset == 1)
					if err != nil {
						return "", fmt.Errorf("%s, %d nodes and peers: %w", change, size, err)
					}
					times[reset] = append(times[reset], ms)
				}
				log.Printf("round %d/%d  %s, %d nodes and peers: %.1f and %.1f ms", round+1, rounds, change, size, times[0][round], times[1][round])
			}
			fmt.Fprintf(&b, "| %s, %d nodes, %[2]d peers |%s\n", change, size, measure.Compared(times[0], times[1]))
		}
	}
	return b.String(), nil
}

// converge returns the median time of several runs of a change, in ms.
func (c *cluster) converge(p *probe, change string, size int, filter bool) (float64, error) {
	if err := c.reset(filter); err != nil {
		return 0, err
	}
	var all []float64
	for i := range repeats {
		to := gatewayNodes[i%2]
		before, after := c.intent(size, size, to), c.intent(size, size, to)
		switch change {
		case moves:
			before = c.intent(size, size, gatewayNodes[1-i%2])
		case joins:
			before.Allocated = before.Refused()
			before.Tunnels, after.Allocated = before.Tunnels[1:], before.Allocated
		case allocates:
			before.Tunnels = before.Tunnels[1:]
		}
		if err := c.apply(before); err != nil {
			return 0, err
		}
		time.Sleep(settling)
		took, err := p.timeUntilReply(to, func() error { return c.apply(after) })
		if err != nil {
			return 0, err
		}
		all = append(all, float64(took.Microseconds())/1000)
	}
	return measure.Median(all), nil
}

// A probe is a socket in the pod and one socket in the remote pod for each gateway. Only the
// socket of the new gateway answers, because the old gateway may still forward packets.
type probe struct {
	pod     net.Conn
	answers []net.PacketConn
	active  atomic.Int64 // node whose gateway's socket answers
	turn    uint64
}

func (c *cluster) newProbe() (_ *probe, err error) {
	p := &probe{}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	for _, i := range gatewayNodes {
		device := standIn(i)
		err := c.far.Do(func() error {
			lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
				failed := raw.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), device) })
				return errors.Join(failed, err)
			}}
			conn, err := lc.ListenPacket(context.Background(), "udp4", netip.AddrPortFrom(remotePod, probePort).String())
			if err == nil {
				p.answers = append(p.answers, conn)
				go p.answer(conn, int64(i))
			}
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("socket at %s: %w", device, err)
		}
	}
	p.pod, err = c.pod.Dial(context.Background(), "udp4", netip.AddrPortFrom(remotePod, probePort).String())
	return p, err
}

func (p *probe) close() {
	for _, conn := range p.answers {
		conn.Close()
	}
	if p.pod != nil {
		p.pod.Close()
	}
}

// answer echoes the datagrams that arrive through one gateway, while that gateway is active. It
// ends when the socket is closed.
func (p *probe) answer(conn net.PacketConn, node int64) {
	b := make([]byte, 64)
	for {
		n, from, err := conn.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil && p.active.Load() == node {
			_, _ = conn.WriteTo(b[:n], from) // if it is lost, the next one follows soon
		}
	}
}

// timeUntilReply makes a change and returns the time from its start to the first reply through the
// gateway on node. It returns only after the change has ended.
func (p *probe) timeUntilReply(node int, change func() error) (time.Duration, error) {
	p.active.Store(int64(node))
	p.turn++ // identifies late replies of earlier changes
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		b := binary.BigEndian.AppendUint64(nil, p.turn)
		for {
			select {
			case <-stop:
				return
			case <-time.After(probePause):
				_, _ = p.pod.Write(b) // fails while there is no route
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	time.Sleep(10 * probePause)
	start, changed := time.Now(), make(chan error, 1)
	go func() { changed <- change() }()
	if err := p.pod.SetReadDeadline(start.Add(probeLimit)); err != nil {
		return 0, err
	}
	b := make([]byte, 64)
	for {
		n, err := p.pod.Read(b)
		took := time.Since(start)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return 0, errors.Join(fmt.Errorf("no answer within %v", probeLimit), <-changed)
		}
		if err == nil && n == 8 && binary.BigEndian.Uint64(b) == p.turn {
			return took, <-changed
		}
	}
}
