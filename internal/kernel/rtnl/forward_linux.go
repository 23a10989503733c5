package rtnl

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	nfnl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// Verdicts of linux/netfilter.h.
const (
	nfDrop   = 0
	nfAccept = 1
)

// A foreignRule has the relevant properties of another program's rule.
type foreignRule struct {
	handle  uint64
	comment string
	refuses bool // the rule drops or rejects everything
}

// rulesOf returns the rules of a chain, in order. It parses the messages itself, because package
// nftables does not support all expressions.
func rulesOf(t *nftables.Table, chain string) (all []foreignRule, err error) {
	c, err := nfnl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	which, err := nfnl.MarshalAttributes([]nfnl.Attribute{
		{Type: unix.NFTA_RULE_TABLE, Data: append([]byte(t.Name), 0)}, {Type: unix.NFTA_RULE_CHAIN, Data: append([]byte(chain), 0)},
	})
	if err != nil {
		return nil, err
	}
	answers, err := c.Execute(nfnl.Message{Header: nfnl.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETRULE, Flags: nfnl.Request | nfnl.Dump},
		Data: append([]byte{byte(t.Family), unix.NFNETLINK_V0, 0, 0}, which...)})
	if err != nil {
		return nil, err
	}
	for _, m := range answers {
		if len(m.Data) < nl.SizeofNfgenmsg {
			continue
		}
		r, in, err := ruleFrom(m.Data[nl.SizeofNfgenmsg:])
		if err != nil {
			return nil, err
		}
		if in == [2]string{t.Name, chain} {
			all = append(all, r)
		}
	}
	return all, nil
}

// ruleFrom parses the attributes of a rule. It also returns the names of the rule's table and
// chain.
func ruleFrom(b []byte) (r foreignRule, in [2]string, err error) {
	d, err := nfnl.NewAttributeDecoder(b)
	if err != nil {
		return r, in, err
	}
	d.ByteOrder = binary.BigEndian
	for d.Next() {
		switch d.Type() {
		case unix.NFTA_RULE_TABLE:
			in[0] = d.String()
		case unix.NFTA_RULE_CHAIN:
			in[1] = d.String()
		case unix.NFTA_RULE_HANDLE:
			r.handle = d.Uint64()
		case unix.NFTA_RULE_USERDATA:
			r.comment, _ = userdata.GetString(d.Bytes(), userdata.TypeComment)
		case unix.NFTA_RULE_EXPRESSIONS:
			conditions, refuses := false, false
			d.Nested(func(list *nfnl.AttributeDecoder) error {
				for list.Next() {
					list.Nested(func(e *nfnl.AttributeDecoder) error {
						name, data := "", []byte(nil)
						for e.Next() {
							switch e.Type() {
							case unix.NFTA_EXPR_NAME:
								name = e.String()
							case unix.NFTA_EXPR_DATA:
								data = e.Bytes()
							}
						}
						switch name {
						case "counter", "log":
						case "match":
							match, text := matchIn(data)
							if match != "comment" {
								conditions = true
							} else if r.comment == "" { // a comment in the form of iptables-restore
								r.comment = text
							}
						case "reject":
							refuses = true
						case "immediate":
							refuses = refuses || verdictIn(data) == nfDrop
						case "target":
							refuses = refuses || targetIn(data) == "REJECT"
						default:
							conditions = true
						}
						return nil
					})
				}
				return nil
			})
			r.refuses = refuses && !conditions
		}
	}
	return r, in, d.Err()
}

// verdictIn returns the verdict in an "immediate" expression, or nfAccept if the expression has no
// verdict.
func verdictIn(b []byte) (code uint32) {
	code = nfAccept
	d, err := nfnl.NewAttributeDecoder(b)
	if err != nil {
		return code
	}
	d.ByteOrder = binary.BigEndian
	for d.Next() {
		if d.Type() == unix.NFTA_IMMEDIATE_DATA {
			d.Nested(func(d *nfnl.AttributeDecoder) error {
				for d.Next() {
					if d.Type() == unix.NFTA_DATA_VERDICT {
						d.Nested(func(d *nfnl.AttributeDecoder) error {
							for d.Next() {
								if d.Type() == unix.NFTA_VERDICT_CODE {
									code = d.Uint32()
								}
							}
							return nil
						})
					}
				}
				return nil
			})
		}
	}
	return code
}

// targetIn returns the name of an xtables target.
func targetIn(b []byte) string {
	d, err := nfnl.NewAttributeDecoder(b)
	if err != nil {
		return ""
	}
	for d.Next() {
		if d.Type() == unix.NFTA_TARGET_NAME {
			return d.String()
		}
	}
	return ""
}

// matchIn returns the name of an xtables match, and the text of a comment.
func matchIn(b []byte) (name, text string) {
	d, err := nfnl.NewAttributeDecoder(b)
	if err != nil {
		return "", ""
	}
	for d.Next() {
		switch d.Type() {
		case unix.NFTA_MATCH_NAME:
			name = d.String()
		case unix.NFTA_MATCH_INFO:
			text, _, _ = strings.Cut(string(d.Bytes()), "\x00")
		}
	}
	return name, text
}

// A forwarding is a foreign chain for forwarded packets, and the effect of that chain on packets
// that none of its rules accepts.
type forwarding struct {
	accept       kernel.Accept
	refuses      bool   // the end of the chain drops packets
	before       uint64 // handle of the rule that drops or rejects everything; 0: the policy drops packets
	ours         []foreignRule
	correct      bool // our rules are those of accept, at the right position
	unchangeable bool // the chain cannot be changed safely
}

// add records the next rule of the chain.
func (f *forwarding) add(r foreignRule) {
	gateway, elsewhere, ours := kernel.OwnComment(r.comment)
	switch {
	case ours:
		f.ours = append(f.ours, r)
		f.accept.Gateways = withWord(f.accept.Gateways, gateway)
		f.accept.Elsewhere = withWord(f.accept.Elsewhere, elsewhere)
		hasComment := func(r foreignRule, comment string) bool { return r.comment == comment }
		f.correct = f.before == 0 && slices.EqualFunc(f.ours, f.accept.Comments(), hasComment)
	case r.refuses && f.before == 0:
		f.refuses, f.before = true, r.handle
	}
}

// withWord appends a word to a text unless the word is empty or already there.
func withWord(text, word string) string {
	if words := strings.Fields(text); word != "" && !slices.Contains(words, word) {
		return strings.Join(append(words, word), " ")
	}
	return text
}

// families maps names of nftables families to numbers, for the families whose chains can see
// forwarded IPv4 packets.
var families = map[string]nftables.TableFamily{"ip": nftables.TableFamilyIPv4, "inet": nftables.TableFamilyINet}

// readForwarding returns the nftables chains for forwarded packets, including those of
// iptables-nft.
func readForwarding() (all []forwarding, err error) {
	c, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return nil, nil // the kernel has no nftables
	}
	defer func() { _ = c.CloseLasting() }()
	for kind, family := range families {
		chains, err := c.ListChainsOfTableFamily(family)
		if err != nil {
			return nil, err
		}
		for _, chain := range chains {
			if !forwards(chain) || chain.Table.Name == kernel.FilterTable {
				continue
			}
			f := forwarding{accept: kernel.Accept{Program: kernel.NFT, Family: kind, Table: chain.Table.Name, Chain: chain.Name}}
			if family == nftables.TableFamilyIPv4 && chain.Table.Name == "filter" && chain.Name == "FORWARD" {
				f.accept.Program = kernel.IptablesNFT
			}
			f.refuses = chain.Policy != nil && *chain.Policy == nftables.ChainPolicyDrop
			found, err := rulesOf(&nftables.Table{Name: chain.Table.Name, Family: family}, chain.Name)
			if err != nil {
				return nil, err
			}
			for _, r := range found {
				f.add(r)
			}
			all = append(all, f)
		}
	}
	return all, nil
}

// forwards reports whether a chain filters forwarded packets.
func forwards(c *nftables.Chain) bool {
	return c.Type == nftables.ChainTypeFilter && c.Hooknum != nil && *c.Hooknum == *nftables.ChainHookForward
}

// protocols has the IP protocol numbers for the names in AcceptRules.
var protocols = map[string]byte{"udp": unix.IPPROTO_UDP, "icmp": unix.IPPROTO_ICMP, "tcp": unix.IPPROTO_TCP}

// acceptRules returns the rules of an Accept in order, with the expressions that iptables-nft would
// use.
func acceptRules(a kernel.Accept) (all [][]expr.Any) {
	for _, r := range a.Rules() {
		c := compiler{family: families[a.Family]}
		if r.In {
			c.then(meta(expr.MetaKeyIIFNAME), is([]byte(kernel.TunPrefix)))
		}
		if r.Out {
			c.then(meta(expr.MetaKeyOIFNAME), is([]byte(kernel.TunPrefix)))
		}
		if r.Source.IsValid() {
			c.load(kernel.Source)
			c.then(is(r.Source.AsSlice()))
		}
		if r.Destination.IsValid() {
			c.load(kernel.Destination)
			c.then(is(r.Destination.AsSlice()))
		}
		if r.Protocol != "" {
			c.then(meta(expr.MetaKeyL4PROTO), is([]byte{protocols[r.Protocol]}))
		}
		all = append(all, append(c.exprs, &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictAccept}))
	}
	return all
}

// lookForward reads the nftables chains for forwarded packets again. On failure it keeps the known
// chains and returns false.
func (k *Kernel) lookForward() bool {
	now, err := readForwarding()
	if err != nil {
		return false
	}
	k.forward = slices.Concat(now, slices.DeleteFunc(k.forward, func(f forwarding) bool { return f.accept.Program != kernel.IptablesLegacy }))
	names := make([][]byte, len(now))
	for i, f := range now {
		names[i] = append([]byte(f.accept.Chain), 0)
	}
	k.memory.chains.Store(&names)
	return true
}

func (k *Kernel) lookLegacy() {
	k.legacy = time.Now()
	k.forward = append(slices.DeleteFunc(k.forward, func(f forwarding) bool { return f.accept.Program == kernel.IptablesLegacy }), legacyForwarding()...)
}

// acceptsIn returns two lists. have contains our existing accept rules that are correct or have to
// be removed. want contains the accept rules that are needed: none if wanted is empty, otherwise
// one Accept for each chain that drops packets. Chains that cannot be changed safely are skipped;
// Limits reports them.
func (k *Kernel) acceptsIn(wanted []kernel.Accept) (have, want []kernel.Accept) {
	for _, f := range k.forward {
		if f.unchangeable {
			continue
		}
		needed := len(wanted) > 0 && f.refuses
		if needed {
			want = append(want, f.accept.WithGatewaysOf(wanted[0]))
		}
		if len(f.ours) > 0 && (f.correct || !needed) {
			have = append(have, f.accept)
		}
	}
	return have, want
}

// changeAccept removes our rules from a chain and adds the needed ones, in one transaction.
func (k *Kernel) changeAccept(remove bool, a kernel.Accept) error {
	if a.Program == kernel.IptablesLegacy {
		err := changeLegacy(remove, a)
		k.lookLegacy()
		return err
	}
	now, err := readForwarding()
	if err != nil {
		return err
	}
	at := slices.IndexFunc(now, func(f forwarding) bool { return f.accept.InChain() == a.InChain() })
	if at < 0 {
		k.lookForward()
		return unix.ENOENT
	}
	f := now[at]
	c, err := nftables.New()
	if err != nil {
		return err
	}
	chain := &nftables.Chain{Table: &nftables.Table{Name: a.Table, Family: families[a.Family]}, Name: a.Chain}
	for _, r := range f.ours {
		if err := c.DelRule(&nftables.Rule{Table: chain.Table, Chain: chain, Handle: r.handle}); err != nil {
			return err
		}
	}
	comments := a.Comments()
	for i, exprs := range acceptRules(a) {
		r := &nftables.Rule{Table: chain.Table, Chain: chain, Exprs: exprs, Position: f.before,
			UserData: userdata.AppendString(nil, userdata.TypeComment, comments[i])}
		switch {
		case remove || !f.refuses:
		case f.before != 0:
			c.InsertRule(r)
		default:
			c.AddRule(r)
		}
	}
	err = c.Flush()
	if errors.Is(err, unix.EPERM) { // we could make our own tables, so CAP_NET_ADMIN is not missing
		err = errOwned
	}
	k.lookForward()
	return err
}

// errOwned means that the table has the flag owner, as the tables of firewalld do.
var errOwned = errors.New("only the process that owns the table can change it")

// refusal describes the effect of an Accept that could not be made, and the remedy.
func refusal(a kernel.Accept, err error) kernel.Limit {
	remedy := "`" + kernel.Op{Object: a}.Command("") + "`"
	switch {
	case errors.Is(err, errOwned) && a.Table == "firewalld":
		remedy = "`firewall-cmd --permanent --zone=trusted --add-interface=" + kernel.OverlayDevice + " && firewall-cmd --reload`, and add the pods' networks to that zone (--add-source), because all traffic of pods needs it; or set NftablesTableOwner=no in firewalld.conf"
	case errors.Is(err, errOwned):
		remedy = "`iifname \"isthmus*\" accept` and `oifname \"isthmus*\" accept` in the configuration of that process"
	}
	return kernel.Limit{Reason: kernel.LimitUncertain, Message: fmt.Sprintf(
		"%v drops packets that none of its rules accepts, and Isthmus cannot add a rule (%v), so packets between pods and peers may be dropped; want %s", a, err, remedy)}
}

// masqueradeCost describes the effect of masquerading pods, for messages.
const masqueradeCost = "peers then see one address for all pods of the node, and their network policies cannot tell pods apart"

// Limits returns the known restrictions for traffic between pods and peers. Foreign rules cause
// some of them. Others exist because the last Apply could not make an optional object. want is the
// wanted SourceNAT. If refresh is false, Limits does not read the foreign rules again.
func (k *Kernel) Limits(want kernel.SourceNAT, refresh bool) []kernel.Limit {
	if refresh {
		k.theirs = append(earlyNAT(), legacyLimits(want)...)
	}
	all := slices.Concat(k.unmade, k.theirs)
	slices.SortFunc(all, func(a, b kernel.Limit) int {
		return cmp.Or(cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Message, b.Message))
	})
	return all
}

// earlyNAT returns the Limits caused by foreign chains that translate addresses before our chains
// do.
func earlyNAT() (all []kernel.Limit) {
	c, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return nil
	}
	defer func() { _ = c.CloseLasting() }()
	for kind, family := range families {
		chains, err := c.ListChainsOfTableFamily(family)
		if err != nil {
			continue // the next call tries again
		}
		for _, chain := range chains {
			early := chain.Type == nftables.ChainTypeNAT && chain.Hooknum != nil && *chain.Hooknum == *nftables.ChainHookPostrouting &&
				chain.Priority != nil && *chain.Priority < kernel.SourceNATPriority
			if !early || chain.Table.Name == kernel.FilterTable {
				continue
			}
			found, err := rulesOf(&nftables.Table{Name: chain.Table.Name, Family: family}, chain.Name)
			if err != nil || len(found) == 0 {
				continue
			}
			all = append(all, kernel.Limit{Reason: kernel.LimitMasqueraded, Message: fmt.Sprintf(
				"chain %s of table %s %s has priority %d, so it masquerades pods before Isthmus can exempt them; %s; want a priority of %d or more",
				chain.Name, kind, chain.Table.Name, *chain.Priority, masqueradeCost, kernel.SourceNATPriority)})
		}
	}
	return all
}
