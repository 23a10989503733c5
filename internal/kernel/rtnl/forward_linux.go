package rtnl

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	nfnl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// iptablesFilter is the table filter of iptables-nft.
var iptablesFilter = &nftables.Table{Name: "filter", Family: nftables.TableFamilyIPv4}

const forwardChain = "FORWARD"

// Verdicts of linux/netfilter.h.
const (
	nfDrop   = 0
	nfAccept = 1
)

// A foreignRule is a rule of others, as far as it is looked at.
type foreignRule struct {
	handle  uint64
	comment string
	refuses bool // it drops or rejects everything
	named   bool // it names devices of ours
}

// rulesOf reads the rules of a chain, in their order. Package nftables knows not all expressions.
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

// ruleFrom reads the attributes of a rule; in are its table and chain.
func ruleFrom(b []byte) (r foreignRule, in [2]string, err error) {
	d, err := nfnl.NewAttributeDecoder(b)
	if err != nil {
		return r, in, err
	}
	d.ByteOrder = binary.BigEndian
	r.named = bytes.Contains(b, []byte(kernel.TunPrefix))
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
							} else if r.comment == "" { // as iptables-restore has it
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

// verdictIn is the verdict of an expression "immediate", nfAccept where it has none.
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

// targetIn is the name of a target of xtables.
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

// matchIn is the name of a match of xtables, and what it says as a text.
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

// A forwarding is what FORWARD of iptables-nft does with what nobody accepts.
type forwarding struct {
	refuses bool   // at its end
	before  uint64 // handle of the rule that refuses everything; 0: the policy does
	ours    []foreignRule
	right   bool // ours are where they should be
}

// readForwarding reads the chain; there is none where iptables-nft was never used.
func readForwarding() (f forwarding, err error) {
	c, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return f, nil // a kernel without
	}
	defer func() { _ = c.CloseLasting() }()
	chains, err := c.ListChainsOfTableFamily(iptablesFilter.Family)
	if err != nil {
		return f, err
	}
	at := slices.IndexFunc(chains, func(chain *nftables.Chain) bool {
		return chain.Table.Name == iptablesFilter.Name && chain.Name == forwardChain && chain.Hooknum != nil
	})
	if at < 0 {
		return f, nil
	}
	f.refuses = chains[at].Policy != nil && *chains[at].Policy == nftables.ChainPolicyDrop
	found, err := rulesOf(iptablesFilter, forwardChain)
	if err != nil {
		return f, err
	}
	for _, r := range found {
		switch {
		case r.comment == kernel.AcceptComment:
			f.ours = append(f.ours, r)
			f.right = len(f.ours) == len(acceptRules()) && f.before == 0
		case r.refuses && f.before == 0:
			f.refuses, f.before = true, r.handle
		}
	}
	return f, nil
}

// acceptRules are the rules of an Accept, as iptables-nft would make them.
func acceptRules() (all [][]expr.Any) {
	for _, key := range []expr.MetaKey{expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME} {
		all = append(all, slices.Concat(ours(key), []expr.Any{&expr.Counter{}}, accept()))
	}
	return all
}

// lookForward reads the chain. While it cannot be read it is what it was.
func (k *Kernel) lookForward() {
	if f, err := readForwarding(); err == nil {
		k.forward = f
	}
}

// accepts are those that are there: all that is wanted where nothing needs to be accepted.
func (f forwarding) accepts(want []kernel.Accept) []kernel.Accept {
	if len(want) == 0 && len(f.ours) > 0 || len(want) > 0 && (f.right || !f.refuses && len(f.ours) == 0) {
		return []kernel.Accept{{}}
	}
	return nil
}

// changeAccept takes away what is there, and adds what is needed, in one step.
func (k *Kernel) changeAccept(remove bool) error {
	f, err := readForwarding()
	if err != nil {
		return err
	}
	c, err := nftables.New()
	if err != nil {
		return err
	}
	chain := &nftables.Chain{Table: iptablesFilter, Name: forwardChain}
	for _, r := range f.ours {
		if err := c.DelRule(&nftables.Rule{Table: iptablesFilter, Chain: chain, Handle: r.handle}); err != nil {
			return err
		}
	}
	for _, exprs := range acceptRules() {
		r := &nftables.Rule{Table: iptablesFilter, Chain: chain, Exprs: exprs, Position: f.before,
			UserData: userdata.AppendString(nil, userdata.TypeComment, kernel.AcceptComment)}
		switch {
		case remove || !f.refuses:
		case f.before != 0:
			c.InsertRule(r)
		default:
			c.AddRule(r)
		}
	}
	err = c.Flush()
	k.lookForward()
	return err
}

// masqueradeCost is what it costs that pods are masqueraded.
const masqueradeCost = "peers then see one address for all pods of the node, and their network policies cannot tell pods apart"

// Limits are what rules of others keep from working between pods and peers, and what an Apply could
// not make of what is optional: as far as can be seen, of the wanted SourceNAT.
func (k *Kernel) Limits(want kernel.SourceNAT) (all []kernel.Limit) {
	all = slices.Clone(k.unmade)
	c, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return all
	}
	defer func() { _ = c.CloseLasting() }()
	for kind, family := range map[string]nftables.TableFamily{"ip": nftables.TableFamilyIPv4, "inet": nftables.TableFamilyINet} {
		chains, err := c.ListChainsOfTableFamily(family)
		if err != nil {
			continue // it is asked again
		}
		for _, chain := range chains {
			if chain.Table.Name == kernel.FilterTable || chain.Hooknum == nil || chain.Priority == nil {
				continue
			}
			name := fmt.Sprintf("chain %s of table %s %s", chain.Name, kind, chain.Table.Name)
			found, err := rulesOf(&nftables.Table{Name: chain.Table.Name, Family: family}, chain.Name)
			if err != nil || len(found) == 0 && (chain.Policy == nil || *chain.Policy == nftables.ChainPolicyAccept) {
				continue
			}
			refuses := chain.Policy != nil && *chain.Policy == nftables.ChainPolicyDrop || slices.ContainsFunc(found, func(r foreignRule) bool { return r.refuses })
			named := slices.ContainsFunc(found, func(r foreignRule) bool { return r.named })
			switch {
			case chain.Type == nftables.ChainTypeNAT && *chain.Hooknum == *nftables.ChainHookPostrouting && *chain.Priority < kernel.SourceNATPriority:
				all = append(all, kernel.Limit{Reason: kernel.LimitMasqueraded, Message: fmt.Sprintf(
					"%s has priority %d, before ours: where it masquerades pods they are not exempted; %s; want a priority of %d or more", name, *chain.Priority, masqueradeCost, kernel.SourceNATPriority)})
			case chain.Type == nftables.ChainTypeFilter && *chain.Hooknum == *nftables.ChainHookForward && refuses && !named &&
				!(family == iptablesFilter.Family && chain.Table.Name == iptablesFilter.Name && chain.Name == forwardChain):
				all = append(all, kernel.Limit{Reason: kernel.LimitUncertain, Message: fmt.Sprintf(
					"%s drops what none of its rules accepts, and none names our devices: packets between pods and peers may be dropped; want `nft insert rule %s %s %s iifname \"isthmus*\" accept` and the same with oifname",
					name, kind, chain.Table.Name, chain.Name)})
			}
		}
	}
	all = append(all, legacyLimits(want)...)
	slices.SortFunc(all, func(a, b kernel.Limit) int {
		return cmp.Or(cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Message, b.Message))
	})
	return all
}
