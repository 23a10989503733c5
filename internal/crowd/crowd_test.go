package crowd

import (
	"net"
	"net/netip"
	"testing"
	"time"
)

func TestKernelDropsUnexpectedSendersUntilOpen(t *testing.T) {
	in4, in6 := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1")
	out4, out6 := netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("::2")
	for _, tc := range []struct {
		from netip.Addr
		only []netip.Addr
		want bool
	}{
		{in4, []netip.Addr{in4}, true}, {in4, []netip.Addr{in6, out4, in4, out6}, true}, {in4, []netip.Addr{out4, in6}, false}, {in4, nil, false},
		{in6, []netip.Addr{in6}, true}, {in6, []netip.Addr{out6, out4, in6, in4}, true}, {in6, []netip.Addr{out6, in4}, false}, {in6, nil, false},
	} {
		conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(tc.from, 0)))
		if err != nil {
			t.Skip(err)
		}
		defer conn.Close()
		c := Of(conn)
		if err := c.restrict(tc.only); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.WriteTo([]byte{1}, conn.LocalAddr()); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		_, _, err = conn.ReadFrom(make([]byte, 1))
		if dropped := c.Open(); (err == nil) != tc.want || (dropped == 0) != tc.want {
			t.Errorf("from %s, only from %v: read %v, %d dropped", tc.from, tc.only, err == nil, dropped)
		}
	}
}
