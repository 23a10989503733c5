// Package capture records packets of a gateway, and the reasons for drops. It writes the format
// pcapng, which Wireshark and tshark open.
//
//	goroutines of the data path ── Add ──► buffer of 1 MiB ── WriteTo ──► reader
//
// The data path never waits for the reader. If the buffer has no room for a packet, the packet
// is omitted and counted, and the file records the gap.
package capture

import (
	"context"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// A Place is the point in the gateway where a packet was seen. The file has an interface for
// each place.
type Place uint8

const (
	BeforeNAT Place = iota // the packet before the NAT engine
	AfterNAT               // the packet after the NAT engine
	Tunnel                 // inside the tunnel: before encryption or after decryption
	Underlay               // outside the tunnel: the WireGuard message

	numPlaces
)

var places = [...]Place{BeforeNAT, AfterNAT, Tunnel, Underlay}

var placeNames = [numPlaces]string{"before-nat", "after-nat", "tunnel", "underlay"}

var placeTexts = [numPlaces]string{
	"before NAT: outbound packets as read from the TUN, inbound packets after decryption; superpackets are not segmented",
	"after NAT: outbound packets before encryption, inbound packets as written to the TUN; superpackets are not segmented",
	"inside the tunnel: each packet before encryption, or after decryption",
	"WireGuard messages outside the tunnel: IP and UDP headers are made from the socket's addresses; of data messages only the header is kept, followed by zeros",
}

// PlaceNames returns the names of all places.
func PlaceNames() []string { return slices.Clone(placeNames[:]) }

// String returns the name of the place's interface.
func (p Place) String() string { return placeNames[p] }

// bufferSize bounds the packets that wait for the reader, in octets. A capture has two such
// buffers: it fills one while it writes the other.
const bufferSize = 1 << 20

// flushInterval is the longest time that a packet waits for the reader. A buffer that is half full
// is written at once.
const flushInterval = 100 * time.Millisecond

// A Capture records packets until it reaches one of its bounds, or until End. All methods
// except WriteTo may be called concurrently.
type Capture struct {
	Options
	program string
	names   map[string]string
	started time.Time
	done    chan struct{}
	half    chan struct{} // receives a value when the buffer is half full

	mu      sync.Mutex
	buffer  []byte
	packets int
	bytes   int64
	taken   [numPlaces]uint64
	missed  [numPlaces]uint64
	gap     [numPlaces]uint64 // packets missed since the last packet in the file
	ended   string
}

// New starts a capture. program is the name of the writing application in the file. names maps
// peer IDs to names.
func New(o Options, program string, names map[string]string) *Capture {
	c := &Capture{Options: o, program: program, names: names, started: time.Now(), done: make(chan struct{}), half: make(chan struct{}, 1)}
	c.buffer = header(make([]byte, 0, bufferSize), program, o.Snap)
	c.bytes = int64(len(c.buffer))
	return c
}

// PeerName returns the peer's name for users, or its ID if it has no name.
func (c *Capture) PeerName(p *natengine.PeerState) string {
	if name := c.names[p.ID()]; name != "" {
		return name
	}
	return p.ID()
}

// Wants reports whether the capture records packets with this place, direction, peer and drop
// reason. Callers check it before they compose a comment.
func (c *Capture) Wants(p Place, dir natengine.Direction, peer *natengine.PeerState, drop natengine.Drop) bool {
	return c.wants(p, dir) && c.WantsPeer(peer) && c.WantsDrop(drop)
}

// Add records a packet of length octets. parts are the octets to keep, in order. Add copies
// them and never waits for a reader.
func (c *Capture) Add(p Place, dir natengine.Direction, length int, comment string, parts ...[]byte) {
	size := 0
	for _, part := range parts {
		size += len(part)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended != "" {
		return
	}
	if room := packetRoom(size, len(comment)); len(c.buffer)+room > bufferSize {
		c.missed[p]++
		c.gap[p]++
		return
	} else if c.bytes+int64(room) > c.Bytes {
		c.end("bytes")
		return
	}
	was := len(c.buffer)
	c.buffer = packetBlock(c.buffer, p, time.Now(), dir, length, c.gap[p], comment, parts...)
	c.bytes += int64(len(c.buffer) - was)
	c.gap[p] = 0
	c.taken[p]++
	if len(c.buffer) > bufferSize/2 {
		select {
		case c.half <- struct{}{}:
		default:
		}
	}
	if c.packets++; c.packets == c.Packets {
		c.end("packets")
	}
}

// End ends the capture and records the reason. If the capture has ended already, its first reason
// stays.
func (c *Capture) End(reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.end(reason)
}

func (c *Capture) end(reason string) {
	if c.ended == "" {
		c.ended = reason
		close(c.done)
	}
}

// A Summary holds the counts of a capture and the reason why it ended.
type Summary struct {
	Packets int    // packets in the file
	Missed  uint64 // packets omitted because the reader was too slow
	Ended   string // "packets", "bytes", "duration", or the argument of End
}

// Summary returns the current counts.
func (c *Capture) Summary() Summary {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := Summary{Packets: c.packets, Ended: c.ended}
	for _, n := range c.missed {
		s.Missed += n
	}
	return s
}

// WriteTo writes the file to w until the capture ends. The capture also ends if ctx is done or
// w returns an error. WriteTo calls flush after each piece of the file. It must be called only
// once.
func (c *Capture) WriteTo(ctx context.Context, w io.Writer, flush func() error) error {
	over := time.NewTimer(c.Duration)
	defer over.Stop()
	tick := time.NewTicker(flushInterval)
	defer tick.Stop()
	spare := make([]byte, 0, bufferSize)
	for {
		c.mu.Lock()
		full, last := c.buffer, c.ended != ""
		c.buffer = spare[:0]
		c.mu.Unlock()
		if last {
			full = c.statistics(full)
		}
		if len(full) > 0 {
			_, err := w.Write(full)
			if err == nil {
				err = flush()
			}
			if err != nil {
				c.End("the reader has closed the connection")
				return err
			}
		}
		if last {
			return nil
		}
		spare = full
		select {
		case <-tick.C:
		case <-c.half:
		case <-c.done:
		case <-over.C:
			c.End("duration")
		case <-ctx.Done():
			c.End("interrupted") // w may still accept the rest
		}
	}
}

// statistics appends the last blocks of the file.
func (c *Capture) statistics(b []byte) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	for _, p := range places {
		b = statistics(b, p, c.started, now, c.taken[p]+c.missed[p], c.missed[p])
	}
	return b
}
