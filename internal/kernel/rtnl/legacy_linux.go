package rtnl

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// What iptables-legacy has in the kernel is read only: its one way to change a table is to replace all
// of it, under a lock file of the host's and together with the rules of others.

// Of linux/netfilter_ipv4/ip_tables.h and x_tables.h.
const (
	iptGetInfo    = 64 // IPT_SO_GET_INFO
	iptGetEntries = 65 // IPT_SO_GET_ENTRIES
	iptInfoSize   = 84 // struct ipt_getinfo
	iptEntrySize  = 112
	iptHeader     = 40 // of struct ipt_get_entries, with what aligns the entries
	iptForward    = 2  // NF_INET_FORWARD
	iptGoto       = 2  // IPT_F_GOTO
	xtReturn      = -5 // XT_RETURN
)

// legacyLimits are those of the table filter of iptables-legacy, if there is one. Asking the kernel
// for a table makes it, so that the list of tables is read first.
func legacyLimits(want kernel.SourceNAT) []kernel.Limit {
	tables, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
	if err != nil || !slices.Contains(strings.Fields(string(tables)), "filter") {
		return nil
	}
	pod, ok := firstAddr(want.Local)
	if !ok {
		pod, ok = firstAddr(want.Pods)
	}
	remote, there := firstAddr(want.Remote)
	if !ok || !there {
		return nil
	}
	t, err := readLegacy()
	if err != nil {
		return nil // somebody changes it now; it is asked again
	}
	if !t.drops(pod, remote, "", kernel.OverlayDevice) && !t.drops(remote, pod, kernel.OverlayDevice, "") {
		return nil
	}
	return []kernel.Limit{{Reason: kernel.LimitForwarding, Message: "FORWARD of iptables-legacy drops packets between pods and peers, which no rule accepts as far as can be seen; " +
		"want `iptables-legacy -A FORWARD -i isthmus+ -j ACCEPT` and the same with -o, before the rule that drops"}}
}

// firstAddr is a host's address in the first of the networks.
func firstAddr(networks string) (netip.Addr, bool) {
	first, _, _ := strings.Cut(networks, " ")
	p, err := netip.ParsePrefix(first)
	if err != nil {
		return netip.Addr{}, false
	}
	if p.Bits() < 31 {
		return p.Addr().Next().Next(), true
	}
	return p.Addr(), true
}

// A legacyTable is the table filter as the kernel has it.
type legacyTable struct {
	forward int // where its chain FORWARD begins
	policy  int // where its policy is, which is the last of it
	entries []byte
}

func readLegacy() (t legacyTable, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) // a raw one needs CAP_NET_RAW
	if err != nil {
		return t, err
	}
	defer unix.Close(fd)
	info := make([]byte, iptInfoSize)
	copy(info, "filter")
	if err := getsockopt(fd, iptGetInfo, info); err != nil {
		return t, err
	}
	word := func(at int) int { return int(binary.NativeEndian.Uint32(info[at:])) }
	t.forward = word(36 + 4*iptForward)
	t.policy = word(56 + 4*iptForward)
	size := word(80)
	b := make([]byte, iptHeader+size)
	copy(b, "filter")
	binary.NativeEndian.PutUint32(b[32:], uint32(size))
	if err := getsockopt(fd, iptGetEntries, b); err != nil {
		return t, err
	}
	t.entries = b[iptHeader:]
	return t, nil
}

func getsockopt(fd, name int, b []byte) error {
	size := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_IP, uintptr(name), uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// drops reports whether FORWARD drops the first packet of a flow, as far as that can be told by
// addresses and devices; an unknown device is the one that a rule wants. Whatever else a rule asks for,
// but a comment, the packet does not have.
func (t legacyTable) drops(src, dst netip.Addr, in, out string) bool {
	var back []int
	at := t.forward
	for range 100_000 { // somebody's loop ends, too
		if at < 0 || at+iptEntrySize > len(t.entries) {
			return false
		}
		e := t.entries[at:]
		target, next := int(binary.NativeEndian.Uint16(e[88:])), int(binary.NativeEndian.Uint16(e[90:]))
		if target < iptEntrySize || target+32 > len(e) || next < target+32 || next > len(e) {
			return false
		}
		if !entryMatches(e[:target], src, dst, in, out) {
			at += next
			continue
		}
		name, _, _ := strings.Cut(string(e[target+2:target+31]), "\x00")
		if name != "" || target+36 > len(e) {
			if name == "REJECT" || name == "DROP" {
				return true
			}
			at += next // it goes on after others, such as LOG
			continue
		}
		switch verdict := int(int32(binary.NativeEndian.Uint32(e[target+32:]))); {
		case verdict == xtReturn:
			if len(back) == 0 {
				at = t.policy
			} else {
				at, back = back[len(back)-1], back[:len(back)-1]
			}
		case verdict < 0:
			return -verdict-1 == nfDrop
		default:
			if e[82]&iptGoto == 0 && verdict != at+next {
				back = append(back, at+next)
			}
			at = verdict
		}
	}
	return false
}

// entryMatches reads struct ipt_ip at the beginning of an entry, and the names of its matches.
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
		is := padded(name)
		for i := range is {
			if is[i]&mask[i] != want[i]&mask[i] {
				return inverted&flag != 0
			}
		}
		return inverted&flag == 0
	}
	if !address(0, src, invSrc) || !address(4, dst, invDst) || !device(16, in, invIn) || !device(32, out, invOut) {
		return false
	}
	if binary.NativeEndian.Uint16(e[80:]) != 0 { // a protocol
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
