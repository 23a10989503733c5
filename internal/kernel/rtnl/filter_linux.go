package rtnl

import (
	"bytes"
	"cmp"
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

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// ErrFilter means that the packet filter could not be made. Apply then stops, and makes none of the
// objects that come after the filter.
var ErrFilter = errors.New("packet filter")

// elementsPerMessage limits the number of elements in a message, so that they fit into a netlink
// attribute (64 KiB).
const elementsPerMessage = 1000

// A table is a Filter, a SourceNAT or a Bridge in the terms of nftables.
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

func filterOf(f kernel.Filter) table { return table{filterTable, f.Chains(), f.Sets()} }

func sourceNATOf(s kernel.SourceNAT) table { return table{natTable, s.Chains(), s.Sets()} }

// transactionBytes is the size of the socket buffers for a transaction, which is one message to the
// kernel. A transaction with 10,000 nodes and 4,096 peers has 2 MB. The kernel's default is 208
// KiB.
const transactionBytes = 16 << 20

func newConn(o ...nftables.ConnOption) (*nftables.Conn, error) {
	return nftables.New(append(o, nftables.WithSockOptions(func(c *nfnl.Conn) error { enlargeBuffers(c); return nil }))...)
}

// enlargeBuffers enlarges the buffers for large transactions. If the process is not permitted to
// enlarge them, a large transaction fails and reports the error.
func enlargeBuffers(c *nfnl.Conn) {
	_ = c.SetWriteBuffer(transactionBytes)
	_ = c.SetReadBuffer(transactionBytes) // the kernel acknowledges each message of a transaction
}

// nftSet returns a set of the table.
func (t table) nftSet(s kernel.FilterSet) *nftables.Set {
	set := &nftables.Set{Table: t.nft, Name: s.Name, KeyType: nftables.TypeIPAddr, Interval: s.Interval, Size: s.Size}
	if s.Type == "ipv6_addr" {
		set.KeyType = nftables.TypeIP6Addr
	}
	if s.Type == "ifname" {
		set.KeyType, set.KeyByteOrder = nftables.TypeIFName, binaryutil.NativeEndian // nft(8) stores names in this order
	}
	return set
}

// elementsFor converts the elements of a kernel.FilterSet. It returns an error for elements that
// another program has added to the set.
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

// tablesRead is the result of the last read: the tables and their generation. The kernel increments
// the generation with every transaction in the namespace.
type tablesRead struct {
	generation uint32 // 0: unknown
	filters    []kernel.Filter
	sourceNAT  []kernel.SourceNAT
	bridges    []kernel.Bridge
}

// haveTables reads the tables and the foreign chains for forwarded packets. It uses the last result
// if only we have changed tables of the namespace since.
func (k *Kernel) haveTables() tablesRead {
	now := k.generation() // before the read, so that a concurrent change causes another read
	if now == 0 || now != k.tables.generation || !k.tables.complete() {
		k.tables = tablesRead{generation: now, filters: readFilter()}
		if k.owner.NAT {
			k.tables.sourceNAT, k.tables.bridges = readSourceNAT(), readBridge()
			if !k.lookForward() {
				k.tables.generation = 0
			}
		}
	}
	return k.tables
}

// complete reports whether the table of the Filter exists, and all tables that exist have the
// expected content.
func (r tablesRead) complete() bool {
	return len(r.filters) == 1 && r.filters[0] != changed && !slices.Contains(r.sourceNAT, changedNAT) && !slices.Contains(r.bridges, changedBridge)
}

// changed, changedNAT and changedBridge are values that no wanted State has.
var (
	changed       = kernel.Filter{Nodes: "changed"}
	changedNAT    = kernel.SourceNAT{Local: "changed"}
	changedBridge = kernel.Bridge{Uplinks: "changed"}
)

// readFilter reads the table of the Filter. It returns changed if the chains differ from the
// expected ones. If the kernel has no nftables, it returns no Filter, and Apply reports the reason
// when it makes the table.
func readFilter() []kernel.Filter {
	var f kernel.Filter
	elements, exists, err := readTable(filterTable, f.Sets(), func(comments func(string) []string) []kernel.FilterChain {
		f.Pod = comments("raw") == nil // only a node's filter has this chain
		return f.Chains()
	})
	switch {
	case !exists:
		return nil
	case err != nil:
		return []kernel.Filter{changed}
	}
	for name, e := range elements {
		f = f.WithSet(name, e)
	}
	return []kernel.Filter{f}
}

// readSourceNAT is readFilter for the table of the SourceNAT.
func readSourceNAT() []kernel.SourceNAT {
	var s kernel.SourceNAT
	elements, exists, err := readTable(natTable, s.Sets(), func(comments func(string) []string) []kernel.FilterChain {
		s.Self = kernel.SelfOf(comments("topeers"))
		return s.Chains()
	})
	switch {
	case !exists:
		return nil
	case err != nil:
		return []kernel.SourceNAT{changedNAT}
	}
	for name, e := range elements {
		s = s.WithSet(name, e)
	}
	return []kernel.SourceNAT{s}
}

// readBridge is readFilter for the table of the Bridge.
func readBridge() []kernel.Bridge {
	var b kernel.Bridge
	elements, exists, err := readTable(bridgeTable, b.Sets(), func(func(string) []string) []kernel.FilterChain { return kernel.BridgeChains })
	switch {
	case !exists:
		return nil
	case err != nil:
		return []kernel.Bridge{changedBridge}
	}
	for name, e := range elements {
		b = b.WithSet(name, e)
	}
	return []kernel.Bridge{b}
}

var errChanged = errors.New("another process has changed it")

// readTable returns the elements of the sets of a table, whether the table exists, and an error if
// its content is unexpected. The function chains returns the expected chains. It may call comments
// to read the comments of a chain's rules.
func readTable(t *nftables.Table, sets []kernel.FilterSet, chains func(comments func(chain string) []string) []kernel.FilterChain) (elements map[string]string, exists bool, err error) {
	c, err := newConn(nftables.AsLasting()) // the same socket for all requests
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
	rules := make(map[string][]*nftables.Rule)
	for name, chain := range have {
		if rules[name], err = c.GetRules(t, chain); err != nil {
			return nil, true, err
		}
	}
	want := chains(func(chain string) (comments []string) {
		for _, r := range rules[chain] {
			comments = append(comments, comment(r))
		}
		return comments
	})
	if len(have) != len(want) {
		return nil, true, errChanged
	}
	for _, w := range want {
		same := func(have *nftables.Rule, want kernel.FilterRule) bool {
			return comment(have) == want.String() && len(have.Exprs) == len(exprsOf(t.Family, want))
		}
		if have[w.Name] == nil || !isAs(have[w.Name], w) || !slices.EqualFunc(rules[w.Name], w.Rules, same) {
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

func comment(r *nftables.Rule) string {
	text, _ := userdata.GetString(r.UserData, userdata.TypeComment)
	return text
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

// haveElements returns the elements of a set in the form of a FilterSet.
func haveElements(c *nftables.Conn, t *nftables.Table, name string) (string, error) {
	set, err := c.GetSetByName(t, name)
	if err != nil {
		return "", err
	}
	elements, err := c.GetSetElements(set)
	if err != nil {
		return "", err
	}
	slices.SortFunc(elements, func(a, b nftables.SetElement) int { // if two intervals touch, the end of the first comes before the start of the second
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
	if start.IsValid() { // the last interval extends to the last address
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

// networkBetween returns the network of the addresses from start up to, but not including, end.
func networkBetween(start, end netip.Addr) string {
	for bits := range start.BitLen() + 1 {
		if p, err := start.Prefix(bits); err == nil && p.Addr() == start && afterLast(p) == end {
			return p.String()
		}
	}
	return start.String() + "-" + end.String() // not a network, so it is a foreign element
}

// afterLast returns the address after the last one of a network; it wraps around.
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

// unspecified returns the first address of a's family.
func unspecified(a netip.Addr) netip.Addr {
	if a.Is6() {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

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
		for _, rule := range want.Rules {
			c.AddRule(&nftables.Rule{Table: t.nft, Chain: chain, Exprs: exprsOf(t.nft.Family, rule), UserData: userdata.AppendString(nil, userdata.TypeComment, rule.String())})
		}
	}
	return c.Flush()
}

// Dropped returns how many packets the rules of our tables have dropped since the tables were made,
// by reason (kernel.FilterChain.Drops). Reasons whose count is 0 are missing. It uses the network
// namespace of the calling thread. The counters are the kernel's, so they restart at 0 when a table
// is recreated. Dropped may be called while another process changes the tables.
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
			for _, r := range rules { // none if the table does not exist
				for _, e := range r.Exprs {
					if n, ok := e.(*expr.Counter); ok && n.Packets > 0 {
						dropped[chain.Drops] += n.Packets
					}
				}
			}
		}
	}
	return dropped, nil
}
