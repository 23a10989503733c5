package main

import (
	"fmt"
	"net/netip"
	"runtime"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// engine measures natengine. Its octets per flow are the growth of the heap.
func engine(flows int) (f figures, err error) {
	e := natengine.New(natengine.Config{MaxFlows: 2 * flows, MaxFlowsPerHost: flows})
	err = e.SetPeers([]natengine.Peer{{
		ID: "b", RemotePods: []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")},
		Pods: []natengine.Remap{{From: netip.MustParsePrefix("10.244.0.0/16"), To: netip.MustParsePrefix("10.246.0.0/16")}},
	}})
	if err != nil {
		return f, err
	}
	var v packet.View
	parse := func(b []byte) {
		if e := v.Parse(b, packet.ChecksumComplete); e != nil {
			err = e
		}
	}
	translate := func(b []byte) {
		parse(b)
		if verdict := e.Outbound(&v, time.Second); verdict.Action != natengine.Forward {
			err = fmt.Errorf("dropped: %v", verdict.Drop)
		}
	}
	f.without = perPacket(flows, parse)
	before := heap()
	f.fresh = perPacket(flows, translate)
	f.octets = float64(heap()-before) / float64(flows)
	f.known = perPacket(flows, translate)
	if n := e.Stats().Flows; err == nil && n != flows {
		err = fmt.Errorf("%d flows, want %d", n, flows)
	}
	return f, err
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
