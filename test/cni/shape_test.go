package cni

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// A shape imitates the network of one CNI: the devices, routes, rules and packet filters on each
// node. It consists of namespaces and commands that follow the CNI's documents and sources. It runs
// no program of the CNI, unless run starts one.
type shape struct {
	name   string
	source string // document or source that it imitates
	form   string // short description for the table
	set    string // settings of the CNI that users must change; empty: none

	// vpc is true if pods have addresses of the nodes' own subnet.
	vpc bool
	// address gives the pods other addresses, for a CNI that ignores the podCIDRs of nodes and has
	// its own IPAM. If address is nil, pods keep the lab's addresses, from a part of the PodCIDR
	// for each node.
	address func(c *lab.Cluster)
	// open is true if the CNI does not work with a FORWARD policy of DROP, so that its users must
	// set the policy to ACCEPT.
	open bool
	// translates is true if nodes masquerade all packets that they forward to addresses outside of
	// the cluster. A server there then sees the node instead of the peer.
	translates bool
	// run starts real programs of the CNI, and returns when they are ready; nil: there are none.
	run func(ctx context.Context, c *fleet.Cluster, f filter) error
	// node returns the setup of node i. The setup may include the node's pods and the underlay.
	node func(c *lab.Cluster, i int) nodeSetup
}

// A filter is the kind of packet filter that the CNI and kube-proxy write on a node.
type filter string

const (
	legacy   filter = "iptables-legacy"
	nft      filter = "iptables-nft"
	nftables filter = "nftables" // iptables-nft for the CNI, and kube-proxy and the FORWARD policy by nft(8)
)

func (f filter) program() string {
	if f == legacy {
		return "iptables-legacy-restore"
	}
	return "iptables-nft-restore"
}

// A nodeSetup is the setup of a node.
type nodeSetup struct {
	// A router is a namespace of the node that replaces a switch or router in user space.
	router         string   // the router's name; empty: none
	before         []string // lines of ip -batch on the node, run before the router is set up
	inRouter       []string // lines of ip -batch in the router
	bridgeInRouter []string // lines of bridge -batch in the router

	ip       []string              // lines of ip -batch on the node
	bridge   []string              // lines of bridge -batch on the node, run after ip
	pods     map[*lab.Pod][]string // lines of ip -batch in pods
	tables   string                // input of iptables-restore(8)
	nft      string                // input of nft(8) on the node
	underlay []string              // lines of ip -batch in the underlay
	fabric   string                // input of nft(8) in the underlay
	settings map[string]string     // files below /proc/sys/net of the node, written before its devices are made
	later    map[string]string     // files below /proc/sys/net, written after the devices are made
}

// A plan describes a cluster to be made.
type plan struct {
	shape   *shape
	podCIDR string
	filter  filter
	drop    bool // FORWARD has the policy DROP
	strict  bool // rp_filter is strict on all devices of the nodes
	host    bool // gateways use their node's network; otherwise they are Pods

	cluster string // name of the cluster; empty before the cluster is made
}

func (p plan) String() string {
	text := fmt.Sprintf("%s, %s", p.shape.name, p.filter)
	if p.drop && !p.shape.open {
		text += ", FORWARD DROP"
	}
	if p.strict {
		text += ", strict rp_filter"
	}
	if p.host {
		text += ", gateways with --host-network"
	}
	return text
}

// setUp sets up the nodes of a cluster.
func (p plan) setUp(ctx context.Context, l *lab.Lab, c *lab.Cluster) error {
	if p.shape.address != nil {
		p.shape.address(c)
	}
	for i, n := range c.Nodes {
		d := p.shape.node(c, i)
		if err := p.put(ctx, l, c, n, d); err != nil {
			return fmt.Errorf("%s on %s: %w", p.shape.name, n, err)
		}
	}
	return nil
}

func (p plan) put(ctx context.Context, l *lab.Lab, c *lab.Cluster, n *lab.Node, d nodeSetup) error {
	set := map[string]string{"ipv4/conf/all/rp_filter": "0", "ipv4/conf/default/rp_filter": "0", "ipv4/conf/eth0/rp_filter": "0"}
	if p.strict {
		for name := range set {
			set[name] = "1"
		}
	}
	maps.Copy(set, d.settings)
	if err := sysctls(n.Host, set); err != nil {
		return err
	}
	if err := batch(ctx, n.Host, "ip", d.before); err != nil {
		return err
	}
	if d.router != "" {
		forward := []string{"netns", "exec", d.router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward; echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter"}
		if out, err := n.Command(ctx, "ip", forward...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", d.router, err, out)
		}
		if err := feed(ctx, n.Host, strings.Join(d.inRouter, "\n"), "ip", "-n", d.router, "-batch", "-"); err != nil {
			return err
		}
		if err := feed(ctx, n.Host, strings.Join(d.bridgeInRouter, "\n"), "bridge", "-n", d.router, "-batch", "-"); err != nil {
			return err
		}
	}
	if err := batch(ctx, n.Host, "ip", d.ip); err != nil {
		return err
	}
	if err := batch(ctx, n.Host, "bridge", d.bridge); err != nil {
		return err
	}
	if err := sysctls(n.Host, d.later); err != nil {
		return err
	}
	for pod, lines := range d.pods {
		if err := batch(ctx, pod.Host, "ip", lines); err != nil {
			return err
		}
	}
	if err := batch(ctx, l.Underlay, "ip", d.underlay); err != nil {
		return err
	}
	if err := feed(ctx, l.Underlay, d.fabric, "nft", "-f", "-"); err != nil {
		return err
	}
	tables := "*nat\n:PREROUTING ACCEPT\n:OUTPUT ACCEPT\n:POSTROUTING ACCEPT\n" + p.hostPorts(c, n) + "COMMIT\n" + d.tables
	drop := p.drop && !p.shape.open
	if drop && p.filter != nftables {
		tables += "*filter\n:FORWARD DROP\nCOMMIT\n"
	}
	for _, table := range []string{serviceTables(c, p.filter), tables} {
		if err := feed(ctx, n.Host, table, p.filter.program(), "--noflush"); err != nil {
			return fmt.Errorf("%w\n%s", err, table)
		}
	}
	rules := d.nft
	if p.filter == nftables {
		rules += serviceChains(c)
	}
	if drop && p.filter == nftables {
		rules += `table inet firewall { chain forward { type filter hook forward priority 0; policy drop;
			ct state established,related accept
			ip saddr ` + c.PodCIDR.String() + ` accept
			ip daddr ` + c.PodCIDR.String() + " accept\n}\n}\n"
	}
	return feed(ctx, n.Host, rules, "nft", "-f", "-")
}

// hostPorts returns a rule that forwards the node's WireGuard ports to the Pod of its gateway, as
// the portmap plugin of the CNI project does (plugins/meta/portmap).
func (p plan) hostPorts(c *lab.Cluster, n *lab.Node) string {
	for _, g := range c.GatewayPods {
		if g.Node == n {
			return fmt.Sprintf("-A PREROUTING -p udp -m udp --dport 5871:5886 -m addrtype --dst-type LOCAL -j DNAT --to-destination %v\n", g.Addr)
		}
	}
	return ""
}

// podsOn returns the pods of a node, including the gateway's.
func podsOn(c *lab.Cluster, n *lab.Node) (all []*lab.Pod) {
	for _, p := range slices.Concat(c.Pods, c.GatewayPods) {
		if p.Node == n {
			all = append(all, p)
		}
	}
	return all
}

// veth returns the name of a pod's device on its node.
func veth(prefix string, p *lab.Pod) string {
	name := prefix + strings.ReplaceAll(p.Name, "-", "")
	return name[:min(len(name), 15)]
}

// toPod returns the commands that make the veth pair of a pod.
func toPod(name string, p *lab.Pod, mtu int, more ...string) []string {
	return append([]string{
		fmt.Sprintf("link add %s mtu %d type veth peer name eth0 mtu %d netns %s", name, mtu, mtu, p.Netns()),
		fmt.Sprintf("link set %s up", name),
	}, more...)
}

// routedPod returns the commands for a pod whose address has the prefix length 32 and whose gateway
// answers by proxy ARP, as with Calico, Azure's transparent mode and Amazon's VPC CNI.
func routedPod(p *lab.Pod) []string {
	return []string{
		"link set eth0 up",
		fmt.Sprintf("addr add %v/32 dev eth0", p.Addr),
		"route add 169.254.1.1 dev eth0 scope link",
		"route add default via 169.254.1.1 dev eth0",
	}
}

// bridgedPod returns the commands for a pod on a bridge of its node.
func bridgedPod(p *lab.Pod, network netip.Prefix, gateway netip.Addr) []string {
	return []string{
		"link set eth0 up",
		fmt.Sprintf("addr add %v/%d dev eth0", p.Addr, network.Bits()),
		fmt.Sprintf("route add default via %v dev eth0", gateway),
	}
}

// mac returns the MAC address of the tunnel device on node i.
func mac(i int) string { return fmt.Sprintf("0a:58:0a:f4:00:%02x", i+1) }

// plus returns the address that is n after a.
func plus(a netip.Addr, n int) netip.Addr {
	b := a.As4()
	v := int(b[0])<<24 | int(b[1])<<16 | int(b[2])<<8 | int(b[3])
	v += n
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}

// router returns the address of the underlay's router in the subnet of a cluster's nodes.
func router(c *lab.Cluster) netip.Addr {
	return netip.PrefixFrom(c.Nodes[0].Addr, 24).Masked().Addr().Next()
}

// batch runs lines with "ip -batch" or "bridge -batch".
func batch(ctx context.Context, h *lab.Host, program string, lines []string) error {
	err := feed(ctx, h, strings.Join(lines, "\n"), program, "-batch", "-")
	if err != nil {
		return fmt.Errorf("%w\n%s", err, strings.Join(lines, "\n"))
	}
	return nil
}

// feed runs a program with a text as its input; without a text it does nothing.
func feed(ctx context.Context, h *lab.Host, text, program string, args ...string) error {
	if text == "" {
		return nil
	}
	cmd := h.Command(ctx, program, args...)
	cmd.Stdin = strings.NewReader(text + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %s %s: %w: %s", h, program, strings.Join(args, " "), err, out)
	}
	return nil
}

func sysctls(h *lab.Host, settings map[string]string) error {
	return h.Do(func() error {
		for name, value := range settings {
			if err := os.WriteFile(filepath.Join("/proc/sys/net", name), []byte(value), 0); err != nil {
				return fmt.Errorf("%s: %w", h, err)
			}
		}
		return nil
	})
}

// volatile matches the parts of a state that change without any action, such as counters and the
// time in a comment.
var volatile = regexp.MustCompile(`(?m)^#.*\n| state \w+| <[A-Z_,-]+>| counter packets \d+ bytes \d+|\[\d+:\d+\]|^.*\b(REACHABLE|STALE|DELAY|PROBE|FAILED|INCOMPLETE)\b.*\n`)

// stateOf returns everything on a node that a CNI, kube-proxy or a person may have made.
func stateOf(ctx context.Context, n *lab.Node) (string, error) {
	const script = `set -e; ip -o link; echo; ip -o -4 addr; echo; ip rule; echo; ip route show table all; echo; ip neigh show nud permanent | sort; echo
bridge fdb show | grep -w permanent | sort; echo
iptables-legacy-save; echo; nft -s list ruleset; echo
for f in /proc/sys/net/ipv4/conf/*/rp_filter /proc/sys/net/ipv4/conf/*/forwarding /proc/sys/net/ipv4/conf/*/proxy_arp /proc/sys/net/ipv4/conf/*/send_redirects /proc/sys/net/ipv4/fib_multipath_hash_policy; do echo "$f $(cat $f)"; done`
	out, err := n.Command(ctx, "sh", "-c", script).Output()
	return volatile.ReplaceAllString(string(out), ""), err
}

// own matches lines about objects of Isthmus.
var own = regexp.MustCompile(`isthmus|proto 7[12]\b|lookup 420[0-3]|table 420[0-3]`)

// foreign returns a state without the lines about objects of Isthmus.
func foreign(state string) string {
	var kept []string
	ours := false
	for line := range strings.Lines(state) {
		if strings.HasPrefix(line, "table ") {
			ours = strings.Contains(line, "isthmus")
		}
		if !ours && !own.MatchString(line) {
			kept = append(kept, line)
		}
		if line == "}\n" { // the end of a table
			ours = false
		}
	}
	return strings.Join(kept, "")
}
