package datapath

import "errors"

// A Link carries IP packets between the gateway and the hosts on its side of the tunnel. It is a
// Linux TUN (gateway/tun) or in memory (gateway/datapath/memlink). Each packet is preceded by the
// ten octets of the legacy virtio-net header (struct virtio_net_hdr,
// include/uapi/linux/virtio_net.h). So a packet may be a superpacket of up to 65535 octets, and
// its transport checksum may be incomplete.
//
// Only one goroutine at a time may call Read. Write, Wake, Name, MTU and Close may be called from
// any goroutine at any time.
type Link interface {
	// Read copies one packet, with its virtio header, into p and returns the total length. p must
	// have room for the largest packet: packet.VirtioHeaderLen + 65535 octets. If there is no
	// packet and mayBlock is false, Read returns ErrAgain. If mayBlock is true, Read waits for a
	// packet, for Wake (ErrWoken) or for Close (os.ErrClosed). Any other error means that the link
	// has ended.
	Read(p []byte, mayBlock bool) (int, error)
	// Wake makes a blocked Read return ErrWoken. If no Read is blocked, the next one that would
	// block returns ErrWoken. Several calls before ErrWoken count as one. Everything published
	// before Wake is visible to the reader after ErrWoken.
	Wake()
	// Write sends one packet, the concatenation of bufs, which starts with the virtio header. It
	// does not keep bufs. An error means that this packet was lost; os.ErrClosed means that all
	// later ones will be lost as well.
	Write(bufs [][]byte) error
	// Name returns the interface name.
	Name() string
	// MTU returns the size of the largest IP packet, in octets, that is not a superpacket.
	MTU() int
	// Close makes Read and Write return os.ErrClosed. Further calls do nothing.
	Close() error
}

var (
	// ErrAgain means that a Read that must not block found no packet.
	ErrAgain = errors.New("no packet")
	// ErrWoken means that Wake ended a waiting Read.
	ErrWoken = errors.New("woken")
)
