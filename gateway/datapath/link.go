package datapath

import "errors"

// A Link carries IP packets between the gateway and the hosts on its side of the tunnel: a Linux
// TUN (gateway/tun) or memory (gateway/datapath/memlink). Each packet has the ten octets of the
// legacy virtio-net header (struct virtio_net_hdr, include/uapi/linux/virtio_net.h) in front, so
// that it may be a superpacket of up to 65535 octets and may leave its transport checksum to be
// finished.
//
// There is one reader at a time; Write, Wake, Name, MTU and Close may be called from any goroutine
// at any time.
type Link interface {
	// Read copies one packet, virtio header first, into p and returns its length. p must hold the
	// largest packet: packet.VirtioHeaderLen + 65535 octets. Without wait it returns ErrAgain when
	// no packet is there. With wait it blocks until there is a packet, until Wake (ErrWoken) or
	// until Close (os.ErrClosed). Any other error is the end of the link.
	Read(p []byte, wait bool) (int, error)
	// Wake makes the blocked Read, or else the next Read that would block, return ErrWoken. Several
	// calls before that count as one. Everything published before Wake is visible to the reader
	// after ErrWoken.
	Wake()
	// Write sends one packet made of the concatenation of bufs, the first of which starts with the
	// virtio header. It does not keep bufs. An error means that this packet was lost; os.ErrClosed
	// means that all later ones will be lost, too.
	Write(bufs [][]byte) error
	// Name is the interface name.
	Name() string
	// MTU is the largest IP packet in octets that is not a superpacket.
	MTU() int
	// Close ends Read and Write with os.ErrClosed. Further calls do nothing.
	Close() error
}

var (
	// ErrAgain means that a Read without wait found no packet.
	ErrAgain = errors.New("no packet")
	// ErrWoken means that Wake ended a waiting Read.
	ErrWoken = errors.New("woken")
)
