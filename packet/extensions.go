package packet

// maxExtensions bounds the number of IPv6 extension headers that are parsed. RFC 8200 lists
// six; senders use one or two.
const maxExtensions = 8

func (v *View) parse6(b []byte, csum ChecksumState) Error {
	if len(b) < ipv6Len {
		return ErrTruncated
	}
	total := ipv6Len + int(be.Uint16(b[4:6]))
	if total > len(b) {
		return ErrTruncated
	}
	v.b = b[:total:total]
	v.length = uint32(total)
	v.is4 = false
	v.proto = b[6]
	v.transport = ipv6Len
	v.fragID, v.fragOff, v.more = 0, 0, false
	if !isExtension(v.proto) {
		return v.parseTransport(csum)
	}
	if err := v.extensions(); err != 0 {
		return err
	}
	return v.parseTransport(csum)
}

func isExtension(proto uint8) bool {
	switch proto {
	case hopByHop, routing, fragmentHeader, authentication, destinationOptions:
		return true
	}
	return false
}

// extensionLen returns the length of the extension header e of the given kind. e has at least two
// octets.
func extensionLen(kind uint8, e []byte) int {
	switch kind {
	case fragmentHeader:
		return 8
	case authentication:
		return (int(e[1]) + 2) * 4 // in 4-octet units, unlike the other headers (RFC 4302, section 2.2)
	}
	return (int(e[1]) + 1) * 8
}

// wholeExtension returns the length of the extension header at the start of e. ok is false if e
// does not hold all of it.
func wholeExtension(kind uint8, e []byte) (size int, ok bool) {
	if len(e) < 8 {
		return 0, false
	}
	size = extensionLen(kind, e)
	return size, size <= len(e) && (kind != authentication || size >= authenticationLen)
}

// extensions parses the extension headers. It sets v.proto to the upper-layer protocol and
// v.transport to the offset of its header. In a later fragment, v.transport is the offset of the
// data, and v.proto is the next header of the fragment header. That value may be wrong, because
// receivers ignore it (RFC 8200, section 4.5).
func (v *View) extensions() Error {
	seen := false // whether there was a fragment header
	at := ipv6Len
	for n := 0; isExtension(v.proto); n++ {
		e := v.b[at:]
		short := ErrExtensionHeader
		if v.more {
			short = ErrTinyFragment // RFC 7112: the first fragment contains all headers
		}
		if n == maxExtensions || v.proto == hopByHop && n > 0 {
			return ErrExtensionHeader
		}
		size, ok := wholeExtension(v.proto, e)
		if !ok {
			return short
		}
		at += size
		v.transport = uint16(at)
		switch v.proto {
		case routing:
			if e[3] != 0 {
				return ErrSourceRoute
			}
		case fragmentHeader:
			if seen {
				return ErrExtensionHeader
			}
			seen = true
			word := be.Uint16(e[2:4])
			v.fragID = be.Uint32(e[4:8])
			if word&0xfff9 != 0 { // 0 means an atomic fragment, which is a whole packet (RFC 6946)
				if err := v.fragment(int(word&0xfff8), word&1 != 0, at-8-ipv6Len); err != 0 {
					return err
				}
			}
			if v.fragOff > 0 {
				v.proto = e[0]
				return 0
			}
		}
		v.proto = e[0]
	}
	return 0
}
