package natengine

import (
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
)

func ip(s string) netip.Addr    { return netip.MustParseAddr(s) }
func pfx(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func pfxs(s ...string) (ps []netip.Prefix) {
	for _, p := range s {
		ps = append(ps, pfx(p))
	}
	return ps
}

// parse parses b, which must be a valid packet.
func parse(t testing.TB, v *packet.View, b []byte) {
	t.Helper()
	if err := v.Parse(b, packet.ChecksumComplete); err != nil {
		t.Fatalf("parse %x: %v", b, err)
	}
}

// send gives the engine a copy of b and returns the resulting packet and the verdict.
func send(t testing.TB, e *Engine, dir Direction, b []byte, now tick) ([]byte, Verdict) {
	t.Helper()
	var v packet.View
	parse(t, &v, append([]byte(nil), b...))
	at := duration(int32(now))
	if dir == Outbound {
		verdict := e.Outbound(&v, at)
		return v.Bytes(), verdict
	}
	verdict := e.Inbound(&v, at)
	return v.Bytes(), verdict
}

// each calls f with the index of every live flow, its entry and its word. The caller holds mu.
// f may remove the flow.
func (t *flowTable) each(f func(i uint32, e *entry, word uint64)) {
	for i := range t.used {
		e := t.entry(i)
		if word := e.word.Load(); word&stateLive != 0 {
			f(i, e, word)
		}
	}
}
