package lab

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// publish adds NAT rules for a pod to the calling thread's node, as the CNI plugins bridge and
// portmap do. Packets from the pod to destinations outside of the pod network get the uplink's
// address. UDP packets that arrive at the uplink for the ports first to first+ports-1 go to the
// pod.
func publish(pod netip.Addr, pods netip.Prefix, first, ports uint16) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table := c.AddTable(&nftables.Table{Name: "lab", Family: nftables.TableFamilyIPv4})
	nat := func(name string, hook *nftables.ChainHook, priority *nftables.ChainPriority) *nftables.Chain {
		return c.AddChain(&nftables.Chain{Table: table, Name: name, Type: nftables.ChainTypeNAT, Hooknum: hook, Priority: priority})
	}
	equal := func(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data} }
	device := make([]byte, unix.IFNAMSIZ)
	copy(device, uplink)
	addr := func(offset uint32) expr.Any {
		return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4}
	}
	mask := make([]byte, 4)
	binary.BigEndian.PutUint32(mask, ^uint32(0)<<(32-pods.Bits()))
	c.AddRule(&nftables.Rule{Table: table, Chain: nat("postrouting", nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource), Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, equal(device),
		addr(12), equal(pod.AsSlice()),
		addr(16), &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: pods.Addr().AsSlice()},
		&expr.Masq{},
	}})
	c.AddRule(&nftables.Rule{Table: table, Chain: nat("prerouting", nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest), Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, equal(device),
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, equal([]byte{unix.IPPROTO_UDP}),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: binary.BigEndian.AppendUint16(nil, first), ToData: binary.BigEndian.AppendUint16(nil, first+ports-1)},
		&expr.Immediate{Register: 1, Data: pod.AsSlice()},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1},
	}})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("translate addresses for pod %v: %w", pod, err)
	}
	return nil
}
