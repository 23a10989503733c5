// Package packet parses and rewrites IP packets: bytes in, bytes out. It changes addresses and
// ports with incremental checksums, cuts superpackets into segments and joins segments into runs.
// It keeps no state between packets, reads no clock, opens no file and imports only the standard
// library.
//
//	out:  TUN ─► VirtioHeader.Decode ─► View.Parse ─► VirtioHeader.Validate ─► (NAT) ─► Segmenter ─► WireGuard
//	in:   WireGuard ─► Coalescer.Add ─► Coalescer.Runs ─► (NAT, once per run) ─► Run.Header, View, Tail ─► TUN
//
// Parse proves every length once; later code indexes without checking again. A View borrows the
// bytes that it parses and never copies them. Join, Split and Split6 return new memory. The
// other functions do not allocate once their scratch memory is large enough.
package packet

// Protocol numbers (IANA).
const (
	ICMP    uint8 = 1
	TCP     uint8 = 6
	UDP     uint8 = 17
	DCCP    uint8 = 33
	ICMPv6  uint8 = 58
	SCTP    uint8 = 132
	UDPLite uint8 = 136
)

// IPv6 extension headers (RFC 8200, section 4).
const (
	hopByHop           uint8 = 0
	routing            uint8 = 43
	fragmentHeader     uint8 = 44
	authentication     uint8 = 51
	destinationOptions uint8 = 60
)

// TCP flags, the low eight bits of the flag field (RFC 9293, section 3.1).
const (
	TCPFin uint8 = 1 << iota
	TCPSyn
	TCPRst
	TCPPsh
	TCPAck
	TCPUrg
	TCPEce
	TCPCwr
)

// Header lengths in octets.
const (
	ipv4Len   = 20 // without options
	ipv6Len   = 40 // without extension headers
	tcpLen    = 20 // without options
	udpLen    = 8
	icmpLen   = 8 // type, code, checksum and the four octets that follow in every type
	maxPacket = 65535

	authenticationLen = 12 // minimum (RFC 4302, section 2)
)

// Offsets of the checksum field in the transport header.
const (
	tcpSumOffset  = 16
	udpSumOffset  = 6
	icmpSumOffset = 2
)

// Error is the reason why bytes were refused. Its values are the constants below and can be
// compared. Converting an Error to the interface error does not allocate, so a flood of malformed
// packets costs no garbage.
type Error uint8

// The reasons, in the order in which a packet is examined.
const (
	ErrTruncated       Error = iota + 1 // fewer octets than the length in the IP header
	ErrVersion                          // neither IPv4 nor IPv6
	ErrHeaderLength                     // IPv4 header length below 20 octets or beyond the packet
	ErrTotalLength                      // IPv4 total length below the header length
	ErrOption                           // IPv4 options with inconsistent lengths
	ErrSourceRoute                      // IPv4 source route or unfinished IPv6 routing header: the destination is not the final one
	ErrExtensionHeader                  // IPv6 extension headers that are out of order, cut off or too many
	ErrTinyFragment                     // first fragment without its whole transport header, or later fragment that would overwrite that header (RFC 1858, 3128, 7112)
	ErrFragmentRange                    // fragment that is empty, or ends beyond 65535, or is not the last and has a length that is not a multiple of 8
	ErrTransportHeader                  // TCP, UDP or ICMP header that is cut off or has an impossible length
	ErrPartialChecksum                  // partial checksum on a fragment or on a protocol other than TCP and UDP
	ErrQuote                            // ICMP error that quotes no usable IP header
	ErrICMPChecksum                     // wrong checksum of an ICMP error
	ErrHeaderChecksum                   // wrong checksum of a quoted IPv4 header
	ErrVirtioHeader                     // virtio header that contradicts its packet
	ErrGSO                              // superpacket that cannot be segmented
	ErrJoin                             // fragments that do not form one datagram
)

var errorTexts = [...]string{
	ErrTruncated:       "packet truncated",
	ErrVersion:         "not IPv4 or IPv6",
	ErrHeaderLength:    "bad IPv4 header length",
	ErrTotalLength:     "bad IPv4 total length",
	ErrOption:          "bad IPv4 options",
	ErrSourceRoute:     "source route",
	ErrExtensionHeader: "bad IPv6 extension headers",
	ErrTinyFragment:    "tiny fragment",
	ErrFragmentRange:   "fragment out of range",
	ErrTransportHeader: "bad transport header",
	ErrPartialChecksum: "partial checksum not possible here",
	ErrQuote:           "bad quoted packet in ICMP error",
	ErrICMPChecksum:    "bad ICMP checksum",
	ErrHeaderChecksum:  "bad quoted header checksum",
	ErrVirtioHeader:    "virtio header contradicts packet",
	ErrGSO:             "superpacket cannot be segmented",
	ErrJoin:            "fragments do not make a datagram",
}

// Error returns the reason as text, without the name of the package.
func (e Error) Error() string {
	if e == 0 || int(e) >= len(errorTexts) {
		return "unknown packet error"
	}
	return errorTexts[e]
}
