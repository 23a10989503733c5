package rtnl

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"
)

// drops reports whether FORWARD drops the first packet of a flow. It evaluates only addresses and
// devices. An empty device name matches any device that a rule demands. Rules with other
// conditions, except comments, count as not matching.
func (t legacyTable) drops(src, dst netip.Addr, in, out string) bool {
	var back []int
	at := t.forward
	for range 100_000 { // limits the effect of a loop in foreign rules
		matches, target, next, ok := t.entry(at)
		if !ok {
			return false
		}
		if !entryMatches(matches, src, dst, in, out) {
			at = next
			continue
		}
		verdict, isStandard := standard(target)
		if !isStandard {
			if name := targetName(target); name == "REJECT" || name == "DROP" {
				return true
			}
			at = next // other targets, such as LOG, continue with the next rule
			continue
		}
		switch {
		case verdict == xtReturn:
			if len(back) == 0 {
				at = t.policy
			} else {
				at, back = back[len(back)-1], back[:len(back)-1]
			}
		case verdict < 0:
			return -verdict-1 == nfDrop
		default:
			if matches[82]&iptGoto == 0 && verdict != next {
				back = append(back, next)
			}
			at = verdict
		}
	}
	return false
}

// entryMatches evaluates struct ipt_ip at the beginning of an entry. It returns false if the entry
// has a match other than a comment.
func entryMatches(e []byte, src, dst netip.Addr, in, out string) bool {
	const (
		invIn, invOut, invSrc, invDst = 1, 2, 8, 0x10
	)
	inverted := e[83]
	address := func(at int, a netip.Addr, flag byte) bool {
		b := a.As4()
		for i := range 4 {
			if b[i]&e[at+8+i] != e[at+i] {
				return inverted&flag != 0
			}
		}
		return inverted&flag == 0
	}
	device := func(at int, name string, flag byte) bool {
		want, mask := e[at:at+unix.IFNAMSIZ], e[at+32:at+32+unix.IFNAMSIZ]
		if !bytes.ContainsFunc(mask, func(r rune) bool { return r != 0 }) {
			return true
		}
		if name == "" {
			return inverted&flag == 0
		}
		have := padded(name)
		for i := range have {
			if have[i]&mask[i] != want[i]&mask[i] {
				return inverted&flag != 0
			}
		}
		return inverted&flag == 0
	}
	if !address(0, src, invSrc) || !address(4, dst, invDst) || !device(16, in, invIn) || !device(32, out, invOut) {
		return false
	}
	if binary.NativeEndian.Uint16(e[80:]) != 0 { // the rule has a condition on the protocol
		return false
	}
	for at := iptEntrySize; at+32 <= len(e); {
		size := int(binary.NativeEndian.Uint16(e[at:]))
		if name, _, _ := strings.Cut(string(e[at+2:at+31]), "\x00"); name != "comment" || size < 32 {
			return false
		}
		at += size
	}
	return true
}
