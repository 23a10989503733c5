package kube

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/keyring"
)

// Datagrams from unknown addresses are dropped unread, and do not delay answers to a known gateway.
func TestFloodFromUnknownAddressesIsNotRead(t *testing.T) {
	for _, loopback := range []string{"127.0.0.1", "::1"} {
		t.Run(loopback, func(t *testing.T) { floodOfStrangers(t, netip.MustParseAddr(loopback)) })
	}
}

func floodOfStrangers(t *testing.T, loopback netip.Addr) {
	near, stranger := loopback, netip.MustParseAddr("127.0.0.3")
	if loopback.Is6() { // IPv6 has only one loopback address, so the stranger and the known gateway cannot both have one
		stranger = loopback
		near = netip.MustParseAddr("2001:db8::1")
	}
	open := func(addr netip.Addr) *net.UDPConn {
		conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
		if err != nil {
			t.Skip(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	conn, private := open(loopback), keyring.New()
	to := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	e := electionWith(&simLeases{}, "a", nil, quiet)
	e.addListed("b", near, false)
	var read, unread atomic.Int64
	q := &questioner{election: e, log: quiet, private: func() [32]byte { return private },
		listen: func() (net.PacketConn, error) { return conn, nil },
		refused: func(why string, n uint32) {
			if why == refusedUnread {
				unread.Add(int64(n))
			} else {
				read.Add(int64(n))
			}
		}}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { q.run(ctx) })
	defer running.Wait()
	defer stop()

	junk := make([]byte, questionLength)
	copy(junk, questionMagic[:])
	bad, sent := open(stranger), int64(0)
	flood := func(until time.Time) {
		for time.Now().Before(until) {
			for range 20 {
				if _, err := bad.WriteToUDPAddrPort(junk, to); err == nil {
					sent++
				}
			}
			time.Sleep(100 * time.Microsecond)
		}
	}
	flood(time.Now().Add(questionInterval)) // the first flood begins at an unknown point of a question interval
	if near == loopback {
		answers(t, open(near), to, private, e.id, flood)
	} else {
		flood(time.Now().Add(time.Second))
	}
	for end := time.Now().Add(5 * time.Second); read.Load()+unread.Load() < sent && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	t.Logf("%d sent, %d read", sent, read.Load())
	if n := read.Load(); n > sent/4 || n+unread.Load() != sent {
		t.Errorf("%d datagrams of a stranger were read, %d not: want %d together, and few of them read", n, unread.Load(), sent)
	}
}

// answers sends questions from conn during a flood, and requires that nearly all are answered.
func answers(t *testing.T, conn *net.UDPConn, to netip.AddrPort, private [32]byte, id gatewayID, flood func(time.Time)) {
	t.Helper()
	key, answered := questionKey(private), 0
	for i := range 20 {
		question := message{kind: kindQuestion, nonce: nonce{byte(i)}, from: idOf("b"), to: id}
		if _, err := conn.WriteToUDPAddrPort(question.seal(key), to); err != nil {
			t.Fatal(err)
		}
		flood(time.Now().Add(questionInterval / 5))
		buf := make([]byte, questionLength)
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		if _, _, err := conn.ReadFromUDPAddrPort(buf); err == nil {
			answered++
		}
	}
	t.Logf("%d of 20 questions were answered", answered)
	if answered < 18 { // the first questions may find the socket buffer full
		t.Errorf("%d of 20 questions were answered", answered)
	}
}
