package natengine_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// Flows beyond the quota of the host must evict the host's own half-open flows. If it has
// none, new flows must be refused. Other hosts must not be affected.
func TestRFC6888_REQ4_OneHostCannotTakeAllPorts(t *testing.T) {
	b := newBox(t, natengine.Config{})
	quota := b.stats().MaxFlowsPerHost
	if quota > 1<<16/4 {
		t.Fatalf("a host may have %d flows", quota)
	}
	for port := 1; port < 1<<16; port++ { // without replies
		b.out(datagram(fmt.Sprintf("%s:%d", node1, port), theirPod+":53"))
	}
	if s := b.stats(); s.Flows != quota || s.Mappings != quota {
		t.Errorf("%d flows, %d ports, want %d", s.Flows, s.Mappings, quota)
	}
	seen := source(b.out(datagram(node2+":4000", theirPod+":53")))
	want(t, destination(b.in(datagram(theirPod+":53", seen))), node2+":4000")

	for port := 1<<16 - quota; port < 1<<16; port++ { // now with replies
		b.in(datagram(theirPod+":53", source(b.out(datagram(fmt.Sprintf("%s:%d", node1, port), theirPod+":53")))))
	}
	b.refuse(natengine.Outbound, datagram(node1+":1", theirPod+":53"), natengine.DropHostQuota)
	b.out(datagram(node2+":4001", theirPod+":53"))
	want(t, destination(b.in(datagram(theirPod+":53", seen))), node2+":4000")
}

// A port may be reused at once, because filtering is by address and port. So late packets for the
// previous user of the port do not reach the new one.
func TestRFC6888_REQ8_APortMayBeReusedAtOnce(t *testing.T) {
	b := newBox(t, natengine.Config{})
	want(t, source(b.out(datagram(node1+":4000", theirPod+":53"))), natAddress+":4000")
	b.wait(301 * time.Second)
	b.e.Sweep(b.now)
	want(t, source(b.out(datagram(node2+":4000", theirOther+":53"))), natAddress+":4000")
	b.refuse(natengine.Inbound, datagram(theirPod+":53", natAddress+":4000"), natengine.DropNoFlow)
}

func TestRFC6888_REQ11_EstablishedFlowsStayWhenTheTableIsFull(t *testing.T) {
	b := newBox(t, natengine.Config{MaxFlows: 8})
	var answers [][]byte
	for host := range 6 {
		seen := b.connect(fmt.Sprintf("192.168.3.%d:4000", host), theirPod+":80")
		answers = append(answers, segment(theirPod+":80", seen, ack))
	}
	for i := range 100 {
		b.out(datagram(fmt.Sprintf("192.168.2.%d:4000", i), theirPod+":53")) // evicts the oldest flow of this loop
	}
	for _, answer := range answers {
		b.in(answer)
	}
	for host := range 2 {
		b.connect(fmt.Sprintf("192.168.4.%d:4000", host), theirPod+":80")
	}
	b.refuse(natengine.Outbound, datagram(node1+":4000", theirPod+":53"), natengine.DropFlowTableFull)
}
