package lab

import (
	"fmt"
	"io"
	"net/netip"
	"strings"
	"text/tabwriter"
)

// Describe writes a table of the lab's nodes, pods and servers for people. For each host, the table
// has the address at which each cluster reaches it.
func (l *Lab) Describe(w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	row := func(cells ...string) { fmt.Fprintln(table, strings.Join(cells, "\t")) }
	head, rule := []string{"host", "what it is"}, []string{"----", "----------"}
	for _, c := range l.Clusters {
		head, rule = append(head, "seen from "+c.Name), append(rule, "-----------")
	}
	row(head...)
	row(rule...)
	line := func(owner *Cluster, h *Host, what string, addr netip.Addr) {
		cells := []string{h.Name, what}
		for _, viewer := range l.Clusters {
			seen, err := l.Seen(viewer, owner, addr)
			// Gateways have no route to a peer's nodes, so the table has no address for these
			// nodes.
			if err != nil || viewer != owner && underlayNetwork.Contains(addr) {
				cells = append(cells, "-")
				continue
			}
			cells = append(cells, seen.String())
		}
		row(cells...)
	}
	for _, c := range l.Clusters {
		for i, n := range c.Nodes {
			what := "node"
			if i == 0 && !c.bare { // in a bare cluster, the lab does not place the gateway
				what = "node with the gateway"
			}
			line(c, n.Host, what, n.Addr)
		}
		for _, p := range c.Pods {
			line(c, p.Host, "pod on "+p.Node.Name, p.Addr)
		}
		line(c, c.OnPrem.Host, "server outside the cluster", c.OnPrem.Addr)
	}
	return table.Flush()
}

// Lookup returns the address at which a viewer reaches another host of the lab. name is that other
// host's name, or an address, which Lookup returns unchanged.
func (l *Lab) Lookup(viewer *Host, name string) (netip.Addr, error) {
	if addr, err := netip.ParseAddr(name); err == nil {
		return addr, nil
	}
	from := l.clusterOf(viewer)
	for _, c := range l.Clusters {
		addr, ok := c.address(name)
		if !ok {
			continue
		}
		if from == nil { // the viewer is the underlay, which belongs to no cluster
			return addr, nil
		}
		return l.Seen(from, c, addr)
	}
	_, err := l.Host(name)
	if err == nil {
		err = fmt.Errorf("%s has no address of its own", name)
	}
	return netip.Addr{}, err
}

// clusterOf returns the cluster of a host, or nil for the underlay.
func (l *Lab) clusterOf(h *Host) *Cluster {
	for _, c := range l.Clusters {
		if _, ok := c.address(h.Name); ok {
			return c
		}
	}
	return nil
}

// address returns the address of the cluster's host with the given name.
func (c *Cluster) address(name string) (netip.Addr, bool) {
	for _, n := range c.Nodes {
		if n.Name == name {
			return n.Addr, true
		}
	}
	for _, p := range c.Pods {
		if p.Name == name {
			return p.Addr, true
		}
	}
	return c.OnPrem.Addr, c.OnPrem.Name == name
}
