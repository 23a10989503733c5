package natengine

import (
	"testing"

	"github.com/isthmus-net/isthmus/packet"
)

// Behind NAPT, the peer sees our nodes under the same address as our gateway.
func TestOnlyTheGatewayMayConnectToThePeersGateway(t *testing.T) {
	b := peerB()
	b.Gateway = ip("10.72.0.1")
	single := b
	single.Pods = []Remap{{pfx("10.244.0.5/32"), pfx("10.246.0.5/32")}}
	for _, c := range []struct {
		name string
		peer Peer
		sent []byte
		want Drop
	}{
		{"the gateway", b, tcp("169.254.0.1:4000", "10.72.0.1:6443", packet.TCPSyn), DropNone},
		{"a node", b, tcp("192.168.7.5:4000", "10.72.0.1:6443", packet.TCPSyn), DropLocalSource},
		{"a node at another port", b, tcp("192.168.7.5:4000", "10.72.0.1:80", packet.TCPSyn), DropLocalSource},
		{"a pod with a one-address PodCIDR", single, tcp("10.244.0.5:4000", "10.72.0.1:6443", packet.TCPSyn), DropLocalSource},
		{"a node to a mapped endpoint", b, tcp("192.168.7.5:4000", "10.72.0.2:6443", packet.TCPSyn), DropNone},
		{"a datagram of a node", b, udp("192.168.7.5:4000", "10.72.0.1:12345"), DropNone},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEngine(t, Config{Self4: ip("169.254.0.1")}, c.peer)
			if _, v := send(t, e, Outbound, c.sent, at(0)); v.Drop != c.want {
				t.Errorf("%v, want %v", v.Drop, c.want)
			}
		})
	}
}

// A node may open a connection before the peer's gateway answers in the tunnel. The rule with
// the gateway's address must end that connection, and the flow must not be adopted from
// another gateway.
func TestGatewayRuleEndsOlderConnectionsToThePeersGateway(t *testing.T) {
	b := peerB()
	e := newEngine(t, Config{Self4: ip("169.254.0.1")}, b)
	node := tcp("192.168.7.5:4000", "10.72.0.1:6443", packet.TCPSyn)
	var flow Flow
	defer e.Follow(func(_ string, f Flow, _ bool) { flow = f })()
	if _, v := send(t, e, Outbound, node, at(0)); v.Drop != DropNone {
		t.Fatal(v.Drop)
	}
	send(t, e, Outbound, udp("192.168.7.5:4000", "10.72.0.1:12345"), at(0))
	datagrams := flow
	send(t, e, Outbound, tcp("169.254.0.1:4000", "10.72.0.1:6443", packet.TCPSyn), at(0))
	gateways := flow
	b.Gateway = ip("10.72.0.1")
	if err := e.SetPeers([]Peer{b}); err != nil {
		t.Fatal(err)
	}
	if n := e.Stats().Flows; n != 2 {
		t.Errorf("%d flows stay, want that of the gateway and the datagrams", n)
	}
	if _, v := send(t, e, Outbound, tcp("192.168.7.5:4000", "10.72.0.1:6443", packet.TCPAck), at(1)); v.Drop != DropLocalSource {
		t.Errorf("the connection continues: %v", v.Drop)
	}

	old := newEngine(t, Config{Self4: ip("169.254.0.1")}, peerB())
	defer old.Follow(func(_ string, f Flow, _ bool) { flow = f })()
	send(t, old, Outbound, node, at(0))
	other := newEngine(t, Config{Self4: ip("169.254.0.1")}, b)
	for _, c := range []struct {
		flow Flow
		want Drop
	}{{flow, DropNoFlow}, {datagrams, DropNone}, {gateways, DropNone}} {
		if _, got := other.Adopt(b.ID, c.flow, 0); got != c.want {
			t.Errorf("%v is adopted: %v, want %v", c.flow, got, c.want)
		}
	}
}
