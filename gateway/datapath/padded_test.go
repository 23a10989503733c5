package datapath_test

import (
	"bytes"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// The packet that Send makes for a given size is the packet without a size, followed by zeros.
func TestSendPadsPacketsWithZeros(t *testing.T) {
	local, err := datapath.NewLocal(self, self6, 1420)
	if err != nil {
		t.Fatal(err)
	}
	d := datapath.New(newScript(), bind.New(), newEngine(t), local, datapath.Options{})
	defer d.Close()
	port, to := listen(t, local), at(podB, 12345)
	b := newBuffers(8, 2048)
	for _, size := range []int{0, 20, 1280, 1420, 9000} {
		if err := port.Send([]byte("probe"), to, size); err != nil {
			t.Fatal(err)
		}
		if n := read(t, d, b); n != 1 {
			t.Fatalf("%d packets: want 1", n)
		}
		p := b.packet(0)
		const packetLen = 20 + 8 + 5
		if want := min(max(size, packetLen), 2048-offset-31); len(p) != want {
			t.Errorf("size %d: %d octets, want %d", size, len(p), want)
		}
		packettest.Check(t, p[:packetLen], packettest.ValidChecksums())
		h := header.IPv4(p)
		if u := header.UDP(h.Payload()); int(h.TotalLength()) != packetLen || u.DestinationPort() != 12345 || !bytes.Equal(u.Payload()[:5], []byte("probe")) {
			t.Errorf("size %d: % x", size, p[:packetLen])
		}
		if !bytes.Equal(p[packetLen:], make([]byte, len(p)-packetLen)) {
			t.Errorf("size %d: not zeros behind the packet", size)
		}
	}
	for _, to := range []netip.AddrPort{{}, netip.MustParseAddrPort("[::ffff:10.0.0.1]:1")} {
		if port.Send(nil, to, 100) == nil {
			t.Errorf("sent to %v", to)
		}
	}
}

// A padded packet arrives without its padding. Its message is as long as the message of a packet
// that has the requested size, even if the MTU towards the peer is smaller.
func TestPaddingGivesMessagesTheRequestedLength(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, orderedKeys(true))
		p.meet(t)
		a := p.ends[0]
		a.rules.MTU = 1200
		if err := a.engine.SetPeers([]natengine.Peer{a.rules}); err != nil {
			t.Fatal(err)
		}
		local, err := datapath.NewLocal(self, netip.Addr{}, 1420)
		if err != nil {
			t.Fatal(err)
		}
		a.Attach(local)
		port := listen(t, local)
		for _, size := range []int{1280, 1408, 1420} {
			a.wire.forget()
			if err := port.Send([]byte{0, 0, 0, 7}, at(a.to, 5000), size); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			synctest.Wait()
			sent := a.wire.messages(data)
			if len(sent) != 1 || len(sent[0].b) != 32+size {
				t.Errorf("size %d: %d messages, want one of %d octets", size, len(sent), 32+size)
			}
			p.ends[1].wants(t, 7)
		}
	})
}
