package interop

import (
	"crypto/ecdh"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

var long = flag.Bool("long", false, "rotate the key for ten minutes")

// Limits of the loss in a rotation. When the peer replaces our key, it drops the sessions with the
// former key. So it loses the packets in flight, and those that arrive before its next packet has
// started a session: together at most the packets of two round trips (WireGuard's paper, section
// 5.4.3). A round trip is shorter than the interval between datagrams here, so that is one datagram
// for each round trip.
//
// A peer that only answers starts no handshake. The gateway starts one within 350 ms after the
// peer's last answer.
const (
	interval        = 10 * time.Millisecond // between two datagrams
	lostByRotation  = 2
	lostByAnswering = 35 + lostByRotation
)

// TestRotationLosesFewPacketsWithWireGuardGo rotates the gateway's key. Its peer replaces the key
// as Liqo's gateway does: it removes the former peer and adds the new one.
func TestRotationLosesFewPacketsWithWireGuardGo(t *testing.T) {
	s := newSite(t)
	s.handshake()
	// A machine that does other work may lose more datagrams in a single run. So without -long, the
	// test allows more of them, and three tries. It would still detect a tunnel that is closed from
	// the peer's change until the end of the rotation, because that would lose more than a hundred.
	length, period, settle, streams, busy, tries := 15*time.Second, 5*time.Second, time.Second, 4, 20, 3
	if *long {
		length, period, settle, streams, busy, tries = 10*time.Minute, 20*time.Second, 10*time.Second, 50, 0, 1
	}
	for try := range tries {
		control := s.traffic(length, period, streams, false, func() {})
		rotated := s.traffic(length, period, streams, false, func() { s.rotate(settle) })
		answering := s.traffic(length, period, 0, true, func() { s.rotate(settle) })
		t.Logf("control: %v", control)
		t.Logf("%d rotations: %v", len(rotated.gaps), rotated)
		t.Logf("%d rotations while the peer only answers: %v", len(answering.gaps), answering)
		most, mostAnswering := control.lost+(lostByRotation+busy)*len(rotated.gaps), control.lost+(lostByAnswering+busy)*len(answering.gaps)
		if rotated.lost <= most && answering.lost <= mostAnswering {
			break
		} else if try == tries-1 {
			t.Errorf("rotations lost %d datagrams, and %d while the peer only answered: want %d and %d at most", rotated.lost, answering.lost, most, mostAnswering)
		}
	}
}

// rotate sets a next key in the gateway, and in the peer half a second after the gateway accepts
// it.
func (s *site) rotate(settle time.Duration) {
	next := newKey(s.T)
	file := hex.EncodeToString(next.PublicKey().Bytes()[:8]) + ".key"
	s.write(file, text(next.Bytes())+"\n")
	s.write("gateway.yaml", s.gatewayYAML+"nextPrivateKeyFile: "+file+"\n")
	public := text(next.PublicKey().Bytes())
	s.eventually("the gateway answers to its next key", func() error {
		st, err := s.status()
		if err == nil && st.NextPublicKey != public {
			err = fmt.Errorf("its next key is %q", st.NextPublicKey)
		}
		return err
	})
	time.Sleep(500 * time.Millisecond)
	s.wg.replacePeer(s.keyA.PublicKey(), next.PublicKey(), netip.AddrPortFrom(nodeUnderlay, 5871), podsAatB, extAatB)
	time.Sleep(settle)
	s.gatewayYAML = strings.Replace(s.gatewayYAML, s.keyFile, file, 1)
	s.keyA, s.keyFile = next, file
	s.write("gateway.yaml", s.gatewayYAML)
	s.eventually("the next key is the current one", func() error {
		st, err := s.status()
		if err == nil && (st.PublicKey != public || st.NextPublicKey != "") {
			err = fmt.Errorf("its keys are %q and %q", st.PublicKey, st.NextPublicKey)
		}
		return err
	})
}

// write replaces a file of the gateway's configuration.
func (s *site) write(name, content string) {
	s.Helper()
	temporary := filepath.Join(s.config, "."+name)
	if err := errors.Join(os.WriteFile(temporary, []byte(content), 0o600), os.Rename(temporary, filepath.Join(s.config, name))); err != nil {
		s.Fatal(err)
	}
}

// replacePeer removes a peer and adds another one in its place.
func (d *wgDevice) replacePeer(former, next *ecdh.PublicKey, endpoint netip.AddrPort, allowed ...netip.Prefix) {
	d.t.Helper()
	d.talk(fmt.Sprintf("set=1\npublic_key=%s\nremove=true\n", hex.EncodeToString(former.Bytes())))
	var b strings.Builder
	fmt.Fprintf(&b, "set=1\npublic_key=%s\nreplace_allowed_ips=true\nendpoint=%s\n", hex.EncodeToString(next.Bytes()), endpoint)
	for _, p := range allowed {
		fmt.Fprintf(&b, "allowed_ip=%s\n", p)
	}
	d.talk(b.String())
}

// A loss describes which echoed datagrams were lost.
type loss struct {
	sent, lost int
	gaps       []time.Duration // the longest time between two echoes in each period
}

func (l loss) String() string {
	return fmt.Sprintf("%d of %d datagrams lost, longest gaps %v", l.lost, l.sent, l.gaps)
}

// traffic sends datagrams from the peer to pod a, one per interval, and counts the echoes.
// Meanwhile TCP streams run, none of which may break. If answers is true, the pod sends and the
// peer echoes, so that the peer's WireGuard starts no handshake. traffic calls action once in each
// period.
func (s *site) traffic(length, period time.Duration, streams int, answers bool, action func()) loss {
	s.Helper()
	const port = 7
	there := netip.AddrPortFrom(bAtA, port)
	var client, server *net.UDPConn
	var to netip.AddrPort // address of the server, as the client sees it
	if answers {
		client, server, to = s.pod.ListenUDP(netip.AddrPortFrom(a, 0)), s.peer.ListenUDP(there), there
	} else {
		client, server = s.peer.ListenUDP(netip.AddrPortFrom(bAtA, 0)), s.pod.ListenUDP(netip.AddrPortFrom(a, port))
		to = netip.AddrPortFrom(aAtB, port)
	}
	var echoing, talking sync.WaitGroup
	echoing.Go(func() {
		b := make([]byte, 1500)
		for {
			n, from, err := server.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = server.WriteToUDPAddrPort(b[:n], from)
		}
	})
	begin := time.Now()
	arrived := make(map[uint32]time.Duration)
	echoing.Go(func() {
		b := make([]byte, 1500)
		for {
			n, err := client.Read(b)
			if err != nil {
				return
			}
			if n == 4 {
				arrived[binary.BigEndian.Uint32(b)] = time.Since(begin)
			}
		}
	})
	listener := s.peer.ListenTCP(there)
	broken := make(chan error, 2*streams)
	done := make(chan struct{})
	for range streams {
		c, err := s.pod.DialTCP(a, there)
		if err != nil {
			s.Fatal(err)
		}
		far, err := listener.AcceptTCP()
		if err != nil {
			s.Fatal(err)
		}
		talking.Go(func() { broken <- repeat(far) })
		talking.Go(func() { broken <- speak(c, done) })
	}
	var l loss
	talking.Go(func() {
		for tick := time.NewTicker(interval); ; l.sent++ {
			select {
			case <-done:
				tick.Stop()
				return
			case <-tick.C:
				_, _ = client.WriteToUDPAddrPort(binary.BigEndian.AppendUint32(nil, uint32(l.sent)), to)
			}
		}
	})
	for next := begin.Add(period / 5); next.Before(begin.Add(length)); next = next.Add(period) {
		time.Sleep(time.Until(next))
		action()
	}
	time.Sleep(time.Until(begin.Add(length)))
	close(done)
	talking.Wait()
	failed := 0
	for range 2 * streams {
		if err := <-broken; err != nil {
			failed++
			s.Errorf("a TCP stream: %v", err)
		}
	}
	time.Sleep(2 * time.Second) // wait for the last echoes
	client.Close()
	server.Close()
	listener.Close()
	echoing.Wait()
	s.Logf("%d of %d TCP connections broken", failed, streams)

	last := time.Duration(0)
	l.gaps = make([]time.Duration, (length+period-1)/period)
	for n := range uint32(l.sent) {
		now, ok := arrived[n]
		if !ok {
			l.lost++
			continue
		}
		slot := min(int(now/period), len(l.gaps)-1)
		l.gaps[slot] = max(l.gaps[slot], (now - last).Round(time.Millisecond))
		last = max(now, last)
	}
	return l
}

// speak writes a line every 50 ms and checks that it is echoed, until done is closed.
func speak(c *net.TCPConn, done <-chan struct{}) error {
	defer c.Close()
	for n := uint64(0); ; n++ {
		select {
		case <-done:
			return nil
		case <-time.After(50 * time.Millisecond):
		}
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		var back [8]byte
		if _, err := c.Write(binary.BigEndian.AppendUint64(nil, n)); err != nil {
			return err
		}
		if _, err := io.ReadFull(c, back[:]); err != nil {
			return err
		}
		if got := binary.BigEndian.Uint64(back[:]); got != n {
			return fmt.Errorf("%d came back, and %d was sent", got, n)
		}
	}
}

// repeat echoes everything it receives.
func repeat(c *net.TCPConn) error {
	defer c.Close()
	_, err := io.Copy(c, c)
	return err
}
