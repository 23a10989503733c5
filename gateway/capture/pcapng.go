package capture

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// The format is pcapng (draft-ietf-opsawg-pcapng): a section header, an interface description
// for each place, an enhanced packet block for each packet, and finally interface statistics.
const (
	blockSection    = 0x0a0d0d0a
	blockInterface  = 1
	blockStatistics = 5
	blockPacket     = 6

	byteOrderMagic = 0x1a2b3c4d
	linkTypeRaw    = 101 // IPv4 or IPv6, by the version field (LINKTYPE_RAW)

	optionEnd         = 0
	optionComment     = 1
	sectionProgram    = 4
	interfaceName     = 2
	interfaceText     = 3
	interfaceTime     = 9
	packetFlags       = 2
	packetLost        = 4
	statisticsStart   = 2
	statisticsEnd     = 3
	statisticsPassed  = 4
	statisticsDropped = 5

	nanoseconds = 9 // value of interfaceTime: 10^-9 s
)

var le = binary.LittleEndian

// block appends a block of the given kind. fill appends the block's body.
func block(b []byte, kind uint32, fill func([]byte) []byte) []byte {
	start := len(b)
	b = le.AppendUint32(b, kind)
	b = le.AppendUint32(b, 0)
	b = fill(b)
	size := uint32(len(b) - start + 4)
	le.PutUint32(b[start+4:], size)
	return le.AppendUint32(b, size)
}

// option appends an option, unless value is empty.
func option(b []byte, code uint16, value string) []byte {
	value = value[:min(len(value), math.MaxUint16)]
	if value == "" {
		return b
	}
	b = le.AppendUint16(b, code)
	b = le.AppendUint16(b, uint16(len(value)))
	return pad(append(b, value...), len(value))
}

func option64(b []byte, code uint16, value uint64) []byte {
	b = le.AppendUint16(b, code)
	b = le.AppendUint16(b, 8)
	return le.AppendUint64(b, value)
}

// optionTime appends an option that holds a time. The upper 32 bits come first.
func optionTime(b []byte, code uint16, t time.Time) []byte {
	ns := uint64(t.UnixNano())
	return option64(b, code, ns>>32|ns<<32)
}

func endOfOptions(b []byte) []byte { return le.AppendUint32(b, optionEnd) }

// pad appends zeros to a field of size octets, up to a multiple of four.
func pad(b []byte, size int) []byte {
	for range -size & 3 {
		b = append(b, 0)
	}
	return b
}

// header appends the blocks that precede the first packet.
func header(b []byte, program string, snap int) []byte {
	b = block(b, blockSection, func(b []byte) []byte {
		b = le.AppendUint32(b, byteOrderMagic)
		b = le.AppendUint16(b, 1) // version 1.0
		b = le.AppendUint16(b, 0)
		b = le.AppendUint64(b, math.MaxUint64) // section length: unknown
		return endOfOptions(option(b, sectionProgram, program))
	})
	for _, p := range places {
		b = block(b, blockInterface, func(b []byte) []byte {
			b = le.AppendUint16(b, linkTypeRaw)
			b = le.AppendUint16(b, 0)
			b = le.AppendUint32(b, uint32(snap))
			b = option(b, interfaceName, p.String())
			b = option(b, interfaceText, placeTexts[p])
			b = option(b, interfaceTime, string([]byte{nanoseconds}))
			return endOfOptions(b)
		})
	}
	return b
}

// packetBlock appends the block of a packet. gap is the number of packets that the
// file lacks between this one and the previous one of the same place.
func packetBlock(b []byte, p Place, t time.Time, dir natengine.Direction, length int, gap uint64, comment string, parts ...[]byte) []byte {
	return block(b, blockPacket, func(b []byte) []byte {
		ns, size := uint64(t.UnixNano()), 0
		for _, part := range parts {
			size += len(part)
		}
		b = le.AppendUint32(b, uint32(p))
		b = le.AppendUint32(b, uint32(ns>>32))
		b = le.AppendUint32(b, uint32(ns))
		b = le.AppendUint32(b, uint32(size))
		b = le.AppendUint32(b, uint32(length))
		for _, part := range parts {
			b = append(b, part...)
		}
		b = pad(b, size)
		flags := uint32(1) // inbound
		if dir == natengine.Outbound {
			flags = 2
		}
		b = le.AppendUint16(b, packetFlags)
		b = le.AppendUint16(b, 4)
		b = le.AppendUint32(b, flags)
		if gap > 0 {
			b = option64(b, packetLost, gap)
		}
		return endOfOptions(option(b, optionComment, comment))
	})
}

// packetRoom returns the maximum size of the block that packetBlock appends for a packet of
// size octets and a comment of this length.
func packetRoom(size, comment int) int { return 4*8 + size + 3 + 8 + 12 + 4 + comment + 3 + 4 }

// statistics appends the interface statistics of one place.
func statistics(b []byte, p Place, from, to time.Time, passed, missed uint64) []byte {
	return block(b, blockStatistics, func(b []byte) []byte {
		now := uint64(to.UnixNano())
		b = le.AppendUint32(b, uint32(p))
		b = le.AppendUint32(b, uint32(now>>32))
		b = le.AppendUint32(b, uint32(now))
		b = optionTime(b, statisticsStart, from)
		b = optionTime(b, statisticsEnd, to)
		b = option64(b, statisticsPassed, passed)
		b = option64(b, statisticsDropped, missed)
		return endOfOptions(b)
	})
}
