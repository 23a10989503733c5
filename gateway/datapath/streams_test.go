package datapath_test

import (
	"bytes"
	"context"
	"io"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/natengine"
)

const streamPort = 6443

// streams opens the port for streams of both gateways. b's side echoes what it receives. The
// channel from gets the source address of each connection as b sees it.
func streams(t *testing.T, a, b *side) (ours *datapath.Streams, from chan netip.Addr) {
	t.Helper()
	from = make(chan netip.Addr, 16)
	for _, s := range []*side{a, b} {
		s.peer.Streams = true
		if err := s.tunnel.SetPeers([]datapath.Peer{s.peer}); err != nil {
			t.Fatal(err)
		}
		opened, err := s.local.OpenStreams(streamPort, func(r *datapath.StreamRequest) {
			from <- r.From
			c, err := r.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			_, _ = io.Copy(c, c)
		})
		if err != nil {
			t.Fatal(err)
		}
		if s == a {
			ours = opened
		}
	}
	return ours, from
}

func TestTwoGatewaysCarryStreams(t *testing.T) {
	eachPlan(t, func(t *testing.T, a, b *side) {
		ours, from := streams(t, a, b)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		c, err := ours.Dial(ctx, b.seenAddr(b.self))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if got := <-from; got != b.peer.Gateway[0] {
			t.Errorf("from %v, want the address of the peer's gateway %v", got, b.peer.Gateway[0])
		}
		sent := bytes.Repeat([]byte("0123456789abcdef"), 128<<10) // 2 MiB
		go func() {
			_, _ = c.Write(sent)
		}()
		_ = c.SetReadDeadline(time.Now().Add(time.Minute))
		got := make([]byte, len(sent))
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, sent) {
			t.Errorf("what came back is not what was sent: %v", err)
		}
	})
}

func TestOnlyGatewaysMayOpenStreams(t *testing.T) {
	eachPlan(t, func(t *testing.T, a, b *side) {
		_, from := streams(t, a, b)
		at := netip.AddrPortFrom(b.seenAddr(b.self), streamPort)
		dial := func(source netip.Addr) error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			c, err := a.host.DialTCP(ctx, source, at)
			if err == nil {
				c.Close()
			}
			return err
		}
		a.rules.Gateway = at.Addr()
		if err := a.engine.SetPeers([]natengine.Peer{a.rules}); err != nil {
			t.Fatal(err)
		}
		for _, source := range []netip.Addr{a.pod, a.node, a.external} {
			if dial(source) == nil {
				t.Errorf("%v has connected", source)
			}
		}
		if n := drops(b.engine, natengine.Inbound, natengine.DropLocalSource); n == 0 {
			t.Error("b has counted nothing of the pod")
		}
		if n := drops(a.engine, natengine.Outbound, natengine.DropLocalSource); n == 0 {
			t.Error("a has counted nothing of its node")
		}
		select {
		case addr := <-from:
			t.Errorf("b was asked by %v", addr)
		default:
		}
	})
}

// If b has not agreed to streams, its gateway answers TCP as if it did not support streams.
func TestStreamsNeedTheConsentOfThePeer(t *testing.T) {
	a, b := startGateways(t, &memlink.Network{}, plans[0], datapath.Options{})
	ours, from := streams(t, a, b)
	b.peer.Streams = false
	if err := b.tunnel.SetPeers([]datapath.Peer{b.peer}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if c, err := ours.Dial(ctx, b.seenAddr(b.self)); err == nil {
		c.Close()
		t.Error("a has connected")
	}
	if len(from) > 0 {
		t.Error("b was asked")
	}
}

// Even if a manager requests many connections to an unreachable peer, which all repeat their SYN,
// connections to other peers must work.
func TestStreamsOfOnePeerLeaveRoomForOthers(t *testing.T) {
	local, err := datapath.NewLocal(netip.MustParseAddr("169.254.0.1"), netip.Addr{}, 1420)
	if err != nil {
		t.Fatal(err)
	}
	defer local.Close()
	s, err := local.OpenStreams(streamPort, func(r *datapath.StreamRequest) { r.Refuse() })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var dials sync.WaitGroup
	defer func() {
		cancel()
		dials.Wait()
	}()
	dial := func(to netip.Addr, n int) {
		before := local.Waiting()
		for range n {
			dials.Go(func() {
				if c, err := s.Dial(ctx, to); err == nil {
					c.Close()
					t.Error("a connection was made though no gateway answers")
				}
			})
		}
		for end := time.Now().Add(time.Minute); local.Waiting() < before+min(n, datapath.LocalQueueLen); runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatalf("%d of %d segments to %v wait", local.Waiting()-before, n, to)
			}
		}
	}
	busy, quiet := netip.MustParseAddr("10.72.0.1"), netip.MustParseAddr("10.74.0.1")
	dial(busy, 2*datapath.LocalQueueLen)
	dial(quiet, 1)
	b := make([]byte, 1500)
	for range 2 { // each stream gets its turn
		if n := local.Next(b); n == 0 {
			t.Fatal("nothing more is sent")
		}
		if netip.AddrFrom4([4]byte(b[16:20])) == quiet {
			return
		}
	}
	t.Error("one peer has to wait for another one")
}

func TestStreamsEndWithTheirEndpoint(t *testing.T) {
	a, b := startGateways(t, &memlink.Network{}, plans[0], datapath.Options{})
	ours, _ := streams(t, a, b)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := ours.Dial(ctx, b.seenAddr(b.self))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 1))
		ended <- err
	}()
	a.tunnel.Close()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the connection still works")
		}
	case <-time.After(time.Minute):
		t.Error("the connection hangs")
	}
	if c, err := ours.Dial(ctx, b.seenAddr(b.self)); err == nil {
		c.Close()
		t.Error("a closed endpoint has connected")
	}
	if _, err := a.local.OpenStreams(streamPort, nil); err == nil {
		t.Error("a closed endpoint has got streams")
	}
}

// A peer that reads nothing but acknowledges every window probe must not keep data in our memory.
func TestAClosedStreamLeavesNothingBehind(t *testing.T) {
	a, b := startGateways(t, &memlink.Network{}, plans[0], datapath.Options{})
	for _, s := range []*side{a, b} {
		s.peer.Streams = true
		if err := s.tunnel.SetPeers([]datapath.Peer{s.peer}); err != nil {
			t.Fatal(err)
		}
	}
	closed := make(chan struct{})
	theirs, err := a.local.OpenStreams(streamPort, func(r *datapath.StreamRequest) { r.Refuse() })
	if err != nil {
		t.Fatal(err)
	}
	ours, err := b.local.OpenStreams(streamPort, func(r *datapath.StreamRequest) {
		defer close(closed)
		c, err := r.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		_ = c.SetWriteDeadline(time.Now().Add(time.Second))
		if _, err := c.Write(make([]byte, 1<<20)); err == nil {
			t.Error("the peer receives everything, so the test proves nothing")
		}
		c.Close()
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := theirs.Dial(ctx, b.seenAddr(b.self))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	select {
	case <-closed:
	case <-ctx.Done():
		t.Fatal("Close hangs")
	}
	if n := ours.Left(); n != 0 {
		t.Errorf("%d connections are left", n)
	}
}
