package rtnl

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// rules are what the texts of chains mean. TestFilterIsWhatItsTextSays compares them with what nft(8)
// makes of the texts.
var rules = map[string][]expr.Any{
	"ip saddr @local snat to ip saddr":                 slices.Concat(from("local"), itself()),
	"ip saddr @pods jump bydevice":                     slices.Concat(from("pods"), jump("bydevice")),
	"ip saddr @remote return":                          slices.Concat(from("remote"), leave()),
	`iifname "isthmus.vxlan" snat to ip saddr`:         slices.Concat(iif(expr.CmpOpEq, kernel.OverlayDevice), itself()),
	"iifname @underlay return":                         slices.Concat(byUnderlay(), leave()),
	`meta iifkind "veth" snat to ip saddr`:             slices.Concat(iifKind("veth"), itself()),
	`meta iifkind "bridge" snat to ip saddr`:           slices.Concat(iifKind("bridge"), itself()),
	"ct status dnat return":                            slices.Concat(translated(), leave()),
	"snat to ip saddr":                                 itself(),
	`oifname "isthmus*" ip daddr @remote jump topeers`: slices.Concat(ours(expr.MetaKeyOIFNAME), in(daddr, "remote", false), jump("topeers")),
	"ip daddr @pods ip saddr @remote jump frompeers":   slices.Concat(in(daddr, "pods", false), from("remote"), jump("frompeers")),
	"accept":                                         {verdict(expr.VerdictAccept)},
	"counter drop":                                   drop(),
	"jump bydevice":                                  jump("bydevice"),
	"udp dport 4800 jump outer":                      slices.Concat(toOverlay(), jump("outer")),
	"udp dport 4800 counter drop":                    slices.Concat(toOverlay(), drop()),
	"ct state established,related accept":            slices.Concat(answers(), accept()),
	"ip daddr @own accept":                           slices.Concat(ip4(), in(daddr, "own", false), accept()),
	"ip saddr @remote ip daddr != @remote accept":    slices.Concat(ip4(), in(saddr, "remote", false), in(daddr, "remote", true), accept()),
	"ip saddr != @remote ip daddr @remote accept":    slices.Concat(ip4(), in(saddr, "remote", true), in(daddr, "remote", false), accept()),
	"fib daddr type != local accept":                 slices.Concat(local(expr.CmpOpNeq), accept()),
	`iifname != "isthmus.vxlan" accept`:              slices.Concat(iif(expr.CmpOpNeq, kernel.OverlayDevice), accept()),
	`iifname "isthmus*" jump overlay`:                slices.Concat(ours(expr.MetaKeyIIFNAME), jump("overlay")),
	`oifname "isthmus.vxlan" counter drop`:           slices.Concat(oif(kernel.OverlayDevice), drop()),
	"iifname @underlay accept":                       slices.Concat(byUnderlay(), accept()),
	`meta iifkind "veth" counter drop`:               slices.Concat(iifKind("veth"), drop()),
	`meta iifkind "bridge" counter drop`:             slices.Concat(iifKind("bridge"), drop()),
	`iifname "isthmus*" jump translated`:             slices.Concat(ours(expr.MetaKeyIIFNAME), jump("translated")),
	`iifname "isthmus*" jump remote`:                 slices.Concat(ours(expr.MetaKeyIIFNAME), jump("remote")),
	"iifname @uplinks accept":                        slices.Concat(byName("uplinks"), accept()),
	"ip daddr @gateways udp dport 4800 counter drop": slices.Concat(etherType(unix.ETH_P_IP), in(daddr, "gateways", false), toOverlay(), drop()),
	"meta protocol 8021q @ll,116,12 0 counter drop":  slices.Concat(etherType(unix.ETH_P_8021Q), noVLAN(), drop()),
	"meta protocol 8021ad @ll,116,12 0 counter drop": slices.Concat(etherType(unix.ETH_P_8021AD), noVLAN(), drop()),
	"ct status dnat counter drop":                    slices.Concat(translated(), drop()),
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
	"ip daddr & 255.255.0.0 @remote16 jump clear":                               slices.Concat(ip4(), around(daddr), jump("clear")),
	"ip6 daddr @remote6 jump clear":                                             slices.Concat(ip6(), in6(daddr6, "remote6"), jump("clear")),
	"ip saddr & 255.255.0.0 @remote16 ip saddr @remote jump forged":             slices.Concat(ip4(), around(saddr), in(saddr, "remote", false), jump("forged")),
	"ip6 daddr @remote6 counter drop":                                           slices.Concat(ip6(), in6(daddr6, "remote6"), drop()),
	"ip daddr & 255.255.0.0 @remote16 ip saddr @elsewhere ip daddr @remote jump bydevice": slices.Concat(
		ip4(), around(daddr), in(saddr, "elsewhere", false), in(daddr, "remote", false), jump("bydevice")),
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

// around: the network of length 16 that the address is in is in the set remote16.
func around(offset uint32) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: []byte{0xff, 0xff, 0, 0}, Xor: make([]byte, 4)},
		&expr.Lookup{SourceRegister: 1, SetName: "remote16"},
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

func iif(op expr.CmpOp, name string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, equal(op, padded(name))}
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
