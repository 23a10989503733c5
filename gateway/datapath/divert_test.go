package datapath_test

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// Any packet that is diverted and then brought back passes as if it had not been diverted.
func TestDivertedPacketsCanBeReinjectedUnaltered(t *testing.T) {
	network := &memlink.Network{}
	a, b := startGateways(t, network, plans[0], datapath.Options{})
	var diverted atomic.Int64
	a.tunnel.Divert(func(p []byte) {
		diverted.Add(1)
		a.tunnel.Inject(p)
	})
	transfers(t, a, b, 2, 1<<20)
	if err := echoUDP(a, a.node, b, b.pod, 50, false, nil); err != nil {
		t.Error(err)
	}
	if diverted.Load() == 0 {
		t.Error("no packet was diverted")
	}
	checkHealthy(t, a, b)
}

// After Divert has returned, no packet of the link is sent to a peer. A pod that never stops
// sending does not keep Divert from returning.
func TestDivertWaitsForPacketsInFlight(t *testing.T) {
	for range 5 {
		a, b := startGateways(t, &memlink.Network{}, plans[0], datapath.Options{})
		p := plain(udp4(at(a.pod, 9), at(b.seenAddr(b.pod), 9), make([]byte, 400)))
		stop := make(chan struct{})
		var flood sync.WaitGroup
		for range 4 {
			flood.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						if !a.link.Inject(p) {
							runtime.Gosched()
						}
					}
				}
			})
		}
		sent := func() uint64 { n, _ := a.engine.Peers()[0].Traffic(natengine.Outbound); return n }
		for sent() < 5000 {
			time.Sleep(time.Millisecond)
		}
		returned := make(chan struct{})
		go func() {
			defer close(returned)
			a.tunnel.Divert(func([]byte) { time.Sleep(10 * time.Microsecond) }) // slower than the pod sends
		}()
		select {
		case <-returned:
			before := sent()
			time.Sleep(20 * time.Millisecond)
			if after := sent(); after != before {
				t.Errorf("%d packets were sent after Divert", after-before)
			}
		case <-time.After(time.Minute):
			t.Error("Divert waits for the flood to end")
		}
		close(stop)
		flood.Wait()
	}
}

// Reinjected packets wait for a tunnel that is not up yet. If there is no room for a packet, it is
// counted as dropped.
func TestReinjectedPacketsWaitForTheTunnel(t *testing.T) {
	engine := natengine.New(natengine.Config{})
	tunnel := datapath.New(memlink.NewLink("mem", tunnelMTU), new(memlink.Network).Bind(self), engine, nil, datapath.Options{})
	defer tunnel.Close()
	p := make([]byte, packet.VirtioHeaderLen+60000)
	for range datapath.MaxInjected/len(p) + 3 {
		tunnel.Inject(p)
	}
	if n := drops(engine, natengine.Outbound, natengine.DropNoMandate); n != 3 {
		t.Errorf("%d packets were dropped; want 3", n)
	}
	if err := tunnel.Up(newKey(1).private, 5871); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); drops(engine, natengine.Outbound, natengine.DropMalformed) != datapath.MaxInjected/uint64(len(p)); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d packets were handled; want %d", drops(engine, natengine.Outbound, natengine.DropMalformed), datapath.MaxInjected/len(p))
		}
	}
}
