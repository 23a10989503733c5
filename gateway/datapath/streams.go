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
	// StreamRate and StreamBurst limit the TCP segments from one peer to the in-process endpoint.
	StreamRate  = 8000 // per second
	StreamBurst = 1000

	// streamBuffer is the size in octets of a connection's buffer in each direction. With a
	// round-trip time of 100 ms it allows 640 kB a second.
	streamBuffer = 64 << 10

	// streamTimeout is the time after which a connection ends if the other end acknowledges nothing.
	streamTimeout = 30 * time.Second
	// streamClosing is the time that Close waits for the other end before it resets the connection.
	streamClosing = time.Second

	// streamsOpening is the maximum number of unfinished TCP handshakes of all peers. The function
	// accept of OpenStreams must limit those of each peer.
	streamsOpening = 4096
)

// Streams makes TCP connections between the in-process endpoint and the gateways of those peers for
// which Peer.Streams is set. No other host can connect: a segment is accepted only if it was
// encrypted with the peer's key and comes from an address of the peer's gateway. Streams has its
// own TCP/IP stack, so connections do not delay connection checks or ICMP.
type Streams struct {
	local  *Local
	number uint16
	stack  *stack.Stack
	link   *localLink
}

// A StreamRequest is a peer's request to connect. Call either Accept or Refuse, once.
type StreamRequest struct {
	From    netip.Addr // address of the peer's gateway, as this cluster sees it
	request *tcp.ForwarderRequest
}

// Accept completes the TCP handshake. It waits for the peer, which may delay it.
func (r *StreamRequest) Accept() (net.Conn, error) {
	var queue waiter.Queue
	ep, err := r.request.CreateEndpoint(&queue)
	r.request.Complete(err != nil)
	if err != nil {
		return nil, errors.New(err.String())
	}
	return newStream(&queue, ep), nil
}

// Refuse answers the request with a reset.
func (r *StreamRequest) Refuse() { r.request.Complete(true) }

// A stream is a connection whose Close releases all its memory.
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
	_ = ep.SetSockOpt(&timeout) // cannot fail
}

// Close sends data already written, if the other end accepts it within streamClosing. Otherwise
// it resets the connection, which would stay in memory as long as the other end acknowledges
// probes of its closed window.
func (s *stream) Close() error {
	s.once.Do(func() {
		_ = s.SetDeadline(time.Unix(1, 0))
		_ = s.ep.Shutdown(tcpip.ShutdownWrite)
		for end := time.Now().Add(streamClosing); s.isClosing() && time.Now().Before(end); {
			time.Sleep(streamClosing / 50)
		}
		s.ep.Abort()
		s.ep.Close()
	})
	return nil
}

// isClosing reports whether the other end has not yet received all data or has not yet closed its
// direction.
func (s *stream) isClosing() bool {
	switch tcp.EndpointState(s.ep.State()) {
	case tcp.StateEstablished, tcp.StateFinWait1, tcp.StateFinWait2, tcp.StateCloseWait, tcp.StateClosing, tcp.StateLastAck:
		return true
	}
	return false
}

// OpenStreams opens a TCP port for streams. It calls accept for each request, in a new goroutine.
// An endpoint can have only one Streams.
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

// Dial connects to the gateway of a peer, at the same port number as that of s.
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

func (s *Streams) close() {
	s.stack.Destroy()
	s.link.wake.Store(nil)
	s.link.Endpoint.Close()
}

// isSegment reports whether a packet is a TCP segment of a stream: a segment to our port, or a
// segment of a connection to the peer's port.
func (s *Streams) isSegment(v *packet.View) bool {
	_, _, _, fragment := v.Fragment()
	return s != nil && v.Proto() == packet.TCP && !fragment && (v.DstPort() == s.number || v.SrcPort() == s.number)
}

// deliver passes a segment from a peer to the stack, or returns the reason to drop it.
func (s *Streams) deliver(p *peer, v *packet.View, now time.Duration) natengine.Drop {
	// A peer connects from the source address of its messages. It accepts connections at the address
	// to which we send.
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
