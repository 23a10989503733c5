package capture

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

func TestOptionsRoundTripThroughTheQuery(t *testing.T) {
	o := Options{
		Places: []Place{Underlay, BeforeNAT}, Directions: []natengine.Direction{natengine.Inbound}, Peer: "beta",
		Drops: []natengine.Drop{natengine.DropNoFlow, natengine.DropTooBig}, Dropped: true, Proto: packet.TCP, Snap: 96, Packets: 7, Bytes: 8192, Duration: 3 * time.Second,
		Ends: [2]netip.AddrPort{netip.MustParseAddrPort("[fd00::1]:80"), netip.AddrPortFrom(netip.Addr{}, 53)},
	}
	for _, o := range []Options{o, DefaultOptions()} {
		if got, err := Parse(o.Query()); err != nil || !reflect.DeepEqual(got, o) {
			t.Errorf("got %+v, %v, want %+v", got, err, o)
		}
	}
}

func TestParseNamesTheInvalidField(t *testing.T) {
	for query, want := range map[string]string{
		"place=nat":                         `place "nat": want one of before-nat, after-nat, tunnel, underlay`,
		"direction=up":                      `direction "up": want out or in`,
		"drop=none":                         `drop "none": want one of malformed,`,
		"dropped=yes":                       `dropped "yes": want true or false`,
		"protocol=gre":                      `protocol "gre": want tcp, udp, icmp`,
		"end=10.0.0":                        `"10.0.0" is not a valid end of a filter; want an address`,
		"end=fe80::1%25eth0":                `is not a valid end of a filter; want an address`,
		"end=:0":                            `":0" is not a valid end of a filter; want an address`,
		"end=10.0.0.1&end=fd00::1":          "10.0.0.1 and fd00::1 are of different families",
		"end=any&end=any&end=any":           "3 values; want at most two",
		"snap=65536":                        `snap "65536": want a number from 0 to 65535`,
		"packets=0":                         `packets "0": want a number from 1 to`,
		"bytes=-1":                          `bytes "-1": want a number from 1 to`,
		"duration=2h":                       `duration "2h": want one such as 30s or 5m, at most 1h0m0s`,
		"duration=1m&duration=2m":           "duration: 2 values; want one",
		"colour=red":                        `"colour" is not known; want place,`,
		"peer=a&peer=b":                     "peer: 2 values; want one",
		"end=10.0.0.1:80&end=[fd00::1]:443": "different families",
	} {
		q, err := url.ParseQuery(query)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(q); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", query, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("end=10.0.0.1:80&end=:53&protocol=udp&place=tunnel&drop=no_flow&snap=12&duration=1m")
	f.Add("end=[fd00::1]:1&dropped=true&direction=in&bytes=1&packets=1&peer=x")
	f.Fuzz(func(t *testing.T, query string) {
		q, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		o, err := Parse(q)
		if err != nil {
			return
		}
		if o.Snap < 0 || o.Snap > MaxSnap || o.Packets < 1 || o.Packets > MaxPackets || o.Bytes < 1 || o.Bytes > MaxBytes || o.Duration <= 0 || o.Duration > MaxDuration {
			t.Fatalf("%q: a bound out of bounds: %+v", query, o)
		}
		if again, err := Parse(o.Query()); err != nil || !reflect.DeepEqual(again, o) {
			t.Fatalf("%q: %+v became %+v, %v", query, o, again, err)
		}
	})
}

func add(c *Capture, n int) {
	for range n {
		c.Add(Tunnel, natengine.Inbound, 1400, "comment", make([]byte, 40))
	}
}

func TestCaptureEndsAtItsLimits(t *testing.T) {
	for name, tc := range map[string]struct {
		set   func(*Options)
		ends  string
		limit int // maximum number of packets
	}{
		"packets":  {func(o *Options) { o.Packets = 3 }, "packets", 3},
		"bytes":    {func(o *Options) { o.Bytes = 4096 }, "bytes", 40},
		"duration": {func(o *Options) { o.Duration = time.Second }, "duration", 50},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := DefaultOptions()
				tc.set(&o)
				c := New(o, "test", nil)
				var file bytes.Buffer
				done := make(chan error, 1)
				go func() { done <- c.WriteTo(t.Context(), &file, func() error { return nil }) }()
				add(c, 50)
				if err := <-done; err != nil {
					t.Fatal(err)
				}
				add(c, 1)
				s := c.Summary()
				if s.Ended != tc.ends || s.Packets == 0 || s.Packets > tc.limit || s.Missed != 0 {
					t.Errorf("%+v", s)
				}
				if limit := int(min(o.Bytes, 1<<20)) + 4*(8*8+12); file.Len() > limit { // plus the statistics at the end
					t.Errorf("%d octets, want at most %d", file.Len(), limit)
				}
			})
		})
	}
}

type deaf struct{}

func (deaf) Write([]byte) (int, error) { return 0, errors.New("gone") }

func TestCaptureEndsWhenItsReaderFailsOrDisconnects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(DefaultOptions(), "test", nil)
		if err := c.WriteTo(t.Context(), deaf{}, func() error { return nil }); err == nil || c.Summary().Ended != "the reader has closed the connection" {
			t.Errorf("%v, %+v", err, c.Summary())
		}
		c = New(DefaultOptions(), "test", nil)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		var file bytes.Buffer
		if err := c.WriteTo(ctx, &file, func() error { return nil }); err != nil || c.Summary().Ended != "interrupted" {
			t.Errorf("%v, %+v", err, c.Summary())
		}
	})
}

func TestPacketRoomHoldsAnyPacketBlock(t *testing.T) {
	for size := range 9 {
		for comment := range 9 {
			b := packetBlock(nil, Tunnel, time.Now(), natengine.Inbound, size, 1, strings.Repeat("c", comment), make([]byte, size))
			if room := packetRoom(size, comment); len(b) > room {
				t.Errorf("size %d, comment %d: %d octets, room for %d", size, comment, len(b), room)
			}
		}
	}
}

func TestAddDoesNotAllocate(t *testing.T) {
	o := DefaultOptions()
	c := New(o, "test", nil)
	data := make([]byte, 40)
	if n := testing.AllocsPerRun(1000, func() { c.Add(Tunnel, natengine.Inbound, 1400, "comment", data) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
