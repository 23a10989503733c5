package scripts

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"
)

const (
	burstDatagrams = 1000
	burstLength    = 20 // number of datagrams in a superpacket
	burstPort      = 8
)

// burstDatagram returns the n-th datagram of a burst.
func burstDatagram(n, size int) []byte {
	b := bytes.Repeat([]byte{byte(n), byte(n >> 8), 0x5a}, size/3+1)[:size]
	binary.BigEndian.PutUint32(b, uint32(n))
	return b
}

// burst sends datagrams as superpackets, which stay whole up to the receiving pod if every part of
// the path can carry them. First it sends datagrams of one octet until one arrives, but for no
// longer than patience. Then all datagrams of the superpackets must arrive.
func (s *script) burst(_ *testscript.TestScript, _ bool, args []string) error {
	if len(args) != 4 {
		return errUsage
	}
	from, to, err := s.ends(args[0], args[1])
	if err != nil {
		return err
	}
	at, err := s.l.Host(args[2])
	if err != nil {
		return err
	}
	size, err := strconv.Atoi(args[3])
	if err != nil || size < 4 {
		return errUsage
	}
	server, err := at.ListenPacket("udp", fmt.Sprintf(":%d", burstPort))
	if err != nil {
		return err
	}
	defer server.Close()
	if err := server.(*net.UDPConn).SetReadBuffer(4 << 20); err != nil {
		return err
	}
	c, err := from.Dial(context.Background(), "udp", netip.AddrPortFrom(to, burstPort).String())
	if err != nil {
		return err
	}
	defer c.Close()
	client := c.(*net.UDPConn)
	for deadline := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		if _, err := client.Write([]byte{0}); err != nil {
			return err
		}
		if n, _ := readWithin(server, make([]byte, 1<<16), 200*time.Millisecond); n == 1 {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("nothing arrives at %s", args[2])
		}
	}
	raw, err := client.SyscallConn()
	if err != nil {
		return err
	}
	if err := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size) }); err != nil {
		return err
	}
	buf := make([]byte, 1<<16)
	for n := 0; n < burstDatagrams; n += burstLength {
		var all []byte
		for i := range burstLength {
			all = append(all, burstDatagram(n+i, size)...)
		}
		if _, err := client.Write(all); err != nil {
			return err
		}
		for i := range burstLength {
			got := 1
			for got == 1 { // skip datagrams of one octet, of which several may have waited for the session
				if got, err = readWithin(server, buf, patience); err != nil {
					return fmt.Errorf("datagram %d: %w", n+i, err)
				}
			}
			if !bytes.Equal(buf[:got], burstDatagram(n+i, size)) {
				return fmt.Errorf("datagram %d came as %d octets, beginning with %x", n+i, got, buf[:min(got, 8)])
			}
		}
	}
	return nil
}

func readWithin(c net.PacketConn, buf []byte, d time.Duration) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(d)); err != nil {
		return 0, err
	}
	n, _, err := c.ReadFrom(buf)
	return n, err
}
