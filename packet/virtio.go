package packet

import "encoding/binary"

// VirtioHeaderLen is the length of struct virtio_net_hdr, which precedes each packet of a TUN
// that was opened with IFF_VNET_HDR.
const VirtioHeaderLen = 10

// Flags and GSO types of the virtio header (include/uapi/linux/virtio_net.h).
const (
	VirtioNeedsCsum uint8 = 1 // the transport checksum is partial
	VirtioDataValid uint8 = 2 // the transport checksum was verified

	GSONone  uint8 = 0
	GSOTCPv4 uint8 = 1
	GSOTCPv6 uint8 = 4
	GSOUDPL4 uint8 = 5    // UDP segmentation into datagrams, Linux 6.2 and later on a TUN
	GSOECN   uint8 = 0x80 // a bit beside the type: only the first segment has CWR
)

// VirtioHeader is struct virtio_net_hdr. It is encoded in native byte order, which is little
// endian on all supported machines.
type VirtioHeader struct {
	Flags      uint8
	GSOType    uint8
	HdrLen     uint16 // length of all headers; not reliable for forwarded packets
	GSOSize    uint16 // transport data in each segment but the last
	CsumStart  uint16 // offset of the transport header, where the checksummed part begins
	CsumOffset uint16 // offset of the checksum field from CsumStart
}

// Decode reads the first VirtioHeaderLen octets of b. It checks only that b is long enough;
// Validate checks the fields.
func (h *VirtioHeader) Decode(b []byte) error {
	if len(b) < VirtioHeaderLen {
		return ErrVirtioHeader
	}
	ne := binary.NativeEndian
	*h = VirtioHeader{
		Flags: b[0], GSOType: b[1],
		HdrLen: ne.Uint16(b[2:4]), GSOSize: ne.Uint16(b[4:6]), CsumStart: ne.Uint16(b[6:8]), CsumOffset: ne.Uint16(b[8:10]),
	}
	return nil
}

// Encode writes the header to the first VirtioHeaderLen octets of b.
func (h VirtioHeader) Encode(b []byte) {
	b = b[:VirtioHeaderLen]
	ne := binary.NativeEndian
	b[0], b[1] = h.Flags, h.GSOType
	ne.PutUint16(b[2:4], h.HdrLen)
	ne.PutUint16(b[4:6], h.GSOSize)
	ne.PutUint16(b[6:8], h.CsumStart)
	ne.PutUint16(b[8:10], h.CsumOffset)
}

// ChecksumState returns the checksum state to pass to View.Parse.
func (h VirtioHeader) ChecksumState() ChecksumState {
	if h.Flags&VirtioNeedsCsum != 0 {
		return ChecksumPartial
	}
	return ChecksumComplete
}

// FinishInner completes the partial checksum of a packet inside this one, and clears
// VirtioNeedsCsum. The caller must then parse the outer packet again, with ChecksumComplete. If a
// pod has its own tunnel (VXLAN, IPIP), the kernel may leave the checksum of the inner packet
// partial, because a device with NETIF_F_HW_CSUM can compute a checksum from any offset. The outer
// checksum, if there is one, is already right for the completed packet (local checksum offload,
// Documentation/networking/checksum-offloads.rst).
//
// b is the outer packet. FinishInner returns ErrVirtioHeader and leaves b unchanged in these
// cases: there is nothing to compute; b is a superpacket, a fragment, or TCP, which carries no
// tunnel; or the offsets are not after the outer transport header.
func (h *VirtioHeader) FinishInner(b []byte) error {
	var v View
	if h.Flags != VirtioNeedsCsum || h.GSOType != GSONone || v.Parse(b, ChecksumComplete) != nil {
		return ErrVirtioHeader
	}
	field := int(h.CsumStart) + int(h.CsumOffset)
	if v.proto == TCP || v.more || v.fragOff != 0 || h.CsumStart < v.payload || field+2 > len(v.b) {
		return ErrVirtioHeader
	}
	sum := Checksum(v.b[h.CsumStart:], 0) // includes the pseudo-header sum in the field
	if sum == 0 {
		// In UDP zero means "no checksum". In other protocols 0 and 0xffff are the same number, and
		// the kernel also writes 0xffff.
		sum = 0xffff
	}
	be.PutUint16(b[field:], sum)
	*h = VirtioHeader{}
	return nil
}

// Validate checks all fields except HdrLen against the packet that follows, which was parsed with
// h.ChecksumState(). gsoSize is the size of the data in each segment of a superpacket. It is 0 for
// a packet that needs no segmentation: no GSO type, or data that fits one segment. Callers use
// View.PayloadOffset instead of HdrLen. The error is ErrVirtioHeader or, for a superpacket that
// cannot be segmented, ErrGSO.
func (h VirtioHeader) Validate(v *View) (gsoSize int, err error) {
	if h.Flags&^(VirtioNeedsCsum|VirtioDataValid) != 0 {
		return 0, ErrVirtioHeader
	}
	partial := h.Flags&VirtioNeedsCsum != 0
	if partial != (v.csum == ChecksumPartial) {
		return 0, ErrVirtioHeader
	}
	if partial && (h.CsumStart != v.transport || h.CsumStart+h.CsumOffset != v.sum) {
		return 0, ErrVirtioHeader
	}
	if h.GSOType == GSONone {
		return 0, nil
	}
	fits := false
	switch h.GSOType &^ GSOECN {
	case GSOTCPv4:
		fits = v.is4 && v.proto == TCP
	case GSOTCPv6:
		fits = !v.is4 && v.proto == TCP
	case GSOUDPL4:
		fits = v.proto == UDP && h.GSOType == GSOUDPL4 // UDP has no ECN bit
	}
	if !fits || h.GSOSize == 0 || !partial {
		return 0, ErrVirtioHeader
	}
	if !v.segmentable() {
		return 0, ErrGSO
	}
	if v.Len()-v.PayloadOffset() <= int(h.GSOSize) {
		return 0, nil
	}
	return int(h.GSOSize), nil
}

// segmentable reports whether the packet may be a superpacket: a whole packet with a partial
// checksum, either TCP without SYN, RST and URG or UDP without a surplus area (RFC 9868). No sender
// makes a superpacket with these TCP flags, because every segment would repeat them.
func (v *View) segmentable() bool {
	// Parse allows a partial checksum only in whole TCP and UDP packets.
	if v.csum != ChecksumPartial || int(v.length) != len(v.b) {
		return false
	}
	if v.proto == UDP {
		return int(be.Uint16(v.b[v.transport+4:])) == len(v.b)-int(v.transport)
	}
	return v.b[v.transport+13]&(TCPSyn|TCPRst|TCPUrg) == 0
}
