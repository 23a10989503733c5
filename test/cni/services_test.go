package cni

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// Each cluster has two Services, with the rules of kube-proxy (pkg/proxy/iptables/proxier.go and
// pkg/proxy/nftables/proxier.go). The endpoint of the first is a pod of the cluster itself. The
// endpoint of the second is a pod of the peer, and is added when the clusters are peered.
var (
	ownService    = netip.MustParseAddr("10.96.0.80")
	remoteService = netip.MustParseAddr("10.96.0.81")
)

// ownEndpoint returns the pod behind a cluster's first Service.
func ownEndpoint(c *lab.Cluster) netip.Addr { return c.Pods[len(c.Pods)-1].Addr }

// serviceTables returns the rules of kube-proxy in iptables mode. With nftables it returns none,
// see serviceChains.
func serviceTables(c *lab.Cluster, f filter) string {
	if f == nftables {
		return ""
	}
	return fmt.Sprintf(`*nat
:KUBE-SERVICES -
:KUBE-MARK-MASQ -
:KUBE-POSTROUTING -
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
%sCOMMIT
*filter
:KUBE-FORWARD -
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
`, serviceRules(c, ownService, ownEndpoint(c)))
}

func serviceRules(c *lab.Cluster, service, endpoint netip.Addr) string {
	name := strings.ToUpper(strings.ReplaceAll(service.String(), ".", "X"))
	return fmt.Sprintf(`:KUBE-SVC-%[1]s -
:KUBE-SEP-%[1]s -
-A KUBE-SERVICES -d %[2]v/32 -j KUBE-SVC-%[1]s
-A KUBE-SVC-%[1]s ! -s %[4]v -d %[2]v/32 -j KUBE-MARK-MASQ
-A KUBE-SVC-%[1]s -j KUBE-SEP-%[1]s
-A KUBE-SEP-%[1]s -s %[3]v/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-%[1]s -p tcp -j DNAT --to-destination %[3]v
-A KUBE-SEP-%[1]s -p udp -j DNAT --to-destination %[3]v
`, name, service, endpoint, c.PodCIDR)
}

// serviceChains returns the rules of kube-proxy in nftables mode.
func serviceChains(c *lab.Cluster) string {
	return fmt.Sprintf(`table ip kube-proxy {
	map services { type ipv4_addr : ipv4_addr; elements = { %[1]v : %[2]v }; }
	chain masq { ip saddr != %[3]v meta mark set mark or 0x4000; ip saddr %[2]v meta mark set mark or 0x4000; }
	chain services { ip daddr { %[1]v, %[4]v } jump masq; meta l4proto { tcp, udp } dnat ip to ip daddr map @services; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
	chain nat-output { type nat hook output priority -100; jump services; }
	chain nat-postrouting { type nat hook postrouting priority srcnat; meta mark & 0x4000 == 0 return; meta mark set mark xor 0x4000; masquerade fully-random; }
}
`, ownService, ownEndpoint(c), c.PodCIDR, remoteService)
}

// remoteEndpoint adds the endpoint of the second Service on all nodes. withdraw removes the
// endpoint.
func remoteEndpoint(ctx context.Context, c *lab.Cluster, f filter, endpoint netip.Addr) (withdraw func() error, err error) {
	element := fmt.Sprintf("element ip kube-proxy services { %v : %v }", remoteService, endpoint)
	rules := serviceRules(c, remoteService, endpoint)
	var undo []string
	for line := range strings.Lines(rules) {
		switch {
		case strings.HasPrefix(line, ":"):
			undo = append(undo, "-X "+strings.Fields(line[1:])[0])
		case strings.HasPrefix(line, "-A"):
			undo = append(undo, strings.Replace(strings.TrimSpace(line), "-A", "-D", 1))
		}
	}
	slices.Reverse(undo) // the chains were added first, and are removed last
	put := func(element, rules string) error {
		for _, n := range c.Nodes {
			var err error
			if f == nftables {
				err = feed(ctx, n.Host, element, "nft", "-f", "-")
			} else {
				err = feed(ctx, n.Host, "*nat\n"+rules+"\nCOMMIT\n", f.program(), "--noflush")
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	return func() error { return put("delete "+element, strings.Join(undo, "\n")) }, put("add "+element, rules)
}
