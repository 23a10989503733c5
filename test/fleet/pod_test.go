package fleet

import (
	"context"
	wire "encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/fleet"
	own "github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// A gateway Pod must accept overlay packets only from nodes. Peers must not reach it, although its
// address is in the PodCIDR. The test sends a node's packet before and after the forged ones. When
// both have arrived, a forged packet that has not arrived was dropped.
func gatewaysPodIsClosed(t *testing.T, a, b *fleet.Cluster) {
	t.Helper()
	gateway := a.GatewayPods[active(t, a)]
	to, from := b.Pods[0], a.Pods[0]
	inbox, err := to.ListenPacket("udp4", netip.AddrPortFrom(to.Addr, 0).String())
	must(t, err)
	defer inbox.Close()
	port := uint16(inbox.LocalAddr().(*net.UDPAddr).Port)
	at := seen(t, a, b, to.Addr)
	send := func(host *lab.Host, text string) {
		t.Helper()
		var conn net.Conn
		must(t, host.Do(func() (err error) {
			conn, err = net.Dial("udp4", netip.AddrPortFrom(gateway.Addr, own.OverlayPort).String())
			return err
		}))
		defer conn.Close()
		_, err := conn.Write(inOverlay(fabric.GatewayMAC(gateway.Addr), from.Addr, netip.AddrPortFrom(at, port), text))
		must(t, err)
	}
	// until sends a packet from a node repeatedly until the packet arrives. It fails the test if a
	// forged packet arrives first.
	until := func(text string) {
		t.Helper()
		eventually(t, text, func() error {
			send(a.Nodes[0].Host, text)
			buf := make([]byte, 2000)
			for {
				must(t, inbox.SetReadDeadline(time.Now().Add(200*time.Millisecond)))
				n, _, err := inbox.ReadFrom(buf)
				if err != nil {
					return fmt.Errorf("%s did not arrive: %w", text, err)
				}
				if got := string(buf[:n]); got == "forged" {
					t.Fatal("what a pod sent into the overlay has arrived")
				} else if got == text {
					return nil
				}
			}
		})
	}
	until("a node's")
	for range 10 {
		for _, p := range a.Pods {
			if p.Node == gateway.Node { // packets of other nodes' pods cross the underlay, where the sniffer would report them
				send(p.Host, "forged")
			}
		}
	}
	until("a node's again")

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := firstPing(ctx, from.Host, func() (netip.Addr, error) { return gateway.Addr, nil }); err != nil {
		t.Fatalf("a pod of its cluster: %v", err)
	}
	unanswered(t, to, seen(t, b, a, gateway.Addr))
}

// inOverlay returns an overlay packet (RFC 7348) with a UDP datagram inside.
func inOverlay(mac own.MAC, from netip.Addr, to netip.AddrPort, text string) []byte {
	b := []byte{8, 0, 0, 0}
	b = wire.BigEndian.AppendUint32(b, own.OverlayID<<8)
	b = append(b, mac[:]...)
	b = append(b, 2, 0, 0, 0, 0, 1, 8, 0)
	ip := []byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0}
	wire.BigEndian.PutUint16(ip[2:], uint16(28+len(text)))
	ip = append(append(ip, from.AsSlice()...), to.Addr().AsSlice()...)
	sum := uint32(0)
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(wire.BigEndian.Uint16(ip[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	wire.BigEndian.PutUint16(ip[10:], ^uint16(sum))
	b = append(b, ip...)
	b = wire.BigEndian.AppendUint16(b, 4242)
	b = wire.BigEndian.AppendUint16(b, to.Port())
	b = wire.BigEndian.AppendUint16(b, uint16(8+len(text)))
	return append(append(b, 0, 0), text...) // no checksum
}
