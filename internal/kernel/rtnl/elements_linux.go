package rtnl

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
	nfnl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/diff"
	"github.com/isthmus-net/isthmus/internal/kernel"
)

// openNFT returns the socket for frequent nftables requests. The socket stays open: closing one
// makes the kernel finish all earlier removals from tables, which waits for all CPUs.
func (k *Kernel) openNFT() (*nfnl.Conn, error) {
	if k.nft == nil {
		c, err := nfnl.Dial(unix.NETLINK_NETFILTER, nil)
		if err != nil {
			return nil, err
		}
		k.nft = c
		enlargeBuffers(c)
	}
	return k.nft, nil
}

// closeNFT closes the socket, which also drops unread responses.
func (k *Kernel) closeNFT() {
	if k.nft != nil {
		_ = k.nft.Close()
		k.nft = nil
	}
}

// generation returns the generation of the namespace's tables, or 0 if it is unknown.
func (k *Kernel) generation() uint32 {
	c, err := k.openNFT()
	if err != nil {
		return 0
	}
	messages, err := c.Execute(nfnl.Message{Header: nfnl.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: nfnl.Request},
		Data: []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0}})
	if err != nil || len(messages) != 1 || len(messages[0].Data) < nl.SizeofNfgenmsg {
		k.closeNFT()
		return 0
	}
	if id := attributeIn(messages[0].Data[nl.SizeofNfgenmsg:], unix.NFTA_GEN_ID); len(id) == 4 {
		return binary.BigEndian.Uint32(id)
	}
	return 0
}

// attributeIn returns the value of the first attribute of the type kind.
func attributeIn(b []byte, kind uint16) []byte {
	attributes, _ := nl.ParseRouteAttr(b)
	for _, a := range attributes {
		if a.Attr.Type&^unix.NLA_F_NESTED == kind {
			return a.Value
		}
	}
	return nil
}

// changeFilter, changeBridge and changeSourceNAT bring a table to its desired state. After a
// foreign transaction they read all tables again instead of replacing the table, because a
// replacement would take longer and reset the table's counters.
func (k *Kernel) changeFilter(remove bool, want kernel.Filter) error {
	have := func() *table {
		if h := k.tables.filters; len(h) == 1 && h[0] != changed && h[0].Pod == want.Pod {
			t := filterOf(h[0])
			return &t
		}
		return nil
	}
	return k.changeTable(remove, have, filterOf(want), func() { k.tables.filters = []kernel.Filter{want} })
}

func (k *Kernel) changeBridge(remove bool, want kernel.Bridge) error {
	have := func() *table {
		if h := k.tables.bridges; len(h) == 1 && h[0] != changedBridge {
			t := bridgeOf(h[0])
			return &t
		}
		return nil
	}
	return k.changeTable(remove, have, bridgeOf(want), func() { k.tables.bridges = []kernel.Bridge{want} })
}

func (k *Kernel) changeSourceNAT(remove bool, want kernel.SourceNAT) error {
	have := func() *table {
		if h := k.tables.sourceNAT; len(h) == 1 && h[0] != changedNAT && h[0].Self == want.Self {
			t := sourceNATOf(h[0])
			return &t
		}
		return nil
	}
	return k.changeTable(remove, have, sourceNATOf(want), func() { k.tables.sourceNAT = []kernel.SourceNAT{want} })
}

// changeTable brings a table to its desired state in one transaction, so that the table never
// disappears. If only elements of sets differ, it changes these: replacing the table takes some 20
// ms, because the kernel waits until no packet is in the old chains. The kernel changes elements
// only if the tables still have the generation that was read. Then the next generation comes from
// our own transaction, and the tables need not be read again. have returns the table that was last
// read, or nil if its chains differ from the wanted ones.
func (k *Kernel) changeTable(remove bool, have func() *table, want table, remember func()) error {
	doubt := func() { // read everything again, because we may have ignored the event of a foreign transaction as our own
		k.memory.filter.Store(true)
		k.busy = true
	}
	if k.tables.generation == 0 || !k.tables.complete() {
		k.haveTables()
	}
	for again := false; !remove && k.tables.generation != 0; again = true {
		h := have()
		if h == nil {
			break
		}
		err := k.changeElements(*h, want)
		if err == nil {
			remember()
			return nil
		}
		doubt()
		if again || !errors.Is(err, unix.ERESTART) {
			break
		}
		k.haveTables()
	}
	read, before := k.tables.generation, k.generation()
	k.memory.commit(before)
	if err := replaceTable(remove, want); err != nil {
		doubt()
		return err
	}
	now := k.generation()
	if before == 0 || now != before+1 {
		doubt()
	} else if !remove && read == before {
		k.tables.generation = now
		remember()
	}
	return nil
}

// changeElements changes the elements of the sets, and reads the changed elements back. After an
// error, the content of the table is unknown.
func (k *Kernel) changeElements(have, want table) error {
	type change struct {
		set            kernel.FilterSet
		removed, added []nftables.SetElement
	}
	var differ []change
	var messages []nfnl.Message
	for i, set := range want.sets {
		if have.sets[i].Elements == set.Elements {
			continue
		}
		added, _, removed := diff.Of(strings.Fields(have.sets[i].Elements), strings.Fields(set.Elements), func(text string) string { return text })
		remove, err := elementsFor(set, removed)
		if err != nil {
			return err
		}
		add, err := elementsFor(set, added)
		if err != nil {
			return err
		}
		differ = append(differ, change{set, remove, add})
		for chunk := range slices.Chunk(remove, elementsPerMessage) {
			messages = append(messages, elementsMessage(unix.NFT_MSG_DELSETELEM, nfnl.Acknowledge, want.nft, set.Name, chunk))
		}
		for chunk := range slices.Chunk(add, elementsPerMessage) {
			messages = append(messages, elementsMessage(unix.NFT_MSG_NEWSETELEM, nfnl.Acknowledge|nfnl.Create, want.nft, set.Name, chunk))
		}
	}
	if len(messages) == 0 {
		return nil
	}
	c, err := k.openNFT()
	if err != nil {
		return err
	}
	k.memory.commit(k.tables.generation)
	if err := inTransaction(c, k.tables.generation, messages...); err != nil {
		k.closeNFT()
		return err
	}
	var expected []element
	for _, d := range differ {
		if len(d.removed)+len(d.added) <= fewElements {
			expected = append(expected, elementsAfter(d.set.Name, d.removed, d.added)...)
		}
	}
	mismatched, err := k.mismatched(want.nft, expected)
	for _, d := range differ {
		if few := len(d.removed)+len(d.added) <= fewElements; err == nil && few && !slices.Contains(mismatched, d.set.Name) {
			continue
		}
		if got, err := readElements(want.nft, d.set.Name); err != nil || got != d.set.Elements {
			k.tables = tablesRead{}
			return fmt.Errorf("set %s has %.200s; want %.200s (%w)", d.set.Name, got, d.set.Elements, err)
		}
	}
	if k.tables.generation++; k.tables.generation == 0 { // as in nf_tables_commit
		k.tables.generation++
	}
	return nil
}

// elementsMessage returns a message about elements of a set.
func elementsMessage(kind nfnl.HeaderType, flags nfnl.HeaderFlags, t *nftables.Table, set string, elements []nftables.SetElement) nfnl.Message {
	all := nfnl.NewAttributeEncoder()
	all.ByteOrder = binary.BigEndian
	all.String(unix.NFTA_SET_ELEM_LIST_TABLE, t.Name)
	all.String(unix.NFTA_SET_ELEM_LIST_SET, set)
	all.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(list *nfnl.AttributeEncoder) error {
		for _, e := range elements {
			list.Nested(unix.NFTA_LIST_ELEM, func(one *nfnl.AttributeEncoder) error {
				if e.IntervalEnd {
					one.Uint32(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
				}
				one.Nested(unix.NFTA_SET_ELEM_KEY, func(key *nfnl.AttributeEncoder) error {
					key.Bytes(unix.NFTA_DATA_VALUE, e.Key)
					return nil
				})
				return nil
			})
		}
		return nil
	})
	b, err := all.Encode()
	if err != nil {
		panic(err) // the elements exceed the size of an attribute; see elementsPerMessage
	}
	return nfnl.Message{Header: nfnl.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | kind, Flags: nfnl.Request | flags},
		Data: append([]byte{byte(t.Family), unix.NFNETLINK_V0, 0, 0}, b...)}
}

// fewElements is the maximum number of elements that are queried separately. If there are more, the
// whole set is read.
const fewElements = 16

// An element is an element of a set whose presence or absence has to be checked.
type element struct {
	set string
	nftables.SetElement
	present bool
}

// elementsAfter returns the elements that show whether a set has the added elements and lacks the
// removed ones.
func elementsAfter(set string, removed, added []nftables.SetElement) (all []element) {
	for _, e := range added {
		all = append(all, element{set, e, true})
	}
	for _, e := range removed {
		if e.IntervalEnd || slices.ContainsFunc(added, func(a nftables.SetElement) bool { return !a.IntervalEnd && bytes.Equal(a.Key, e.Key) }) {
			continue // now part of a network of another length, so its key is still present
		}
		all = append(all, element{set, e, false})
	}
	return all
}

// mismatched returns the names of sets with unexpected elements. If two intervals touch, the start
// of the second is also the end of the first. An error may mean that the kernel does not support
// such queries.
func (k *Kernel) mismatched(t *nftables.Table, all []element) (sets []string, err error) {
	present, err := k.contains(t, all)
	if err != nil {
		return nil, err
	}
	for i, e := range all {
		if e.present && !present[i] && e.IntervalEnd {
			begins, err := k.contains(t, []element{{set: e.set, SetElement: nftables.SetElement{Key: e.Key}}})
			if err != nil {
				return nil, err
			}
			present[i] = begins[0]
		}
		if present[i] != e.present {
			sets = append(sets, e.set)
		}
	}
	return sets, nil
}

// contains queries several elements in one request, and reports which of them exist. For each key,
// the kernel returns the element with that key, or the start of the interval that contains the key.
func (k *Kernel) contains(t *nftables.Table, all []element) ([]bool, error) {
	if len(all) == 0 {
		return nil, nil
	}
	c, err := k.openNFT()
	if err != nil {
		return nil, err
	}
	questions := make([]nfnl.Message, len(all))
	for i, e := range all {
		questions[i] = elementsMessage(unix.NFT_MSG_GETSETELEM, 0, t, e.set, []nftables.SetElement{e.SetElement})
	}
	if _, err := c.SendMessages(questions); err != nil {
		k.closeNFT()
		return nil, err
	}
	present := make([]bool, len(all))
	for i, e := range all {
		answers, err := c.Receive()
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err == nil && (len(answers) != 1 || len(answers[0].Data) < nl.SizeofNfgenmsg) {
			err = fmt.Errorf("%d answers to one request", len(answers))
		}
		if err != nil {
			k.closeNFT()
			return nil, err
		}
		got := attributeIn(attributeIn(answers[0].Data[nl.SizeofNfgenmsg:], unix.NFTA_SET_ELEM_LIST_ELEMENTS), unix.NFTA_LIST_ELEM)
		key := attributeIn(attributeIn(got, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE)
		flags := attributeIn(got, unix.NFTA_SET_ELEM_FLAGS)
		end := len(flags) == 4 && binary.BigEndian.Uint32(flags)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		present[i] = bytes.Equal(key, e.Key) && (e.IntervalEnd || !end)
	}
	return present, nil
}

// readElements is haveElements with its own socket.
func readElements(t *nftables.Table, set string) (string, error) {
	c, err := newConn(nftables.AsLasting())
	if err != nil {
		return "", err
	}
	defer func() { _ = c.CloseLasting() }()
	return haveElements(c, t, set)
}
