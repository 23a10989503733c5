package datapath

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

const (
	// StreamRate and StreamBurst bound the TCP segments of one peer to the in-process endpoint.
	StreamRate  = 8000 // per second
	StreamBurst = 1000

	// streamBuffer bounds what a connection keeps in memory in each direction, in octets. At a round trip of
	// 100 ms it lets 640 kB through in a second.
	streamBuffer = 64 << 10

	// streamTimeout ends a connection whose other end acknowledges nothing.
	streamTimeout = 30 * time.Second
	// streamClosing is how long Close waits for the other end before it resets the connection.
	streamClosing = time.Second

	// streamsOpening bounds the unfinished handshakes of all peers. The caller of Accept bounds
	// those of each peer.
	streamsOpening = 4096
)

// Streams are TCP connections between the in-process endpoint and the gateways of peers for which
// Peer.Streams is set. No other host can reach them: a segment is accepted only if the peer's key
// opened it and its source is an address of the peer's gateway. They have their own TCP/IP stack,
// so they delay neither connection checks nor ICMP.
type Streams struct {
	local  *Local
	number uint16
	stack  *stack.Stack
	link   *localLink
}

// A StreamRequest is a peer's request to connect. Call Accept or Refuse, once.
type StreamRequest struct {
	From    netip.Addr // of the peer's gateway, as this cluster sees it
	request *tcp.ForwarderRequest
}

// Accept completes the handshake. The peer can delay it.
func (r *StreamRequest) Accept() (net.Conn, error) {
	var queue waiter.Queue
	ep, err := r.request.CreateEndpoint(&queue)
	r.request.Complete(err != nil)
	if err != nil {
		return nil, errors.New(err.String())
	}
	return newStream(&queue, ep), nil
}

// Refuse answers with a reset.
func (r *StreamRequest) Refuse() { r.request.Complete(true) }

// A stream is a connection that leaves nothing in memory after Close.
type stream struct {
	*gonet.TCPConn
	ep   tcpip.Endpoint
	once sync.Once
}

func newStream(queue *waiter.Queue, ep tcpip.Endpoint) *stream {
	bounded(ep)
	return &stream{TCPConn: gonet.NewTCPConn(queue, ep), ep: ep}
}

func bounded(ep tcpip.Endpoint) {
	timeout := tcpip.TCPUserTimeoutOption(streamTimeout)
	_ = ep.SetSockOpt(&timeout) // never fails
}

// Close sends the data already written, if the other end accepts it soon. Otherwise the connection
// would stay in memory as long as that end acknowledges probes of its closed window.
func (s *stream) Close() error {
	s.once.Do(func() {
		_ = s.SetDeadline(time.Unix(1, 0))
		_ = s.ep.Shutdown(tcpip.ShutdownWrite)
		for end := time.Now().Add(streamClosing); s.closing() && time.Now().Before(end); {
			time.Sleep(streamClosing / 50)
		}
		s.ep.Abort()
		s.ep.Close()
	})
	return nil
}

// closing reports whether the other end still has data to receive, or has not closed its direction.
func (s *stream) closing() bool {
	switch tcp.EndpointState(s.ep.State()) {
	case tcp.StateEstablished, tcp.StateFinWait1, tcp.StateFinWait2, tcp.StateCloseWait, tcp.StateClosing, tcp.StateLastAck:
		return true
	}
	return false
}

// OpenStreams opens a port for streams. It calls accept for each request, in a goroutine of its own. There can
// be one for each endpoint.
func (l *Local) OpenStreams(number uint16, accept func(*StreamRequest)) (*Streams, error) {
	s := &Streams{local: l, number: number, link: newLocalLink(l.link.MTU()), stack: stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
	})}
	s.link.wake.Store(l.link.wake.Load())
	s.link.overflow.Store(l.link.overflow.Load())
	fail := func(err error) (*Streams, error) {
		s.stack.Destroy()
		return nil, fmt.Errorf("in-process endpoint: streams: %w", err)
	}
	if err := configure(s.stack, s.link, l.addrs); err != nil {
		return fail(err)
	}
	sack, retries := tcpip.TCPSACKEnabled(true), tcpip.TCPSynRetriesOption(3)
	sent := tcpip.TCPSendBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: streamBuffer, Max: streamBuffer}
	received := tcpip.TCPReceiveBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: streamBuffer, Max: streamBuffer}
	for _, o := range []tcpip.SettableTransportProtocolOption{&sack, &retries, &sent, &received} {
		if err := s.stack.SetTransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			return fail(fmt.Errorf("%T: %s", o, err))
		}
	}
	forwarder := tcp.NewForwarder(s.stack, streamBuffer, streamsOpening, func(r *tcp.ForwarderRequest) {
		remote := r.ID().RemoteAddress
		from, _ := netip.AddrFromSlice(remote.AsSlice())
		accept(&StreamRequest{from, r})
	})
	s.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, forwarder.HandlePacket)
	if l.closed.Load() || !l.streams.CompareAndSwap(nil, s) {
		return fail(net.ErrClosed)
	}
	return s, nil
}

// Dial connects to the gateway of a peer at its port of the same number.
func (s *Streams) Dial(ctx context.Context, to netip.Addr) (net.Conn, error) {
	protocol := ipv4.ProtocolNumber
	if to.Is6() {
		protocol = ipv6.ProtocolNumber
	}
	queue := new(waiter.Queue)
	ep, failed := s.stack.NewEndpoint(tcp.ProtocolNumber, protocol, queue)
	if failed != nil {
		return nil, errors.New(failed.String())
	}
	bounded(ep)
	connected, ready := waiter.NewChannelEntry(waiter.WritableEvents)
	queue.EventRegister(&connected)
	defer queue.EventUnregister(&connected)
	failed = ep.Connect(tcpip.FullAddress{NIC: localNIC, Addr: tcpip.AddrFromSlice(to.AsSlice()), Port: s.number})
	if _, started := failed.(*tcpip.ErrConnectStarted); started {
		select {
		case <-ctx.Done():
			ep.Close()
			return nil, ctx.Err()
		case <-ready:
		}
		failed = ep.LastError()
	}
	if failed != nil {
		ep.Close()
		return nil, errors.New(failed.String())
	}
	return newStream(queue, ep), nil
}

// close ends all streams.
func (s *Streams) close() {
	s.stack.Destroy()
	s.link.wake.Store(nil)
	s.link.Endpoint.Close()
}

// has reports whether a packet belongs to the streams: a segment to their port, or of a connection to the
// peer's.
func (s *Streams) has(v *packet.View) bool {
	_, _, _, fragment := v.Fragment()
	return s != nil && v.Proto() == packet.TCP && !fragment && (v.DstPort() == s.number || v.SrcPort() == s.number)
}

// deliver passes a segment of a peer to the stack, or returns the reason to drop it.
func (s *Streams) deliver(p *peer, v *packet.View, now time.Duration) natengine.Drop {
	// A peer connects from the address of its messages, and answers from the address that we dial.
	from := p.gatewayOf(v.Src())
	switch {
	case from != 0 && (from < 0 || v.SrcPort() != s.number), from == 0 && v.DstPort() != s.number:
		return natengine.DropLocalSource
	case !p.segments.take(now, 1, StreamRate, StreamBurst):
		return natengine.DropLocalRate
	case !v.ValidChecksums():
		return natengine.DropBadChecksum
	}
	protocol := ipv4.ProtocolNumber
	if !v.Is4() {
		protocol = ipv6.ProtocolNumber
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(v.Bytes())})
	s.link.InjectInbound(protocol, pkt)
	pkt.DecRef()
	return natengine.DropNone
}
