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
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// ErrFilter says that the packet filter could not be made. Nothing that was to come after it in the
// same Apply has been done.
var ErrFilter = errors.New("packet filter")

// elementsPerMessage bounds a message to what fits a netlink attribute (64 KiB).
const elementsPerMessage = 1000

// rules are what the texts of kernel.FilterChains mean. TestFilterIsWhatItsTextSays compares them
// with what nft(8) makes of the texts.
var rules = map[string][]expr.Any{
	"drop":                                {verdict(expr.VerdictDrop)},
	"accept":                              {verdict(expr.VerdictAccept)},
	"jump bydevice":                       jump("bydevice"),
	"udp dport 4800 jump outer":           slices.Concat(udpTo(kernel.OverlayPort), jump("outer")),
	"udp dport 4800 drop":                 slices.Concat(udpTo(kernel.OverlayPort), drop()),
	"ct state established,related accept": slices.Concat(answers(), accept()),
	"ip daddr @own accept":                slices.Concat(ip4(), in(daddr, "own", false), accept()),
	"ip saddr @remote ip daddr != @remote accept":               slices.Concat(ip4(), in(saddr, "remote", false), in(daddr, "remote", true), accept()),
	"ip saddr != @remote ip daddr @remote accept":               slices.Concat(ip4(), in(saddr, "remote", true), in(daddr, "remote", false), accept()),
	"fib daddr type != local accept":                            slices.Concat(notLocal(), accept()),
	`iifname "isthmus*" accept`:                                 slices.Concat(ours(expr.CmpOpEq), accept()),
	"ip saddr @remote jump forged":                              slices.Concat(ip4(), in(saddr, "remote", false), jump("forged")),
	`oifname "isthmus.vxlan" drop`:                              slices.Concat(oif(kernel.OverlayDevice), drop()),
	"iifname @underlay accept":                                  {&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Lookup{SourceRegister: 1, SetName: "underlay"}, verdict(expr.VerdictAccept)},
	`meta iifkind "veth" drop`:                                  slices.Concat(iifKind("veth"), drop()),
	`meta iifkind "bridge" drop`:                                slices.Concat(iifKind("bridge"), drop()),
	"ip daddr @remote ip saddr @elsewhere jump bydevice":        slices.Concat(ip4(), in(daddr, "remote", false), in(saddr, "elsewhere", false), jump("bydevice")),
	`iifname "isthmus*" jump translated`:                        slices.Concat(ours(expr.CmpOpEq), jump("translated")),
	`iifname "isthmus*" jump remote`:                            slices.Concat(ours(expr.CmpOpEq), jump("remote")),
	`iifname "isthmus.vxlan" jump overlay`:                      slices.Concat(iif(padded(kernel.OverlayDevice), expr.CmpOpEq), jump("overlay")),
	"ip saddr @gateways fib saddr . iif oif != 0 accept":        slices.Concat(ip4(), in(saddr, "gateways", false), theWayBack(), accept()),
	"ip daddr @gateways fib saddr . iif oif != 0 jump bydevice": slices.Concat(ip4(), in(daddr, "gateways", false), theWayBack(), jump("bydevice")),
	"udp dport 4800 ip saddr @nodes fib saddr . iif oif != 0 accept": slices.Concat(
		udpTo(kernel.OverlayPort), ip4(), in(saddr, "nodes", false), theWayBack(), accept()),
}

// Offsets of the addresses in the IPv4 header.
const (
	saddr = 12
	daddr = 16
)

func verdict(kind expr.VerdictKind) expr.Any { return &expr.Verdict{Kind: kind} }
func drop() []expr.Any                       { return []expr.Any{verdict(expr.VerdictDrop)} }
func accept() []expr.Any                     { return []expr.Any{verdict(expr.VerdictAccept)} }
func jump(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

func equal(op expr.CmpOp, data []byte) expr.Any { return &expr.Cmp{Op: op, Register: 1, Data: data} }

func udpTo(port uint16) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, equal(expr.CmpOpEq, []byte{unix.IPPROTO_UDP}),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		equal(expr.CmpOpEq, binary.BigEndian.AppendUint16(nil, port)),
	}
}

func ip4() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, equal(expr.CmpOpEq, []byte{unix.NFPROTO_IPV4})}
}

func in(offset uint32, set string, invert bool) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4},
		&expr.Lookup{SourceRegister: 1, SetName: set, Invert: invert},
	}
}

func iif(name []byte, op expr.CmpOp) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, equal(op, name)}
}

// ours are all devices whose names begin like those of ours.
func ours(op expr.CmpOp) []expr.Any { return iif([]byte(kernel.TunPrefix), op) }

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

// notLocal: the destination is no address of the node.
func notLocal() []expr.Any {
	return []expr.Any{&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true}, equal(expr.CmpOpNeq, binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL))}
}

func answers() []expr.Any {
	states := expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(states), Xor: make([]byte, 4)},
		equal(expr.CmpOpNeq, make([]byte, 4)),
	}
}

var filterTable = &nftables.Table{Name: kernel.FilterTable, Family: nftables.TableFamilyINet}

// nftSet is a set of the table.
func nftSet(s kernel.FilterSet) *nftables.Set {
	set := &nftables.Set{Table: filterTable, Name: s.Name, KeyType: nftables.TypeIPAddr, Interval: s.Interval}
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
			if after := end(p); !after.IsUnspecified() {
				all = append(all, nftables.SetElement{Key: after.AsSlice(), IntervalEnd: true})
			}
		}
	}
	return all, nil
}

// filterRead is what was last read, and of which generation of the namespace's tables: the kernel
// counts it up with each change that anybody makes.
type filterRead struct {
	generation uint32 // 0: none
	filters    []kernel.Filter
}

// haveFilter reads the table, unless no table has changed since it was last read.
func (k *Kernel) haveFilter() []kernel.Filter {
	now := generation() // before it is read: what changes meanwhile is read again
	if now == 0 || now != k.filter.generation {
		k.filter = filterRead{now, readFilter()}
		if !slices.ContainsFunc(k.filter.filters, func(f kernel.Filter) bool { return f != changed }) {
			k.filter.generation = 0 // or an error has made it none, or another
		}
	}
	return k.filter.filters
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

// changed is a Filter that nobody wants.
var changed = kernel.Filter{Nodes: "changed"}

// readFilter reads the table. One whose chains are not as they should be reads as changed. Where the kernel has no nftables there is none, and making one tells why.
func readFilter() []kernel.Filter {
	c, err := nftables.New(nftables.AsLasting()) // one socket for all questions
	if err != nil {
		return nil
	}
	defer func() { _ = c.CloseLasting() }()
	tables, err := c.ListTablesOfFamily(filterTable.Family)
	if err != nil || !slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == filterTable.Name }) {
		return nil
	}
	chains, err := c.ListChainsOfTableFamily(filterTable.Family)
	if err != nil {
		return []kernel.Filter{changed}
	}
	chains = slices.DeleteFunc(chains, func(chain *nftables.Chain) bool { return chain.Table.Name != filterTable.Name })
	if len(chains) != len(kernel.FilterChains) {
		return []kernel.Filter{changed}
	}
	for _, want := range kernel.FilterChains {
		at := slices.IndexFunc(chains, func(chain *nftables.Chain) bool { return chain.Name == want.Name })
		if at < 0 || !isAs(chains[at], want) {
			return []kernel.Filter{changed}
		}
		have, err := c.GetRules(filterTable, chains[at])
		if err != nil || !slices.EqualFunc(have, want.Rules, func(r *nftables.Rule, text string) bool {
			said, _ := userdata.GetString(r.UserData, userdata.TypeComment)
			return said == text && len(r.Exprs) == len(rules[text])
		}) {
			return []kernel.Filter{changed}
		}
	}
	var f kernel.Filter
	for _, set := range f.Sets() {
		elements, err := haveElements(c, set.Name)
		if err != nil {
			return []kernel.Filter{changed}
		}
		f = f.WithSet(set.Name, elements)
	}
	return []kernel.Filter{f}
}

func isAs(have *nftables.Chain, want kernel.FilterChain) bool {
	if want.Hook == "" || have.Hooknum == nil || have.Priority == nil {
		return want.Hook == "" && have.Hooknum == nil
	}
	return *have.Hooknum == *hook(want.Hook) && int(*have.Priority) == want.Priority() && have.Type == nftables.ChainTypeFilter
}

func hook(name string) *nftables.ChainHook {
	return map[string]*nftables.ChainHook{
		"prerouting": nftables.ChainHookPrerouting, "input": nftables.ChainHookInput, "forward": nftables.ChainHookForward,
	}[name]
}

// haveElements returns what a Filter says of a set.
func haveElements(c *nftables.Conn, name string) (string, error) {
	set, err := c.GetSetByName(filterTable, name)
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
		texts = append(texts, networkBetween(start, netip.IPv4Unspecified()))
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
	for bits := range 33 {
		if p, err := first.Prefix(bits); err == nil && p.Addr() == first && end(p) == after {
			return p.String()
		}
	}
	return first.String() + "-" + after.String() // somebody's
}

// end is the address after the last of a network; after 255.255.255.255 comes 0.0.0.0.
func end(p netip.Prefix) netip.Addr {
	a := p.Addr().As4()
	last := binary.BigEndian.Uint32(a[:]) + uint32(1<<(32-p.Bits())-1)
	binary.BigEndian.PutUint32(a[:], last+1)
	return netip.AddrFrom4(a)
}

// changeFilter makes the table what it should be in one step: there is no moment without. Where only
// elements of sets differ from what was read, and nobody has changed a table since, it changes
// these: to replace the table takes the kernel some twenty milliseconds, since it waits until no
// packet is in the old chains. A transaction is one generation: if it is the only one since, the
// table is what was written, and need not be read again.
func (k *Kernel) changeFilter(remove bool, want kernel.Filter) error {
	have, before := k.filter, generation()
	known := !remove && len(have.filters) == 1 && have.filters[0] != changed && before != 0 && have.generation == before
	if !known || changeElements(have.filters[0], want) != nil {
		before = generation()
		if err := replaceFilter(remove, want); err != nil {
			return err
		}
	}
	if now := generation(); !remove && before != 0 && now == before+1 {
		k.filter = filterRead{now, []kernel.Filter{want}}
	}
	return nil
}

// changeElements changes the elements of the sets, and reads back what it has changed. After an
// error the table is what it was, or what the kernel made of it.
func changeElements(have, want kernel.Filter) error {
	c, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return err
	}
	defer func() { _ = c.CloseLasting() }()
	var differ []kernel.FilterSet
	for i, set := range want.Sets() {
		was := strings.Fields(have.Sets()[i].Elements)
		is := strings.Fields(set.Elements)
		gone, added := without(was, is), without(is, was)
		if len(gone)+len(added) == 0 {
			continue
		}
		differ = append(differ, set)
		remove, err := elementsFor(set, gone)
		if err != nil {
			return err
		}
		add, err := elementsFor(set, added)
		if err != nil {
			return err
		}
		for chunk := range slices.Chunk(remove, elementsPerMessage) {
			if err := c.SetDeleteElements(nftSet(set), chunk); err != nil {
				return err
			}
		}
		for chunk := range slices.Chunk(add, elementsPerMessage) {
			if err := c.SetAddElements(nftSet(set), chunk); err != nil {
				return err
			}
		}
	}
	if err := c.Flush(); err != nil {
		return err
	}
	for _, set := range differ {
		if got, err := haveElements(c, set.Name); err != nil || got != set.Elements {
			return fmt.Errorf("set %s has %.200s; want %.200s (%w)", set.Name, got, set.Elements, err)
		}
	}
	return nil
}

// without returns what is in a, and not in b.
func without(a, b []string) (rest []string) {
	in := make(map[string]struct{}, len(b))
	for _, text := range b {
		in[text] = struct{}{}
	}
	for _, text := range a {
		if _, is := in[text]; !is {
			rest = append(rest, text)
		}
	}
	return rest
}

// replaceFilter replaces the table as a whole.
func replaceFilter(remove bool, f kernel.Filter) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	c.AddTable(filterTable)
	c.DelTable(filterTable)
	if remove {
		return c.Flush()
	}
	c.AddTable(filterTable)
	for _, s := range f.Sets() {
		set := nftSet(s)
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
	for _, want := range kernel.FilterChains {
		chain := &nftables.Chain{Table: filterTable, Name: want.Name}
		if want.Hook != "" {
			policy := nftables.ChainPolicyAccept
			chain.Type, chain.Hooknum, chain.Priority, chain.Policy = nftables.ChainTypeFilter, hook(want.Hook), nftables.ChainPriorityRef(nftables.ChainPriority(want.Priority())), &policy
		}
		c.AddChain(chain)
		for _, text := range want.Rules {
			c.AddRule(&nftables.Rule{Table: filterTable, Chain: chain, Exprs: rules[text], UserData: userdata.AppendString(nil, userdata.TypeComment, text)})
		}
	}
	return c.Flush()
}
