package rtnl

import (
	"encoding/binary"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// exprsOf returns the expressions of a rule in a table of a family.
// TestFilterEqualsItsPrintedCommand compares them with the expressions that nft(8) makes from the
// rule's text.
func exprsOf(family nftables.TableFamily, rule kernel.FilterRule) []expr.Any {
	c := compiler{family: family}
	for _, term := range rule {
		c.add(term)
	}
	return c.exprs
}

// A compiler makes the expressions of one rule. In families with both IP versions, it adds a match
// of the version before the first match of an IP header, as nft(8) does.
type compiler struct {
	family  nftables.TableFamily
	version byte // NFPROTO of the matched version; 0: none yet
	exprs   []expr.Any
}

func (c *compiler) add(term kernel.Term) {
	switch t := term.(type) {
	case kernel.Fixed:
		c.fixed(t)
	case kernel.InSet:
		c.load(t.Field)
		c.then(&expr.Lookup{SourceRegister: 1, SetName: t.Set})
	case kernel.NotInSet:
		c.load(t.Field)
		c.then(&expr.Lookup{SourceRegister: 1, SetName: t.Set, Invert: true})
	case kernel.NearSet:
		c.load(t.Field)
		c.then(masked([]byte{0xff, 0xff, 0, 0}), &expr.Lookup{SourceRegister: 1, SetName: t.Set})
	case kernel.From:
		c.then(meta(expr.MetaKeyIIFNAME), is(nameOctets(string(t))))
	case kernel.To:
		c.then(meta(expr.MetaKeyOIFNAME), is(nameOctets(string(t))))
	case kernel.NotFrom:
		c.then(meta(expr.MetaKeyIIFNAME), isNot(nameOctets(string(t))))
	case kernel.FromKind:
		c.then(meta(metaIIFKind), is(padded(string(t))))
	case kernel.ToPort:
		c.then(meta(expr.MetaKeyL4PROTO), is([]byte{unix.IPPROTO_UDP}), payload(expr.PayloadBaseTransportHeader, 2, 2), is(bigEndian(uint16(t))))
	case kernel.EtherType:
		c.then(meta(expr.MetaKeyPROTOCOL), is(bigEndian(uint16(t))))
	case kernel.ICMPHead:
		c.then(payload(expr.PayloadBaseTransportHeader, 0, 2), is([]byte{t.Type, t.Code}))
	case kernel.Jump:
		c.then(&expr.Verdict{Kind: expr.VerdictJump, Chain: string(t)})
	case kernel.SourceTo:
		c.then(&expr.Immediate{Register: 1, Data: t.Addr.AsSlice()}, sourceNAT())
	}
}

func (c *compiler) fixed(term kernel.Fixed) {
	switch term {
	case kernel.IsAnswer:
		c.then(connection(expr.CtKeySTATE, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED)...)
	case kernel.IsTranslated:
		c.then(connection(expr.CtKeySTATUS, ctStatusDNAT)...)
	case kernel.IsICMP:
		c.ip(unix.NFPROTO_IPV4)
		c.then(payload(expr.PayloadBaseNetworkHeader, 9, 1), is([]byte{unix.IPPROTO_ICMP}))
	case kernel.HasReturnPath:
		c.then(&expr.Fib{Register: 1, FlagSADDR: true, FlagIIF: true, ResultOIF: true}, isNot(make([]byte, 4)))
	case kernel.IsLocal:
		c.then(destinationType(), is(binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)))
	case kernel.IsNotLocal:
		c.then(destinationType(), isNot(binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)))
	case kernel.IsPriorityTag:
		c.then(payload(expr.PayloadBaseLLHeader, 14, 2), masked([]byte{0x0f, 0xff}), is([]byte{0, 0}))
	case kernel.DoAccept:
		c.then(&expr.Verdict{Kind: expr.VerdictAccept})
	case kernel.DoReturn:
		c.then(&expr.Verdict{Kind: expr.VerdictReturn})
	case kernel.DoDrop:
		c.then(&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop})
	case kernel.DoNotTrack:
		c.then(&expr.Notrack{})
	case kernel.DoKeepSource:
		c.load(kernel.Source)
		c.then(sourceNAT())
	}
}

func (c *compiler) then(exprs ...expr.Any) { c.exprs = append(c.exprs, exprs...) }

// load loads a field into register 1.
func (c *compiler) load(field kernel.Field) {
	switch field {
	case kernel.Source:
		c.ip(unix.NFPROTO_IPV4)
		c.then(payload(expr.PayloadBaseNetworkHeader, 12, 4))
	case kernel.Destination:
		c.ip(unix.NFPROTO_IPV4)
		c.then(payload(expr.PayloadBaseNetworkHeader, 16, 4))
	case kernel.Destination6:
		c.ip(unix.NFPROTO_IPV6)
		c.then(payload(expr.PayloadBaseNetworkHeader, 24, 16))
	case kernel.InDevice:
		c.then(meta(expr.MetaKeyIIFNAME))
	}
}

// ip adds a match of an IP version, if the family has both versions and the rule does not match the
// version yet.
func (c *compiler) ip(version byte) {
	if c.version == version {
		return
	}
	c.version = version
	switch c.family {
	case nftables.TableFamilyINet:
		c.then(meta(expr.MetaKeyNFPROTO), is([]byte{version}))
	case nftables.TableFamilyBridge: // its rules only match IPv4
		c.then(meta(expr.MetaKeyPROTOCOL), is(bigEndian(unix.ETH_P_IP)))
	}
}

// ctStatusDNAT is IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h.
const ctStatusDNAT = 1 << 5

// metaIIFKind is NFT_META_IIFKIND of linux/netfilter/nf_tables.h, Linux 5.1.
const metaIIFKind expr.MetaKey = 26

func meta(key expr.MetaKey) expr.Any { return &expr.Meta{Key: key, Register: 1} }

func payload(base expr.PayloadBase, offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: 1, Base: base, Offset: offset, Len: length}
}

func is(data []byte) expr.Any    { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data} }
func isNot(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: data} }

func masked(mask []byte) expr.Any {
	return &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask))}
}

func destinationType() expr.Any {
	return &expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true}
}

func sourceNAT() expr.Any {
	return &expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1}
}

// connection returns a match of connections that have at least one of the bits.
func connection(key expr.CtKey, bits uint32) []expr.Any {
	return []expr.Any{&expr.Ct{Key: key, Register: 1}, masked(binaryutil.NativeEndian.PutUint32(bits)), isNot(make([]byte, 4))}
}

// nameOctets returns the octets that the kernel compares with a device name: the whole name, or the
// part before a trailing "*".
func nameOctets(name string) []byte {
	if prefix, found := strings.CutSuffix(name, "*"); found {
		return []byte(prefix)
	}
	return padded(name)
}

func padded(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func bigEndian(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }
