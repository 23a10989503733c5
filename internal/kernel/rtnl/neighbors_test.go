package rtnl

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

func TestNeighborCountersOfAllCPUsAreSummed(t *testing.T) {
	const names = "entries  allocs res_failed unresolved_discards table_fulls\n"
	got, err := neighborsFrom(names + "00000002 00000001 0000000a 00000010 00000001\n00000002 00000001 00000001 00000002 00000000\n")
	if want := (NeighborStats{Unanswered: 11, NoRoom: 18, TableFull: 1}); err != nil || got != want {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	for _, bad := range []string{names + "00000002 00000001\n", names + "00000002 00000001 x 0 0\n"} {
		if _, err := neighborsFrom(bad); err == nil {
			t.Errorf("%q is no error", bad)
		}
	}
}

// A packet to an unused address in a bridge's network counts as unanswered.
func TestNeighborsCountsUnansweredAddresses(t *testing.T) {
	before, err := Neighbors()
	if err != nil {
		t.Fatal(err)
	}
	f, err := NewNamespace()
	if err != nil {
		t.Skip(err)
	}
	defer f.Close()
	if err := Do(f, func() error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "pods"}}
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(192, 0, 2, 1), Mask: net.CIDRMask(24, 32)}}
		if err := errors.Join(netlink.LinkAdd(bridge), netlink.AddrAdd(bridge, addr), netlink.LinkSetUp(bridge)); err != nil {
			return err
		}
		c, err := net.Dial("udp", "192.0.2.9:9")
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte{1})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for start := time.Now(); ; time.Sleep(100 * time.Millisecond) { // the kernel asks three times, a second apart
		now, err := Neighbors()
		if err != nil {
			t.Fatal(err)
		}
		if now.Unanswered > before.Unanswered {
			return
		}
		if time.Since(start) > time.Minute {
			t.Fatal("the packet is not counted")
		}
	}
}
