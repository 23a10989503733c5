package rtnl

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// A change of an iptables-legacy table replaces the whole table. Every program must therefore hold
// the lock of the host from reading the table until writing it. iptables 1.6 and later does so, for
// all programs that call it. This file does the same. If the file of the lock is missing, this code
// changes nothing.

// legacyLock is the lock file (XT_LOCK_NAME of iptables). We never create the file: in a container
// without a mount of the node's file, a new file would not lock out other programs.
const legacyLock = "/run/xtables.lock"

// legacyInterval is the time for which a read of the table stays valid. No event reports changes.
const legacyInterval = 9 * time.Second

// errBusy means that the caller should try again soon; see Kernel.Busy.
var errBusy = errors.New("other programs are changing iptables")

// Constants of linux/netfilter_ipv4/ip_tables.h and x_tables.h.
const (
	iptGetInfo     = 64 // IPT_SO_GET_INFO
	iptGetEntries  = 65 // IPT_SO_GET_ENTRIES
	iptSetReplace  = 64 // IPT_SO_SET_REPLACE
	iptSetCounters = 65 // IPT_SO_SET_ADD_COUNTERS
	iptInfoSize    = 84 // struct ipt_getinfo
	iptReplaceSize = 96 // struct ipt_replace
	iptEntrySize   = 112
	iptHeader      = 40 // header of struct ipt_get_entries and xt_counters_info, padded
	iptHooks       = 5  // NF_INET_NUMHOOKS
	iptForward     = 2  // NF_INET_FORWARD
	iptGoto        = 2  // IPT_F_GOTO
	xtReturn       = -5 // XT_RETURN
	xtCounters     = 16 // struct xt_counters
	xtMatchSize    = 32 // header of struct xt_entry_match and xt_entry_target
	xtCommentSize  = 256
)

// legacyLimits returns the Limits caused by the table "filter" of iptables-legacy, if it exists.
func legacyLimits(want kernel.SourceNAT) []kernel.Limit {
	if !hasLegacy() {
		return nil
	}
	pod, ok := firstAddr(want.Local)
	if !ok {
		pod, ok = firstAddr(want.Pods)
	}
	remote, hasRemote := firstAddr(want.Remote)
	if !ok || !hasRemote {
		return nil
	}
	t, err := readLegacy()
	if err != nil {
		return nil // another program is probably changing the table; the next call tries again
	}
	if !t.drops(pod, remote, "", kernel.OverlayDevice) && !t.drops(remote, pod, kernel.OverlayDevice, "") {
		return nil
	}
	why := "because no visible rule accepts them"
	if f := t.forwarding(); f.unchangeable && f.refuses {
		why += ", and Isthmus cannot add a rule without the node's " + legacyLock
	}
	return []kernel.Limit{{Reason: kernel.LimitForwarding, Message: "chain FORWARD of iptables-legacy drops packets between pods and peers, " + why +
		"; want `iptables-legacy -A FORWARD -i isthmus+ -j ACCEPT`, and the same with -o, before the rule that drops them"}}
}

// legacyForwarding returns the chain FORWARD of iptables-legacy, if it exists.
func legacyForwarding() []forwarding {
	if !hasLegacy() {
		return nil
	}
	t, err := readLegacy()
	if err != nil {
		return nil
	}
	return []forwarding{t.forwarding()}
}

// hasLegacy reports whether the table exists. It reads the list of tables, because a query for a
// table creates the table.
func hasLegacy() bool {
	tables, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
	return err == nil && slices.Contains(strings.Fields(string(tables)), "filter")
}

// firstAddr returns the address of a host in the first of the networks.
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

// A legacyTable is the table "filter" in the kernel's format.
type legacyTable struct {
	forward int // offset of the chain FORWARD
	policy  int // offset of its policy, which is its last entry
	info    []byte
	entries []byte
}

// socket returns a socket for reading and replacing tables. It is a UDP socket, because a raw
// socket would need CAP_NET_RAW.
func socket() (int, error) { return unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) }

func readLegacy() (t legacyTable, err error) {
	fd, err := socket()
	if err != nil {
		return t, err
	}
	defer unix.Close(fd)
	t.info = make([]byte, iptInfoSize)
	copy(t.info, "filter")
	if err := getsockopt(fd, iptGetInfo, t.info); err != nil {
		return t, err
	}
	word := func(at int) int { return int(binary.NativeEndian.Uint32(t.info[at:])) }
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

// entry returns the parts of the entry at an offset: its matches, its target, and the offset of the
// next entry.
func (t legacyTable) entry(at int) (matches, target []byte, next int, ok bool) {
	if at < 0 || at+iptEntrySize > len(t.entries) {
		return nil, nil, 0, false
	}
	e := t.entries[at:]
	middle, end := int(binary.NativeEndian.Uint16(e[88:])), int(binary.NativeEndian.Uint16(e[90:]))
	if middle < iptEntrySize || end < middle+xtMatchSize || end > len(e) {
		return nil, nil, 0, false
	}
	return e[:middle], e[middle:end], at + end, true
}

// standard returns the verdict of a standard target: a negative verdict, or the offset of the entry
// to which the target jumps.
func standard(target []byte) (verdict int, ok bool) {
	if target[2] != 0 || len(target) < xtMatchSize+4 {
		return 0, false
	}
	return int(int32(binary.NativeEndian.Uint32(target[xtMatchSize:]))), true
}

// forwarding returns the effect of FORWARD on packets that no rule accepts. Legacy rules have no
// handles, so the result has the offsets of their entries instead. A rule that cannot be parsed
// counts as not refusing.
func (t legacyTable) forwarding() (f forwarding) {
	f.accept = kernel.Accept{Program: kernel.IptablesLegacy, Chain: "FORWARD"}
	if _, err := os.Stat(legacyLock); err != nil {
		f.unchangeable = true
	}
	for at := t.forward; ; {
		matches, target, next, ok := t.entry(at)
		if !ok {
			return forwarding{accept: f.accept, unchangeable: true}
		}
		comment, conditions := conditionsOf(matches)
		verdict, isStandard := standard(target)
		refuses := !conditions && (isStandard && verdict == -nfDrop-1 || targetName(target) == "REJECT")
		if at == t.policy {
			if f.before == 0 {
				f.refuses = refuses
			}
			return f
		}
		f.add(foreignRule{handle: uint64(at), comment: comment, refuses: refuses})
		at = next
	}
}

func targetName(target []byte) string {
	name, _, _ := strings.Cut(string(target[2:xtMatchSize-1]), "\x00")
	return name
}

// conditionsOf returns the comment of an entry, and whether the entry has any other conditions.
func conditionsOf(e []byte) (comment string, conditions bool) {
	conditions = bytes.ContainsFunc(e[:84], func(r rune) bool { return r != 0 })
	for at := iptEntrySize; at+xtMatchSize <= len(e); {
		size := int(binary.NativeEndian.Uint16(e[at:]))
		if size < xtMatchSize || at+size > len(e) {
			return "", true
		}
		if targetName(e[at:]) == "comment" {
			comment, _, _ = strings.Cut(string(e[at+xtMatchSize:at+size]), "\x00")
		} else {
			conditions = true
		}
		at += size
	}
	return comment, conditions
}

// Offsets in struct ipt_ip, the beginning of an entry. Each address and name has a mask.
const (
	ipSource, ipSourceMask           = 0, 8
	ipDestination, ipDestinationMask = 4, 12
	ipInDevice, ipInDeviceMask       = 16, 48
	ipOutDevice, ipOutDeviceMask     = 32, 64
	ipProtocol                       = 80
)

// acceptEntries returns the rules of an Accept in their order, such as "-i isthmus+ -m comment
// --comment isthmus-route-agent -j ACCEPT".
func acceptEntries(a kernel.Accept) (all [][]byte) {
	device := []byte(kernel.TunPrefix + "+")
	for _, r := range a.Rules() {
		e := acceptEntry(r.Comment)
		match := func(value []byte, at, mask, masked int) {
			copy(e[at:], value)
			for i := range masked {
				e[mask+i] = 0xff
			}
		}
		if r.In {
			match(device, ipInDevice, ipInDeviceMask, len(kernel.TunPrefix))
		}
		if r.Out {
			match(device, ipOutDevice, ipOutDeviceMask, len(kernel.TunPrefix))
		}
		if r.Source.IsValid() {
			match(r.Source.AsSlice(), ipSource, ipSourceMask, 4)
		}
		if r.Destination.IsValid() {
			match(r.Destination.AsSlice(), ipDestination, ipDestinationMask, 4)
		}
		binary.NativeEndian.PutUint16(e[ipProtocol:], uint16(protocols[r.Protocol]))
		all = append(all, e)
	}
	return all
}

// acceptEntry returns a rule that accepts everything, with a comment.
func acceptEntry(comment string) []byte {
	const target = iptEntrySize + xtMatchSize + xtCommentSize
	e := make([]byte, target+xtMatchSize+8)
	order := binary.NativeEndian
	order.PutUint16(e[88:], target)
	order.PutUint16(e[90:], uint16(len(e)))
	order.PutUint16(e[iptEntrySize:], xtMatchSize+xtCommentSize)
	copy(e[iptEntrySize+2:], "comment")
	copy(e[iptEntrySize+xtMatchSize:], comment)
	order.PutUint16(e[target:], xtMatchSize+8)
	verdict := int32(-nfAccept - 1)
	order.PutUint32(e[target+xtMatchSize:], uint32(verdict))
	return e
}

// changeLegacy removes our rules from the table, or replaces them with the rules of an Accept.
// Foreign rules keep their positions and counters.
func changeLegacy(remove bool, a kernel.Accept) error {
	lock, err := lockLegacy()
	if err != nil {
		return err
	}
	defer lock.Close()
	t, err := readLegacy()
	if err != nil {
		return err
	}
	f := t.forwarding()
	before := -1
	if !remove && f.refuses {
		before = t.policy
		if f.before != 0 {
			before = int(f.before)
		}
	}
	replaced, kept, ok := t.rewritten(f.ours, acceptEntries(a), before)
	if !ok {
		return errors.New("cannot parse the table filter of iptables-legacy")
	}
	return t.replace(replaced, kept)
}

// lockLegacy acquires the lock without waiting. Closing the file releases the lock.
func lockLegacy() (*os.File, error) {
	f, err := os.Open(legacyLock)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("%w: %s: %w", errBusy, legacyLock, err)
	}
	return f, nil
}

// rewritten returns struct ipt_replace without the rules in removed. It inserts the entries in
// added at the offset insertAt, unless insertAt is negative. kept maps each new entry to its old
// one, or to -1 for added entries.
func (t legacyTable) rewritten(removed []foreignRule, added [][]byte, insertAt int) (b []byte, kept []int, ok bool) {
	moved := make(map[int]int) // old offset → new offset of entries
	itself := make(map[int]int)
	var entries []byte
	for at, i := 0, 0; at < len(t.entries); i++ {
		_, _, next, ok := t.entry(at)
		if !ok {
			return nil, nil, false
		}
		moved[at] = len(entries)
		if at == insertAt {
			for _, e := range added {
				entries = append(entries, e...)
				kept = append(kept, -1)
			}
		}
		itself[at] = len(entries)
		if !slices.ContainsFunc(removed, func(r foreignRule) bool { return r.handle == uint64(at) }) {
			entries = append(entries, t.entries[at:next]...)
			kept = append(kept, i)
		}
		at = next
	}
	now := legacyTable{entries: entries}
	for at, i := 0, 0; at < len(entries); i++ {
		_, target, next, ok := now.entry(at)
		if !ok {
			return nil, nil, false
		}
		if verdict, isStandard := standard(target); isStandard && verdict >= 0 {
			to, known := moved[verdict]
			if !known {
				return nil, nil, false
			}
			binary.NativeEndian.PutUint32(target[xtMatchSize:], uint32(to))
		}
		at = next
	}
	b = make([]byte, iptReplaceSize, iptReplaceSize+len(entries))
	copy(b, "filter")
	word := binary.NativeEndian
	hooks := word.Uint32(t.info[32:])
	word.PutUint32(b[32:], hooks)
	word.PutUint32(b[36:], uint32(len(kept)))
	word.PutUint32(b[40:], uint32(len(entries)))
	for h := range iptHooks {
		if hooks&(1<<h) == 0 {
			continue
		}
		begin, begins := moved[int(word.Uint32(t.info[36+4*h:]))]
		end, ends := itself[int(word.Uint32(t.info[56+4*h:]))]
		if !begins || !ends {
			return nil, nil, false
		}
		word.PutUint32(b[44+4*h:], uint32(begin))
		word.PutUint32(b[64+4*h:], uint32(end))
	}
	word.PutUint32(b[84:], word.Uint32(t.info[76:])) // number of counters that the kernel has to return
	return append(b, entries...), kept, true
}

// replace replaces the table by b. The kernel returns the counters of the old table, and replace
// restores those of the kept entries. The kernel rejects b if the number of entries has changed
// since the read.
func (t legacyTable) replace(b []byte, kept []int) error {
	fd, err := socket()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	old := make([]byte, xtCounters*int(binary.NativeEndian.Uint32(t.info[76:])))
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&old[0])
	binary.NativeEndian.PutUint64(b[88:], uint64(uintptr(unsafe.Pointer(&old[0]))))
	if err := unix.SetsockoptString(fd, unix.SOL_IP, iptSetReplace, string(b)); err != nil {
		if errors.Is(err, unix.EAGAIN) {
			return fmt.Errorf("%w without the lock %s: %w", errBusy, legacyLock, err)
		}
		return fmt.Errorf("replacing the table filter of iptables-legacy: %w", err)
	}
	counters := make([]byte, iptHeader, iptHeader+xtCounters*len(kept))
	copy(counters, "filter")
	binary.NativeEndian.PutUint32(counters[32:], uint32(len(kept)))
	for _, i := range kept {
		if i < 0 {
			counters = append(counters, make([]byte, xtCounters)...)
		} else {
			counters = append(counters, old[xtCounters*i:xtCounters*(i+1)]...)
		}
	}
	if err := unix.SetsockoptString(fd, unix.SOL_IP, iptSetCounters, string(counters)); err != nil {
		return fmt.Errorf("counters of iptables-legacy: %w", err)
	}
	return nil
}

func getsockopt(fd, name int, b []byte) error {
	size := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_IP, uintptr(name), uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
