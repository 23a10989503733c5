//go:build !race

package gateway

import (
	"bufio"
	"bytes"
	"crypto/ecdh"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/noise"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// The crowd of TestOneHostilePeerBarelyAffectsAnHonestPeer consists of all other peers of the
// victim. It is a process of its own. Each of its peers has an address of the loopback network,
// makes a session with the victim, sends a PING every two seconds and answers the victim's PINGs.

const (
	crowdChild = "ISTHMUS_FAIRNESS_CROWD" // environment variable with the number of peers; set in the crowd's process
	crowdFirst = backID + 1               // ID of the first peer of the crowd
	crowdAgain = 5 * time.Second          // interval at which an unanswered handshake is repeated
)

// crowdAddr returns the address of a peer of the crowd.
func crowdAddr(n int) netip.Addr { return netip.AddrFrom4([4]byte{127, 64, byte(n >> 8), byte(n)}) }

// startCrowd starts the crowd's process. It returns the UDP port of all its peers. It also
// returns a function that passes the victim's address to the process, which then starts
// handshakes.
func startCrowd(t *testing.T, peers int) (port uint16, meet func(victim netip.AddrPort)) {
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestOneHostilePeerBarelyAffectsAnHonestPeer$")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", crowdChild, peers))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close() // makes the process exit
		_ = cmd.Wait()
	})
	if _, err := fmt.Fscan(bufio.NewReader(out), &port); err != nil {
		t.Fatal(err)
	}
	return port, func(victim netip.AddrPort) { fmt.Fprintln(in, victim) }
}

// crowdPeer is one peer of the crowd.
type crowdPeer struct {
	n         int
	own       *ecdh.PrivateKey
	handshake *noise.Handshake // started, and not answered yet; nil: none
	begun     time.Time
	session   *noise.Session            // the session for sending
	receive   map[uint32]*noise.Session // sessions for receiving, by our index
}

// fairCrowd is the state of the crowd's process.
type fairCrowd struct {
	conn   *ipv4.PacketConn
	victim netip.AddrPort
	key    *ecdh.PublicKey

	mu    sync.Mutex
	peers []*crowdPeer
}

// runCrowd is the main function of the crowd's process. It returns when standard input is closed.
func runCrowd(t *testing.T, peers int) {
	socket, err := net.ListenUDP("udp4", nil)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	// Without CAP_NET_ADMIN the buffer stays smaller.
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)
	})
	_, public := nthKey(0xffff)
	key, err := ecdh.X25519().NewPublicKey(public[:])
	if err != nil {
		t.Fatal(err)
	}
	c := &fairCrowd{conn: ipv4.NewPacketConn(socket), key: key}
	if err := c.conn.SetControlMessage(ipv4.FlagDst, true); err != nil {
		t.Fatal(err)
	}
	for n := crowdFirst; n < peers; n++ {
		private, _ := nthKey(n)
		own, err := ecdh.X25519().NewPrivateKey(private[:])
		if err != nil {
			t.Fatal(err)
		}
		c.peers = append(c.peers, &crowdPeer{n: n, own: own, receive: make(map[uint32]*noise.Session)})
	}
	fmt.Println(socket.LocalAddr().(*net.UDPAddr).Port)
	var at string
	if _, err := fmt.Fscan(os.Stdin, &at); err != nil {
		t.Fatal(err)
	}
	c.victim = netip.MustParseAddrPort(at)
	go c.turns()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		_ = socket.Close()
	}()
	for b := make([]byte, 2048); ; {
		size, control, _, err := c.conn.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || size < noise.HeaderLen || control == nil {
			continue
		}
		to := control.Dst.To4()
		if i := int(binary.BigEndian.Uint16(to[2:])) - crowdFirst; i >= 0 && i < len(c.peers) {
			c.mu.Lock()
			c.handle(c.peers[i], b[:size])
			c.mu.Unlock()
		}
	}
}

// turns gives each peer a turn every two seconds. In its turn a peer sends a PING or, without a
// session, starts a handshake.
func (c *fairCrowd) turns() {
	const slots = 200
	tick := time.NewTicker(2 * time.Second / slots)
	for at := 0; ; at = (at + 1) % slots {
		<-tick.C
		c.mu.Lock()
		for i := at; i < len(c.peers); i += slots {
			p := c.peers[i]
			switch {
			case p.session != nil:
				text := fmt.Sprintf(`{"clusterID":"victim","msgType":"PING","timeStamp":"%s"}`, time.Now().UTC().Format(time.RFC3339Nano))
				c.message(p, nthPods(p.n).Addr(), fabric.FirstHost(victimExternal), []byte(text))
			case time.Since(p.begun) > crowdAgain:
				var m []byte
				m, p.handshake = noise.Initiate(p.own, c.key, time.Now())
				p.begun = time.Now()
				p.receive[binary.LittleEndian.Uint32(m[4:])] = nil
				c.send(p, m)
			}
		}
		c.mu.Unlock()
	}
}

// handle processes a message that a peer has received.
func (c *fairCrowd) handle(p *crowdPeer, m []byte) {
	switch index := binary.LittleEndian.Uint32(m[4:]); m[0] {
	case noise.InitiationType:
		index = uint32(len(p.receive) + 1)
		response, s, err := noise.Respond(p.own, m, index)
		if err != nil {
			return
		}
		p.receive[index] = s // becomes the session for sending with the first message under it
		c.send(p, response)
	case noise.ResponseType:
		if p.handshake == nil {
			return
		}
		s, err := p.handshake.Finish(m)
		if err != nil {
			return
		}
		p.session, p.handshake = s, nil
		p.receive[binary.LittleEndian.Uint32(m[8:])] = s
		c.send(p, s.Seal(nil)) // confirms the session
	case noise.DataType:
		s := p.receive[index]
		if s == nil {
			return
		}
		b, err := s.Open(m)
		if err != nil {
			return
		}
		p.session = s
		if len(b) > 28 && binary.BigEndian.Uint16(b[22:]) == fabric.ProbePort && bytes.Contains(b, []byte("PING")) {
			text := b[28:binary.BigEndian.Uint16(b[2:])]
			from, to := netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
			c.message(p, to, from, bytes.Replace(text, []byte("PING"), []byte("PONG"), 1))
		}
	}
}

// message sends a PING or PONG of the connection check.
func (c *fairCrowd) message(p *crowdPeer, from, to netip.Addr, text []byte) {
	c.send(p, p.session.SealPadded(packettest.Build(packettest.IP{Src: from, Dst: to},
		packettest.UDP{SrcPort: fabric.ProbePort, DstPort: fabric.ProbePort, Data: text})))
}

func (c *fairCrowd) send(p *crowdPeer, m []byte) {
	// Ignore the error: handshakes and PINGs are repeated.
	_, _ = c.conn.WriteTo(slices.Clip(m), &ipv4.ControlMessage{Src: crowdAddr(p.n).AsSlice()}, net.UDPAddrFromAddrPort(c.victim))
}
