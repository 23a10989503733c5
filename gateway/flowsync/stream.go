package flowsync

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// A stream is a sequence of frames. A frame is the length of the rest (2 octets, big endian), the
// kind (1 octet), and a body:
//
//	frameBegin        1 octet: 1 if from the active gateway, else 0;
//	                  4 octets: age of a standby's copy in milliseconds
//	frameFlow, ended  1 octet: length of the peer's ID; the ID; flows of natengine.FlowSize octets
//	frameEnd, beat    nothing
//	framePacket       1 octet: index of the tunnel, plus 128 if the packet continues in the
//	                  next frame; octets of the packet
//
// frameBegin starts a list of all flows, and frameEnd ends it. In between, frameEnded may report
// flows that have ended. After the list, the changes follow, and a frameBeat at least once in
// beatInterval. A new frameBegin starts a new list.
const (
	frameBegin = iota
	frameFlow
	frameEnded
	frameEnd
	frameBeat
	framePacket
)

const (
	beatInterval = time.Second
	maxFrame     = 32 << 10
	maxParcel    = packet.VirtioHeaderLen + 65535
	continues    = 128 // framePacket: the packet continues in the next frame
)

// writer writes a stream.
type writer struct {
	w *bufio.Writer
}

func (w writer) frame(kind byte, parts ...[]byte) {
	n := 1
	for _, p := range parts {
		n += len(p)
	}
	var head [3]byte
	binary.BigEndian.PutUint16(head[:], uint16(n))
	head[2] = kind
	_, _ = w.w.Write(head[:]) // bufio keeps the error, so Flush returns it
	for _, p := range parts {
		_, _ = w.w.Write(p)
	}
}

func (w writer) begin(active bool, age time.Duration) {
	var b [5]byte
	if active {
		b[0] = 1
	}
	binary.BigEndian.PutUint32(b[1:], uint32(min(age, keepFor)/time.Millisecond))
	w.frame(frameBegin, b[:])
}

// A record is a flow that exists or has ended.
type record struct {
	peer  string
	flow  natengine.Flow
	ended bool
}

// records writes frames for flows, in order. Consecutive flows of one peer and kind share a
// frame.
func (w writer) records(all []record) {
	var body []byte
	for len(all) > 0 {
		first := all[0]
		body = append(body[:0], byte(len(first.peer)))
		body = append(body, first.peer...)
		n := 0
		for ; n < len(all) && all[n].peer == first.peer && all[n].ended == first.ended && len(body)+natengine.FlowSize < maxFrame; n++ {
			body = all[n].flow.Append(body)
		}
		kind := byte(frameFlow)
		if first.ended {
			kind = frameEnded
		}
		w.frame(kind, body)
		all = all[n:]
	}
}

// parcel writes a packet as one or more frames.
func (w writer) parcel(one parcel) {
	const most = maxFrame - 2
	rest := one.p
	for ; len(rest) > most; rest = rest[most:] {
		w.frame(framePacket, []byte{byte(one.tunnel) | continues}, rest[:most])
	}
	w.frame(framePacket, []byte{byte(one.tunnel)}, rest)
}

// receive reads a stream into r. It returns an error when the stream ends, or nil after the first
// list if r.listOnly is set. It calls beat after each frame.
func (r *receiver) receive(from io.Reader, beat func()) error {
	incomplete := false // part of a packet has arrived
	defer func() {
		if incomplete {
			r.countLost()
		}
	}()
	buffered := bufio.NewReaderSize(from, 64<<10)
	body := make([]byte, maxFrame)
	for {
		var head [2]byte
		if _, err := io.ReadFull(buffered, head[:]); err != nil {
			return err
		}
		n := int(binary.BigEndian.Uint16(head[:]))
		if n == 0 || n > maxFrame {
			return fmt.Errorf("a frame of %d octets; want 1 to %d", n, maxFrame)
		}
		got, err := io.ReadFull(buffered, body[:n])
		incomplete = incomplete || got > 0 && body[0] == framePacket
		if err != nil {
			return err
		}
		kind, rest := body[0], body[1:n]
		if r.begun && r.missedFlows() {
			return errors.New("this gateway has become active meanwhile")
		}
		if !r.begun && kind != frameBegin {
			return fmt.Errorf("a frame of kind %d before the first list", kind)
		}
		switch {
		case kind == frameBegin && len(rest) == 5 && rest[0] <= 1:
			r.begin(rest[0] == 1, time.Duration(binary.BigEndian.Uint32(rest[1:]))*time.Millisecond)
		case (kind == frameFlow || kind == frameEnded) && len(rest) > 0 && len(rest) > int(rest[0]) && (len(rest)-1-int(rest[0]))%natengine.FlowSize == 0:
			peer := string(rest[1 : 1+rest[0]])
			for flows := rest[1+rest[0]:]; len(flows) > 0; flows = flows[natengine.FlowSize:] {
				r.flow(peer, natengine.FlowFrom(flows), kind == frameEnded)
			}
		case kind == frameEnd && len(rest) == 0:
			if r.end(); r.listOnly {
				return nil
			}
		case kind == frameBeat && len(rest) == 0:
			r.beat()
		case kind == framePacket && len(rest) > 1 && r.active && len(r.parcel)+len(rest)-1 <= maxParcel:
			r.parcel = append(r.parcel, rest[1:]...)
			if rest[0] < continues {
				if !r.listOnly {
					r.k.receiveRelayed(parcel{tunnel: int(rest[0]), p: r.parcel, at: time.Now()})
				}
				r.parcel, incomplete = nil, false
			}
		default:
			return fmt.Errorf("a frame of kind %d with %d octets", kind, len(rest))
		}
		beat()
	}
}
