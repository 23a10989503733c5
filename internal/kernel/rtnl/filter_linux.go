package rtnl

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	nfnl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/diff"
	"github.com/isthmus-net/isthmus/internal/kernel"
)

// ErrFilter says that the packet filter could not be made. Nothing that was to come after it in the
// same Apply has been done.
var ErrFilter = errors.New("packet filter")

// elementsPerMessage bounds a message to what fits a netlink attribute (64 KiB).
const elementsPerMessage = 1000

// rules are what the texts of chains mean. TestFilterIsWhatItsTextSays compares them with what nft(8)
// makes of the texts.
var rules = map[string][]expr.Any{
	"ip saddr @local snat to ip saddr":                 slices.Concat(from("local"), itself()),
	"ip saddr @pods jump bydevice":                     slices.Concat(from("pods"), jump("bydevice")),
	"ip saddr @remote return":                          slices.Concat(from("remote"), leave()),
	`iifname "isthmus.vxlan" snat to ip saddr`:         slices.Concat(iif(padded(kernel.OverlayDevice)), itself()),
	"iifname @underlay return":                         slices.Concat(byUnderlay(), leave()),
	`meta iifkind "veth" snat to ip saddr`:             slices.Concat(iifKind("veth"), itself()),
	`meta iifkind "bridge" snat to ip saddr`:           slices.Concat(iifKind("bridge"), itself()),
	"ct status dnat return":                            slices.Concat(translated(), leave()),
	"snat to ip saddr":                                 itself(),
	`ip daddr @remote oifname "isthmus*" jump topeers`: slices.Concat(in(daddr, "remote", false), ours(expr.MetaKeyOIFNAME), jump("topeers")),
	"ip saddr @remote ip daddr @pods jump frompeers":   slices.Concat(from("remote"), in(daddr, "pods", false), jump("frompeers")),
	"accept":                                                                    {verdict(expr.VerdictAccept)},
	"counter drop":                                                              drop(),
	"jump bydevice":                                                             jump("bydevice"),
	"udp dport 4800 jump outer":                                                 slices.Concat(toOverlay(), jump("outer")),
	"udp dport 4800 counter drop":                                               slices.Concat(toOverlay(), drop()),
	"ct state established,related accept":                                       slices.Concat(answers(), accept()),
	"ip daddr @own accept":                                                      slices.Concat(ip4(), in(daddr, "own", false), accept()),
	"ip saddr @remote ip daddr != @remote accept":                               slices.Concat(ip4(), in(saddr, "remote", false), in(daddr, "remote", true), accept()),
	"ip saddr != @remote ip daddr @remote accept":                               slices.Concat(ip4(), in(saddr, "remote", true), in(daddr, "remote", false), accept()),
	"fib daddr type != local accept":                                            slices.Concat(local(expr.CmpOpNeq), accept()),
	`iifname "isthmus*" accept`:                                                 slices.Concat(ours(expr.MetaKeyIIFNAME), accept()),
	"ip saddr @remote jump forged":                                              slices.Concat(ip4(), in(saddr, "remote", false), jump("forged")),
	`oifname "isthmus.vxlan" counter drop`:                                      slices.Concat(oif(kernel.OverlayDevice), drop()),
	"iifname @underlay accept":                                                  slices.Concat(byUnderlay(), accept()),
	`meta iifkind "veth" counter drop`:                                          slices.Concat(iifKind("veth"), drop()),
	`meta iifkind "bridge" counter drop`:                                        slices.Concat(iifKind("bridge"), drop()),
	"ip saddr @elsewhere ip daddr @remote jump bydevice":                        slices.Concat(ip4(), in(saddr, "elsewhere", false), in(daddr, "remote", false), jump("bydevice")),
	`iifname "isthmus*" jump translated`:                                        slices.Concat(ours(expr.MetaKeyIIFNAME), jump("translated")),
	`iifname "isthmus*" jump remote`:                                            slices.Concat(ours(expr.MetaKeyIIFNAME), jump("remote")),
	`iifname "isthmus.vxlan" jump overlay`:                                      slices.Concat(iif(padded(kernel.OverlayDevice)), jump("overlay")),
	"iifname @uplinks accept":                                                   slices.Concat(byName("uplinks"), accept()),
	"ip daddr @gateways udp dport 4800 counter drop":                            slices.Concat(etherType(unix.ETH_P_IP), in(daddr, "gateways", false), toOverlay(), drop()),
	"meta protocol 8021q @ll,116,12 0 counter drop":                             slices.Concat(etherType(unix.ETH_P_8021Q), noVLAN(), drop()),
	"meta protocol 8021ad @ll,116,12 0 counter drop":                            slices.Concat(etherType(unix.ETH_P_8021AD), noVLAN(), drop()),
	"ct status dnat counter drop":                                               slices.Concat(translated(), drop()),
	"ip daddr @gateways fib saddr . iif oif != 0 iifname @bridges jump bridged": slices.Concat(ip4(), in(daddr, "gateways", false), theWayBack(), byName("bridges"), jump("bridged")),
	"ip saddr @gateways fib saddr . iif oif != 0 accept":                        slices.Concat(ip4(), in(saddr, "gateways", false), theWayBack(), accept()),
	"ip daddr @gateways fib saddr . iif oif != 0 jump bydevice":                 slices.Concat(ip4(), in(daddr, "gateways", false), theWayBack(), jump("bydevice")),
	`oifname "isthmus*" accept`:                                                 slices.Concat(ours(expr.MetaKeyOIFNAME), accept()),
	`oifname "lo" accept`:                                                       slices.Concat(oif("lo"), accept()),
	"ip protocol icmp ip saddr @gateways fib saddr . iif oif != 0 jump answers": slices.Concat(icmpIn4(), in(saddr, "gateways", false), theWayBack(), jump("answers")),
	`iifname "isthmus*" return`:                                                 slices.Concat(ours(expr.MetaKeyIIFNAME), leave()),
	"fib daddr type local return":                                               slices.Concat(local(expr.CmpOpEq), leave()),
	"@th,0,16 0x0b00 notrack":                                                   slices.Concat(icmpError(11, 0), []expr.Any{&expr.Notrack{}}),
	"@th,0,16 0x0300 notrack":                                                   slices.Concat(icmpError(3, 0), []expr.Any{&expr.Notrack{}}),
	"@th,0,16 0x0301 notrack":                                                   slices.Concat(icmpError(3, 1), []expr.Any{&expr.Notrack{}}),
	"ip daddr @remote counter drop":                                             slices.Concat(ip4(), in(daddr, "remote", false), drop()),
	"ip6 daddr @remote6 counter drop":                                           slices.Concat(ip6(), in6(daddr6, "remote6"), drop()),
	"udp dport 4800 ip saddr @nodes fib saddr . iif oif != 0 accept": slices.Concat(
		toOverlay(), ip4(), in(saddr, "nodes", false), theWayBack(), accept()),
}

// Offsets of the addresses in the IPv4 header.
const (
	saddr = 12
	daddr = 16
)

// daddr6 is that in the IPv6 header.
const daddr6 = 24

func verdict(kind expr.VerdictKind) expr.Any { return &expr.Verdict{Kind: kind} }
func drop() []expr.Any                       { return []expr.Any{&expr.Counter{}, verdict(expr.VerdictDrop)} }
func accept() []expr.Any                     { return []expr.Any{verdict(expr.VerdictAccept)} }
func jump(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

func equal(op expr.CmpOp, data []byte) expr.Any { return &expr.Cmp{Op: op, Register: 1, Data: data} }

// toOverlay: to the overlay's port, by UDP.
func toOverlay() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, equal(expr.CmpOpEq, []byte{unix.IPPROTO_UDP}),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		equal(expr.CmpOpEq, binary.BigEndian.AppendUint16(nil, kernel.OverlayPort)),
	}
}

func ip4() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, equal(expr.CmpOpEq, []byte{unix.NFPROTO_IPV4})}
}

// icmpIn4: ICMP in IPv4.
func icmpIn4() []expr.Any {
	return append(ip4(), &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 9, Len: 1}, equal(expr.CmpOpEq, []byte{unix.IPPROTO_ICMP}))
}

// icmpError: it has that type and code.
func icmpError(kind, code byte) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Len: 2}, equal(expr.CmpOpEq, []byte{kind, code})}
}

func ip6() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, equal(expr.CmpOpEq, []byte{unix.NFPROTO_IPV6})}
}

func in6(offset uint32, set string) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 16},
		&expr.Lookup{SourceRegister: 1, SetName: set},
	}
}

func in(offset uint32, set string, invert bool) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4},
		&expr.Lookup{SourceRegister: 1, SetName: set, Invert: invert},
	}
}

// from is in for the source, in a table of the family ip, where a packet is nothing else.
func from(set string) []expr.Any { return in(saddr, set, false) }

// ctStatusDNAT is IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h.
const ctStatusDNAT = 1 << 5

// translated: the destination was, by netfilter on this node.
func translated() []expr.Any { return ctHas(expr.CtKeySTATUS, ctStatusDNAT) }

// itself translates the source to what it is.
func itself() []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: saddr, Len: 4}, snat()}
}

// to translates the source to an address, where the destination was translated.
func to(addr netip.Addr) []expr.Any {
	return append(translated(), &expr.Immediate{Register: 1, Data: addr.AsSlice()}, snat())
}

func snat() expr.Any {
	return &expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1}
}

func leave() []expr.Any { return []expr.Any{verdict(expr.VerdictReturn)} }

func byUnderlay() []expr.Any { return byName("underlay") }

// byName: it came by a device whose name is in the set.
func byName(set string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Lookup{SourceRegister: 1, SetName: set}}
}

// etherType: what a frame says that it has in it, behind a tag that was taken off.
func etherType(kind uint16) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: 1}, equal(expr.CmpOpEq, binary.BigEndian.AppendUint16(nil, kind))}
}

// noVLAN: the number in a tag is 0.
func noVLAN() []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseLLHeader, Offset: 14, Len: 2},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 2, Mask: []byte{0x0f, 0xff}, Xor: []byte{0, 0}},
		equal(expr.CmpOpEq, []byte{0, 0}),
	}
}

func iif(name []byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, equal(expr.CmpOpEq, name)}
}

// ours are all devices whose names begin like those of ours.
func ours(key expr.MetaKey) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, equal(expr.CmpOpEq, []byte(kernel.TunPrefix))}
}

func oif(name string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, equal(expr.CmpOpEq, padded(name))}
}

// metaIIFKind is NFT_META_IIFKIND of linux/netfilter/nf_tables.h, Linux 5.1.
const metaIIFKind expr.MetaKey = 26

func iifKind(kind string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: metaIIFKind, Register: 1}, equal(expr.CmpOpEq, padded(kind))}
}

func padded(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

// theWayBack: an answer to the packet would leave by the device that it came by.
func theWayBack() []expr.Any {
	return []expr.Any{&expr.Fib{Register: 1, FlagSADDR: true, FlagIIF: true, ResultOIF: true}, equal(expr.CmpOpNeq, make([]byte, 4))}
}

// local: the destination is an address of the node, or not.
func local(op expr.CmpOp) []expr.Any {
	return []expr.Any{&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true}, equal(op, binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL))}
}

func answers() []expr.Any {
	return ctHas(expr.CtKeySTATE, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED)
}

// ctHas: the connection has one of the bits.
func ctHas(key expr.CtKey, bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: key, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		equal(expr.CmpOpNeq, make([]byte, 4)),
	}
}

// exprsOf are the rules that a text means.
func exprsOf(text string) []expr.Any {
	if addr, is := kernel.SNATTarget(text); is {
		return to(addr)
	}
	return rules[text]
}

// A table is a Filter, a SourceNAT or a Bridge as nftables has it.
type table struct {
	nft    *nftables.Table
	chains []kernel.FilterChain
	sets   []kernel.FilterSet
}

var (
	filterTable = &nftables.Table{Name: kernel.FilterTable, Family: nftables.TableFamilyINet}
	natTable    = &nftables.Table{Name: kernel.FilterTable, Family: nftables.TableFamilyIPv4}
	bridgeTable = &nftables.Table{Name: kernel.FilterTable, Family: nftables.TableFamilyBridge}
)

func bridgeOf(b kernel.Bridge) table { return table{bridgeTable, kernel.BridgeChains, b.Sets()} }

func filterOf(f kernel.Filter) table { return table{filterTable, kernel.FilterChains, f.Sets()} }

func sourceNATOf(s kernel.SourceNAT) table { return table{natTable, s.Chains(), s.Sets()} }

// transactionBytes is what a transaction may have: with 10,000 nodes and 4,096 peers it has 2 MB. It
// is one message to the kernel, and 208 KiB is what a socket takes otherwise.
const transactionBytes = 16 << 20

func newConn(o ...nftables.ConnOption) (*nftables.Conn, error) {
	return nftables.New(append(o, nftables.WithSockOptions(func(c *nfnl.Conn) error {
		_ = c.SetWriteBuffer(transactionBytes) // where it may not, a large transaction tells
		_ = c.SetReadBuffer(transactionBytes)  // each message of it is answered
		return nil
	}))...)
}

// nftSet is a set of the table.
func (t table) nftSet(s kernel.FilterSet) *nftables.Set {
	set := &nftables.Set{Table: t.nft, Name: s.Name, KeyType: nftables.TypeIPAddr, Interval: s.Interval}
	if s.Type == "ipv6_addr" {
		set.KeyType = nftables.TypeIP6Addr
	}
	if s.Type == "ifname" {
		set.KeyType, set.KeyByteOrder = nftables.TypeIFName, binaryutil.NativeEndian // as nft(8) has names
	}
	return set
}

// elementsFor are the elements of a set for texts as they are in a kernel.FilterSet; an error where
// somebody has put others into the set.
func elementsFor(s kernel.FilterSet, texts []string) (all []nftables.SetElement, err error) {
	for _, text := range texts {
		switch {
		case s.Type == "ifname":
			all = append(all, nftables.SetElement{Key: padded(text)})
		case !s.Interval:
			addr, err := netip.ParseAddr(text)
			if err != nil {
				return nil, err
			}
			all = append(all, nftables.SetElement{Key: addr.AsSlice()})
		default:
			p, err := netip.ParsePrefix(text)
			if err != nil {
				return nil, err
			}
			all = append(all, nftables.SetElement{Key: p.Addr().AsSlice()})
			if after := afterLast(p); !after.IsUnspecified() {
				all = append(all, nftables.SetElement{Key: after.AsSlice(), IntervalEnd: true})
			}
		}
	}
	return all, nil
}

// tablesRead is what was last read, and of which generation of the namespace's tables: the kernel
// counts it up with each change that anybody makes.
type tablesRead struct {
	generation uint32 // 0: not known
	filters    []kernel.Filter
	sourceNAT  []kernel.SourceNAT
	bridges    []kernel.Bridge
}

// haveTables reads the tables, unless no table has changed since they were last read.
func (k *Kernel) haveTables() tablesRead {
	if !k.unchangedTables() {
		k.tables = tablesRead{generation: generation()} // before they are read: what changes meanwhile is read again
		k.tables.filters = readFilter()
		if k.owner.NAT {
			k.tables.sourceNAT, k.tables.bridges = readSourceNAT(), readBridge()
		}
	}
	return k.tables
}

// unchangedTables reports whether nobody has changed any table of the namespace since ours were read, or
// written by us alone.
func (k *Kernel) unchangedTables() bool {
	return k.tables.generation != 0 && k.tables.generation == generation() && k.tables.good()
}

// good: else an error may have made it what it is.
func (r tablesRead) good() bool {
	return len(r.filters) == 1 && r.filters[0] != changed && !slices.Contains(r.sourceNAT, changedNAT) && !slices.Contains(r.bridges, changedBridge)
}

// generation is that of the namespace's tables, 0 when it is not known.
func generation() uint32 {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC})
	messages, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil || len(messages) != 1 || len(messages[0]) < nl.SizeofNfgenmsg {
		return 0
	}
	attributes, _ := nl.ParseRouteAttr(messages[0][nl.SizeofNfgenmsg:])
	for _, a := range attributes {
		if a.Attr.Type == unix.NFTA_GEN_ID && len(a.Value) == 4 {
			return binary.BigEndian.Uint32(a.Value)
		}
	}
	return 0
}

// changed, changedNAT and changedBridge are what nobody wants.
var (
	changed       = kernel.Filter{Nodes: "changed"}
	changedNAT    = kernel.SourceNAT{Local: "changed"}
	changedBridge = kernel.Bridge{Uplinks: "changed"}
)

// readFilter reads the table. One whose chains are not as they should be reads as changed. Where the
// kernel has no nftables there is none, and making one tells why.
func readFilter() []kernel.Filter {
	elements, there, err := readTable(filterTable, kernel.Filter{}.Sets(), func(func(string) []string) []kernel.FilterChain { return kernel.FilterChains })
	switch {
	case !there:
		return nil
	case err != nil:
		return []kernel.Filter{changed}
	}
	var f kernel.Filter
	for name, e := range elements {
		f = f.WithSet(name, e)
	}
	return []kernel.Filter{f}
}

// readSourceNAT is readFilter for the other table.
func readSourceNAT() []kernel.SourceNAT {
	var s kernel.SourceNAT
	elements, there, err := readTable(natTable, s.Sets(), func(said func(string) []string) []kernel.FilterChain {
		for _, text := range said("topeers") {
			if addr, is := kernel.SNATTarget(text); is {
				s.Self = addr
			}
		}
		return s.Chains()
	})
	switch {
	case !there:
		return nil
	case err != nil:
		return []kernel.SourceNAT{changedNAT}
	}
	for name, e := range elements {
		s = s.WithSet(name, e)
	}
	return []kernel.SourceNAT{s}
}

// readBridge is readFilter for the table of bridges.
func readBridge() []kernel.Bridge {
	var b kernel.Bridge
	elements, there, err := readTable(bridgeTable, b.Sets(), func(func(string) []string) []kernel.FilterChain { return kernel.BridgeChains })
	switch {
	case !there:
		return nil
	case err != nil:
		return []kernel.Bridge{changedBridge}
	}
	for name, e := range elements {
		b = b.WithSet(name, e)
	}
	return []kernel.Bridge{b}
}

var errChanged = errors.New("somebody has changed it")

// readTable returns the elements of the sets of a table, whether it is there, and an error where it
// is not as it should be. chains are those that it should have, which is asked what the rules of a
// chain say of themselves.
func readTable(t *nftables.Table, sets []kernel.FilterSet, chains func(said func(chain string) []string) []kernel.FilterChain) (elements map[string]string, there bool, err error) {
	c, err := newConn(nftables.AsLasting()) // one socket for all questions
	if err != nil {
		return nil, false, err
	}
	defer func() { _ = c.CloseLasting() }()
	tables, err := c.ListTablesOfFamily(t.Family)
	if err != nil || !slices.ContainsFunc(tables, func(other *nftables.Table) bool { return other.Name == t.Name }) {
		return nil, false, err
	}
	all, err := c.ListChainsOfTableFamily(t.Family)
	if err != nil {
		return nil, true, err
	}
	have := make(map[string]*nftables.Chain)
	for _, chain := range all {
		if chain.Table.Name == t.Name {
			have[chain.Name] = chain
		}
	}
	said := make(map[string][]string)
	for name, chain := range have {
		found, err := c.GetRules(t, chain)
		if err != nil {
			return nil, true, err
		}
		for _, r := range found {
			text, _ := userdata.GetString(r.UserData, userdata.TypeComment)
			if len(r.Exprs) != len(exprsOf(text)) {
				return nil, true, errChanged
			}
			said[name] = append(said[name], text)
		}
	}
	want := chains(func(chain string) []string { return said[chain] })
	if len(have) != len(want) {
		return nil, true, errChanged
	}
	for _, w := range want {
		if have[w.Name] == nil || !isAs(have[w.Name], w) || !slices.Equal(said[w.Name], w.Rules) {
			return nil, true, errChanged
		}
	}
	elements = make(map[string]string, len(sets))
	for _, set := range sets {
		if elements[set.Name], err = haveElements(c, t, set.Name); err != nil {
			return nil, true, err
		}
	}
	return elements, true, nil
}

func isAs(have *nftables.Chain, want kernel.FilterChain) bool {
	if want.Hook == "" || have.Hooknum == nil || have.Priority == nil {
		return want.Hook == "" && have.Hooknum == nil
	}
	return *have.Hooknum == *hook(want.Hook) && int(*have.Priority) == want.Priority() && string(have.Type) == want.Kind()
}

func hook(name string) *nftables.ChainHook {
	return map[string]*nftables.ChainHook{
		"prerouting": nftables.ChainHookPrerouting, "input": nftables.ChainHookInput, "forward": nftables.ChainHookForward,
		"postrouting": nftables.ChainHookPostrouting,
	}[name]
}

// haveElements returns what a FilterSet says of a set.
func haveElements(c *nftables.Conn, t *nftables.Table, name string) (string, error) {
	set, err := c.GetSetByName(t, name)
	if err != nil {
		return "", err
	}
	elements, err := c.GetSetElements(set)
	if err != nil {
		return "", err
	}
	slices.SortFunc(elements, func(a, b nftables.SetElement) int { // of two that touch the end first
		return cmp.Or(bytes.Compare(a.Key, b.Key), boolean(b.IntervalEnd)-boolean(a.IntervalEnd))
	})
	var texts []string
	var start netip.Addr
	for _, e := range elements {
		if set.KeyType.Name == nftables.TypeIFName.Name {
			texts = append(texts, string(bytes.TrimRight(e.Key, "\x00")))
			continue
		}
		addr, ok := netip.AddrFromSlice(e.Key)
		switch {
		case !ok:
			return "", fmt.Errorf("set %s: key of %d octets", name, len(e.Key))
		case !set.Interval:
			texts = append(texts, addr.String())
		case !e.IntervalEnd:
			start = addr
		case start.IsValid():
			texts = append(texts, networkBetween(start, addr))
			start = netip.Addr{}
		}
	}
	if start.IsValid() { // to the end of all addresses
		texts = append(texts, networkBetween(start, unspecified(start)))
	}
	return strings.Join(texts, " "), nil
}

func boolean(b bool) int {
	if b {
		return 1
	}
	return 0
}

// networkBetween is the network from its first address to the one after its last.
func networkBetween(first, after netip.Addr) string {
	for bits := range first.BitLen() + 1 {
		if p, err := first.Prefix(bits); err == nil && p.Addr() == first && afterLast(p) == after {
			return p.String()
		}
	}
	return first.String() + "-" + after.String() // somebody's
}

// afterLast is the address after the last of a network; after the last of all comes the first.
func afterLast(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < 8*len(b); bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	last, _ := netip.AddrFromSlice(b)
	if next := last.Next(); next.IsValid() {
		return next
	}
	return unspecified(last)
}

// unspecified is the first address of the family.
func unspecified(a netip.Addr) netip.Addr {
	if a.Is6() {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// changeFilter, changeBridge and changeSourceNAT make a table what it should be. After a transaction of
// somebody else all are read again: to replace them would take longer, and forget what they have counted.
func (k *Kernel) changeFilter(remove bool, want kernel.Filter) error {
	var have *table
	if h := k.haveTables().filters; len(h) == 1 && h[0] != changed {
		t := filterOf(h[0])
		have = &t
	}
	return k.changeTable(remove, have, filterOf(want), func() { k.tables.filters = []kernel.Filter{want} })
}

func (k *Kernel) changeBridge(remove bool, want kernel.Bridge) error {
	var have *table
	if h := k.haveTables().bridges; len(h) == 1 && h[0] != changedBridge {
		t := bridgeOf(h[0])
		have = &t
	}
	return k.changeTable(remove, have, bridgeOf(want), func() { k.tables.bridges = []kernel.Bridge{want} })
}

func (k *Kernel) changeSourceNAT(remove bool, want kernel.SourceNAT) error {
	var have *table
	if h := k.haveTables().sourceNAT; len(h) == 1 && h[0] != changedNAT && h[0].Self == want.Self {
		t := sourceNATOf(h[0])
		have = &t
	}
	return k.changeTable(remove, have, sourceNATOf(want), func() { k.tables.sourceNAT = []kernel.SourceNAT{want} })
}

// changeTable makes a table what it should be in one step: there is no moment without. Where only
// elements of sets differ from what was read, and nobody has changed a table since, it changes
// these: to replace the table takes the kernel some twenty milliseconds, since it waits until no
// packet is in the old chains. A transaction is one generation: if it is the only one since, the
// table is what was written, and need not be read again. have is what was read with the wanted
// chains, nil for none.
func (k *Kernel) changeTable(remove bool, have *table, want table, remember func()) error {
	read, before := k.tables.generation, generation()
	known := !remove && have != nil && before != 0 && read == before
	doubt := func() { k.memory.filter.Store(true) } // somebody else's transaction may have been taken for ours
	if known {
		k.memory.commit(before)
	}
	if !known || changeElements(*have, want) != nil {
		if known {
			doubt()
		}
		before = generation()
		k.memory.commit(before)
		if err := replaceTable(remove, want); err != nil {
			doubt()
			return err
		}
	}
	now := generation()
	if before == 0 || now != before+1 {
		doubt()
	} else if !remove && read == before {
		k.tables.generation = now
		remember()
	}
	return nil
}

// changeElements changes the elements of the sets, and asks for what it has changed. After an error the
// table is what it was, or what the kernel made of it.
func changeElements(have, want table) error {
	c, err := newConn(nftables.AsLasting())
	if err != nil {
		return err
	}
	defer func() { _ = c.CloseLasting() }()
	type change struct {
		set         kernel.FilterSet
		gone, added []nftables.SetElement
	}
	var differ []change
	for i, set := range want.sets {
		if have.sets[i].Elements == set.Elements {
			continue
		}
		was := strings.Fields(have.sets[i].Elements)
		is := strings.Fields(set.Elements)
		added, _, gone := diff.Of(was, is, func(text string) string { return text })
		if len(gone)+len(added) == 0 {
			continue
		}
		remove, err := elementsFor(set, gone)
		if err != nil {
			return err
		}
		add, err := elementsFor(set, added)
		if err != nil {
			return err
		}
		differ = append(differ, change{set, remove, add})
		for chunk := range slices.Chunk(remove, elementsPerMessage) {
			if err := c.SetDeleteElements(want.nftSet(set), chunk); err != nil {
				return err
			}
		}
		for chunk := range slices.Chunk(add, elementsPerMessage) {
			if err := c.SetAddElements(want.nftSet(set), chunk); err != nil {
				return err
			}
		}
	}
	if err := c.Flush(); err != nil {
		return err
	}
	for _, d := range differ {
		if len(d.gone)+len(d.added) <= fewElements && changedElements(want.nft, d.set.Name, d.gone, d.added) {
			continue
		}
		if got, err := haveElements(c, want.nft, d.set.Name); err != nil || got != d.set.Elements {
			return fmt.Errorf("set %s has %.200s; want %.200s (%w)", d.set.Name, got, d.set.Elements, err)
		}
	}
	return nil
}

// fewElements is how many elements are asked for one by one, instead of reading the set.
const fewElements = 16

// changedElements reports whether a set has what was added to it and has not what was removed. Where an
// interval ends another one may begin, which ends it as well. False may mean that the kernel does not
// answer such questions.
func changedElements(t *nftables.Table, set string, gone, added []nftables.SetElement) bool {
	for _, e := range added {
		there, known := hasElement(t, set, e)
		if known && !there && e.IntervalEnd {
			there, known = hasElement(t, set, nftables.SetElement{Key: e.Key})
		}
		if !known || !there {
			return false
		}
	}
	for _, e := range gone {
		if e.IntervalEnd || slices.ContainsFunc(added, func(a nftables.SetElement) bool { return !a.IntervalEnd && bytes.Equal(a.Key, e.Key) }) {
			continue // of another length now
		}
		if there, known := hasElement(t, set, e); !known || there {
			return false
		}
	}
	return true
}

// hasElement asks for one element. The kernel answers with the one that has the key, or with the
// beginning of the interval that the key is in.
func hasElement(t *nftables.Table, set string, e nftables.SetElement) (there, known bool) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM, 0)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: uint8(t.Family)})
	req.AddData(nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_TABLE, nl.ZeroTerminated(t.Name)))
	req.AddData(nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_SET, nl.ZeroTerminated(set)))
	list := nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED, nil)
	element := list.AddRtAttr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, nil)
	element.AddRtAttr(unix.NFTA_SET_ELEM_KEY|unix.NLA_F_NESTED, nil).AddRtAttr(unix.NFTA_DATA_VALUE, e.Key)
	if e.IntervalEnd {
		element.AddRtAttr(unix.NFTA_SET_ELEM_FLAGS, binary.BigEndian.AppendUint32(nil, unix.NFT_SET_ELEM_INTERVAL_END))
	}
	req.AddData(list)
	messages, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if errors.Is(err, unix.ENOENT) {
		return false, true
	}
	if err != nil || len(messages) != 1 || len(messages[0]) < nl.SizeofNfgenmsg {
		return false, false
	}
	nested := func(b []byte, kind uint16) []byte {
		attributes, _ := nl.ParseRouteAttr(b)
		for _, a := range attributes {
			if a.Attr.Type&^unix.NLA_F_NESTED == kind {
				return a.Value
			}
		}
		return nil
	}
	got := nested(nested(messages[0][nl.SizeofNfgenmsg:], unix.NFTA_SET_ELEM_LIST_ELEMENTS), unix.NFTA_LIST_ELEM)
	key := nested(nested(got, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE)
	flags := nested(got, unix.NFTA_SET_ELEM_FLAGS)
	end := len(flags) == 4 && binary.BigEndian.Uint32(flags)&unix.NFT_SET_ELEM_INTERVAL_END != 0
	return bytes.Equal(key, e.Key) && (e.IntervalEnd || !end), true
}

// replaceTable replaces the table as a whole.
func replaceTable(remove bool, t table) error {
	c, err := newConn()
	if err != nil {
		return err
	}
	c.AddTable(t.nft)
	c.DelTable(t.nft)
	if remove {
		return c.Flush()
	}
	c.AddTable(t.nft)
	for _, s := range t.sets {
		set := t.nftSet(s)
		if err := c.AddSet(set, nil); err != nil {
			return err
		}
		all, err := elementsFor(s, strings.Fields(s.Elements))
		if err != nil {
			return err
		}
		for chunk := range slices.Chunk(all, elementsPerMessage) {
			if err := c.SetAddElements(set, chunk); err != nil {
				return err
			}
		}
	}
	for _, want := range t.chains {
		chain := &nftables.Chain{Table: t.nft, Name: want.Name}
		if want.Hook != "" {
			policy := nftables.ChainPolicyAccept
			chain.Type, chain.Hooknum, chain.Priority, chain.Policy = nftables.ChainType(want.Kind()), hook(want.Hook), nftables.ChainPriorityRef(nftables.ChainPriority(want.Priority())), &policy
		}
		c.AddChain(chain)
		for _, text := range want.Rules {
			c.AddRule(&nftables.Rule{Table: t.nft, Chain: chain, Exprs: exprsOf(text), UserData: userdata.AppendString(nil, userdata.TypeComment, text)})
		}
	}
	return c.Flush()
}

// Dropped returns how many packets the rules of our tables in the network namespace of the calling
// thread have dropped since the tables were made, by reason (kernel.FilterChain.Drops); reasons for
// which none was are left out. The kernel counts; a table that is made anew begins at zero. It may be
// called beside a process that changes the tables.
func Dropped() (map[string]uint64, error) {
	c, err := newConn(nftables.AsLasting())
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.CloseLasting() }()
	dropped := make(map[string]uint64)
	for _, t := range []table{filterOf(kernel.Filter{}), bridgeOf(kernel.Bridge{})} {
		for _, chain := range t.chains {
			if chain.Drops == "" {
				continue
			}
			rules, err := c.GetRules(t.nft, &nftables.Chain{Name: chain.Name})
			if err != nil {
				return nil, err
			}
			for _, r := range rules { // none where there is no such table
				for _, e := range r.Exprs {
					if n, is := e.(*expr.Counter); is && n.Packets > 0 {
						dropped[chain.Drops] += n.Packets
					}
				}
			}
		}
	}
	return dropped, nil
}
