package natengine

import (
	"testing"

	"github.com/isthmus-net/isthmus/packet"
)

// Behind NAPT a node of ours has the address that the peer knows our gateway by.
func TestOnlyTheGatewayConnectsToThePeersGateway(t *testing.T) {
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
		{"a pod that is the whole network", single, tcp("10.244.0.5:4000", "10.72.0.1:6443", packet.TCPSyn), DropLocalSource},
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
