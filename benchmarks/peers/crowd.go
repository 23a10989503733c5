package main

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/noise"
	"github.com/isthmus-net/isthmus/packet"
)

// The networks and addresses of the gateway and of peer i. All clusters have the same networks.
var (
	localPods, localExternal = netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.245.0.0/20")
	seenPods, seenExternal   = netip.MustParsePrefix("10.246.0.0/16"), netip.MustParsePrefix("10.247.0.0/20")
	firstEndpoint            = netip.MustParseAddr("198.18.0.0")
	endpoints                = netip.MustParsePrefix("198.18.0.0/15")
)

const (
	maxPeers     = 4096
	peerPort     = 51820 // first port of a peer; a moved peer uses the port after it
	checkPort    = 12345
	pingInterval = 2 * time.Second // Liqo's interval
	pingBatches  = 100             // the peers are divided into batches, to spread their PINGs over the interval
)

// keyOf returns the private key of peer i.
func keyOf(i int) *ecdh.PrivateKey {
	seed := sha256.Sum256(fmt.Appendf(nil, "peer %d", i))
	k, err := ecdh.X25519().NewPrivateKey(seed[:])
	if err != nil {
		panic(err)
	}
	return k
}

func idOf(i int) string { return fmt.Sprintf("%08x-0000-4000-8000-000000000000", i+1) }

// plus returns the address n after a.
func plus(a netip.Addr, n uint32) netip.Addr {
	b := a.As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+n)
	return netip.AddrFrom4(b)
}

// peerOf returns the gateway's configuration of peer i. moved selects the peer's second port.
func peerOf(i int, moved bool) fabric.Peer {
	p := fabric.Peer{
		ID: idOf(i), Name: fmt.Sprintf("peer-%d", i), Endpoint: plus(firstEndpoint, uint32(i)).String(), Port: peerPort,
		Local: fabric.Networks{Pod: localPods, PodSeen: seenPods, External: localExternal, ExternalSeen: seenExternal},
		Remote: fabric.Networks{Pod: netip.MustParsePrefix("10.244.0.0/20"), External: netip.MustParsePrefix("10.245.0.0/24"),
			PodSeen:      netip.PrefixFrom(plus(netip.MustParseAddr("11.0.0.0"), uint32(i)<<12), 20),
			ExternalSeen: netip.PrefixFrom(plus(netip.MustParseAddr("100.64.0.0"), uint32(i)<<8), 24)},
	}
	if moved {
		p.Port++
	}
	copy(p.PublicKey[:], keyOf(i).PublicKey().Bytes())
	return p
}

// A crowd is the remote side of all peers. Each peer has its own key, address and session. Like
// Liqo, a peer answers PINGs of the connection check and sends one every two seconds. A peer starts
// no handshakes.
type crowd struct {
	sockets    [2]*ipv4.PacketConn
	remotePeer []*remotePeer

	mu       sync.Mutex
	answered map[int]time.Time // time of the first PONG that peer i received since reset
}

// remotePeer is the state of one simulated peer.
type remotePeer struct {
	key     *ecdh.PrivateKey
	addr    net.IP
	ping    netip.AddrPort // address inside the tunnel from which the peer sends PINGs
	mu      sync.Mutex
	current *noise.Session
	next    [256]*noise.Session // sessions by the low octet of the index
	last    byte
	gateway net.Addr // source of the gateway's messages
	socket  int
	moved   bool // the peer no longer uses its first port
}

// newCrowd opens the sockets in the host to which all endpoint addresses are routed.
func newCrowd(host *lab.Host) (*crowd, error) {
	c := &crowd{answered: make(map[int]time.Time)}
	for i := range maxPeers {
		c.remotePeer = append(c.remotePeer, &remotePeer{key: keyOf(i), addr: plus(firstEndpoint, uint32(i)).AsSlice(),
			ping: netip.AddrPortFrom(peerOf(i, false).Remote.PodSeen.Addr(), checkPort)})
	}
	for i := range c.sockets {
		conn, err := host.ListenPacket("udp4", fmt.Sprintf("0.0.0.0:%d", peerPort+i))
		if err != nil {
			return nil, err
		}
		raw, err := conn.(*net.UDPConn).SyscallConn()
		if err != nil {
			return nil, err
		}
		var failed error
		err = raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20) })
		if err == nil {
			err = failed
		}
		if err != nil {
			return nil, err
		}
		c.sockets[i] = ipv4.NewPacketConn(conn)
		if err := c.sockets[i].SetControlMessage(ipv4.FlagDst, true); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// run answers PINGs and sends them until ctx ends.
func (c *crowd) run(ctx context.Context) {
	var group sync.WaitGroup
	for i := range c.sockets {
		group.Go(func() { c.receive(i) })
	}
	group.Go(func() { c.ping(ctx) })
	<-ctx.Done()
	for _, s := range c.sockets {
		_ = s.Close()
	}
	group.Wait()
}

func (c *crowd) receive(socket int) {
	buf := make([]byte, 4096)
	for {
		n, control, from, err := c.sockets[socket].ReadFrom(buf)
		if err != nil {
			return
		}
		dst, ok := netip.AddrFromSlice(control.Dst)
		if !ok || !endpoints.Contains(dst.Unmap()) {
			continue
		}
		i := int(binary.BigEndian.Uint32(dst.Unmap().AsSlice()) - binary.BigEndian.Uint32(firstEndpoint.AsSlice()))
		if i >= len(c.remotePeer) || n < 8 {
			continue
		}
		if out := c.message(i, socket, buf[:n], from); out != nil {
			c.write(c.remotePeer[i], out)
		}
	}
}

// message handles a message to peer i and returns the answer.
func (c *crowd) message(i, socket int, m []byte, from net.Addr) []byte {
	f := c.remotePeer[i]
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.moved && socket == 0: // the first port is no longer in use
	case m[0] == noise.InitiationType:
		f.last++
		response, s, err := noise.Respond(f.key, m, uint32(i)<<8|uint32(f.last))
		if err != nil {
			return nil
		}
		f.next[f.last], f.gateway, f.socket = s, from, socket
		return response
	case m[0] == noise.DataType && len(m) >= noise.HeaderLen+noise.TagLen:
		s := f.next[m[4]]
		if s == nil {
			return nil
		}
		inner, err := s.Open(m)
		if err != nil {
			return nil
		}
		f.current, f.gateway, f.socket = s, from, socket
		if answer := pong(inner); answer != nil {
			c.note(i)
			return s.SealPadded(answer)
		}
	}
	return nil
}

func (c *crowd) write(f *remotePeer, m []byte) {
	_, _ = c.sockets[f.socket].WriteTo(m, &ipv4.ControlMessage{Src: f.addr}, f.gateway) // may be lost like any datagram
}

// pong returns the answer to a PING, or nil for any other packet.
func pong(p []byte) []byte {
	if len(p) < 28 || p[0] != 0x45 || p[9] != unix.IPPROTO_UDP {
		return nil
	}
	n := int(binary.BigEndian.Uint16(p[2:]))
	if n > len(p) || n < 28 {
		return nil
	}
	index := bytes.Index(p[28:n], []byte(`"PING"`))
	if index < 0 {
		return nil
	}
	b := bytes.Clone(p[:n])
	b[28+index+2] = 'O'
	src, dst := [4]byte(p[12:16]), [4]byte(p[16:20])
	return datagram(b[28:], netip.AddrPortFrom(netip.AddrFrom4(dst), binary.BigEndian.Uint16(p[22:])), netip.AddrPortFrom(netip.AddrFrom4(src), binary.BigEndian.Uint16(p[20:])))
}

// datagram returns a complete IPv4 UDP packet.
func datagram(payload []byte, from, to netip.AddrPort) []byte {
	b := make([]byte, 28+len(payload))
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	copy(b[12:], from.Addr().AsSlice())
	copy(b[16:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(b[10:], packet.Checksum(b[:20], 0))
	u := b[20:]
	binary.BigEndian.PutUint16(u, from.Port())
	binary.BigEndian.PutUint16(u[2:], to.Port())
	binary.BigEndian.PutUint16(u[4:], uint16(len(u)))
	copy(u[8:], payload)
	pseudo := uint64(len(u)) + unix.IPPROTO_UDP
	for i := 12; i < 20; i += 2 {
		pseudo += uint64(binary.BigEndian.Uint16(b[i:]))
	}
	binary.BigEndian.PutUint16(u[6:], packet.Checksum(u, pseudo))
	return b
}

// ping sends a PING to the gateway for each peer that has a session.
func (c *crowd) ping(ctx context.Context) {
	to := netip.AddrPortFrom(seenExternal.Addr().Next(), checkPort)
	turns := time.NewTicker(pingInterval / pingBatches)
	defer turns.Stop()
	for turn := 0; ; turn++ {
		select {
		case <-ctx.Done():
			return
		case <-turns.C:
		}
		for i := turn % pingBatches; i < len(c.remotePeer); i += pingBatches {
			f := c.remotePeer[i]
			f.mu.Lock()
			var m []byte
			if f.current != nil {
				text, _ := json.Marshal(struct {
					ClusterID string `json:"clusterID"`
					MsgType   string `json:"msgType"`
					Timestamp string `json:"timeStamp"`
				}{"11111111-0000-4000-8000-000000000000", "PING", time.Now().UTC().Format(time.RFC3339Nano)})
				m = f.current.SealPadded(datagram(text, f.ping, to))
			}
			f.mu.Unlock()
			if m != nil {
				c.write(f, m)
			}
		}
	}
}

// answeredPings counts the PINGs that the gateway answered.
var answeredPings atomic.Int64

func (c *crowd) note(i int) {
	answeredPings.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.answered[i]; !ok {
		c.answered[i] = time.Now()
	}
}

// reset clears the answer times. It moves the first peers, as many as moved, to their second port,
// and all others to their first.
func (c *crowd) reset(moved int) {
	for i, f := range c.remotePeer {
		f.mu.Lock()
		f.socket, f.moved = min(1, max(0, moved-i)), i < moved
		f.mu.Unlock()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.answered)
}

// wait waits until n peers have received an answer. It returns the times at which half of these
// peers, and all of them, had an answer.
func (c *crowd) wait(ctx context.Context, n int) (half, all time.Time, err error) {
	for {
		c.mu.Lock()
		have := len(c.answered)
		if have >= n {
			half, all = spread(c.answered)
		}
		c.mu.Unlock()
		if have >= n {
			return half, all, nil
		}
		select {
		case <-ctx.Done():
			return half, all, fmt.Errorf("%d of %d peers are connected: %w", have, n, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// move moves a peer to its second port.
func (c *crowd) move(i int) {
	f := c.remotePeer[i]
	f.mu.Lock()
	defer f.mu.Unlock()
	f.socket, f.moved = 1, true
}

// forget clears a peer's answer time; has reports whether the peer has received an answer since.
func (c *crowd) forget(i int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.answered, i)
}

func (c *crowd) has(i int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.answered[i]
	return ok
}

// spread returns the times at which half of the peers, and all of them, had an answer.
func spread(answered map[int]time.Time) (half, all time.Time) {
	times := slices.SortedFunc(maps.Values(answered), time.Time.Compare)
	return times[len(times)/2], times[len(times)-1]
}
