package cni

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

const page = "../../docs/cni.md"

// docs/cni.md is generated from the assertions of TestIsthmusWorksBesideEachCNI.
func TestCNIPageMatchesTheTestedSetups(t *testing.T) {
	want := thePage()
	if *update {
		must(t, os.WriteFile(page, []byte(want), 0o644))
	}
	have, err := os.ReadFile(page)
	if err != nil || string(have) != want {
		t.Errorf("%s is not what the tests say (%v): go test ./cni -run Page -update, in test/", page, err)
	}
	for _, s := range shapes {
		if !slices.ContainsFunc(pairs, func(p [2]plan) bool { return p[0].shape == s || p[1].shape == s }) {
			t.Errorf("%s is in no pair", s.name)
		}
		if s.source == "" {
			t.Errorf("%s names no document or source that it imitates", s.name)
		}
	}
}

func thePage() string {
	var b strings.Builder
	b.WriteString(`# Beside every CNI

For platform engineers: the pod networks beside which Isthmus works, the source that a receiver sees, and the settings you need.
[matrix.md](matrix.md) has the bridge plugin with real kubelets and kube-proxy.

` + "`go test ./cni -run Page -update`" + ` in test/ writes this page, and ` + "`go test ./cni -long`" + ` (make test-cni) asserts it. The clusters have the
real manager, gateways and route agents. Unless a row names a real program, their nodes imitate the network of a CNI: its devices, routes,
rules, masquerading, policy and underlay. The code of each network in test/cni names the documents and sources that it imitates.

Each pair of clusters below is tested both ways, by TCP (40,000 octets each way), UDP, UDP with 4,000 octets and ICMP:

- **Senders:** a pod, a host-network pod and a node, each on the gateway's node and on another node.
- **Receivers:** pods on both nodes, a Service with a remote endpoint, and mapped endpoints (host-network servers and an outside server).
- **The clusters' own traffic** must show the same sources before, during and after a run of Isthmus. After ` + "`isthmus route-agent --cleanup`" + `,
  each node's network configuration must be as before, octet for octet.

A receiver sees one of these sources:

- *pod*: the address of the sending pod, as the receiver's cluster sees it, one to one.
- *network*: the first address of the sender's PodCIDR, as the receiver's cluster sees it. Nodes and host-network pods share it (NAPT).

## The networks

From pods, a receiver sees *pod*; from nodes and host-network pods, *network*. A Service changes no source. No settings are
needed, except for OVN-Kubernetes ([Open vSwitch](#what-cannot-be-imitated)) and pods in two networks [2].

| network | imitated parts | a mapped server outside of the cluster sees |
|---|---|---|
`)
	for _, s := range shapes {
		server := "pod, network"
		if s.translates {
			server = "a node of the receiver's cluster [1]"
		}
		name := s.name
		if s == twoNetworks {
			name += " [2]"
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", name, s.form, server)
	}
	fmt.Fprintf(&b, `
[1] The nodes masquerade every packet that they forward out of the cluster, not only those of their pods.

[2] From pods of the other node, a receiver sees *network*, and peers reach these pods as mapped endpoints only. Set %s.
`, twoNetworks.set)
	b.WriteString(`
**FORWARD DROP.** If the policy of FORWARD is DROP, the CNI must accept the PodCIDR, as flannel, kube-proxy and Calico do. Otherwise pods
of one cluster cannot reach each other across nodes, and managers cannot reach the gateways (TCP 5879, for Peerings with ` + "`spec.inBand`" + `).
Route agents add rules that accept only the packets of Isthmus' devices and of the gateways' Pods.

The rules work in chains of iptables-nft, iptables-legacy and nftables ([decision
14](decisions/0014-sources-are-settled-before-the-cni.md)). Isthmus cannot add rules to chains in tables that belong to a process
(firewalld's), to chains that drop packets and to which other chains jump, and to iptables-legacy without ` + "`/run/xtables.lock`" + `.
` + "`isthmus status`" + ` and ` + "`diagnose`" + ` name such chains, with a command for each, but do not find chains of nftables to which other
chains jump.
`)
	b.WriteString(`
## The pairs

The PodCIDRs overlap or have different lengths, so each side sees the other remapped. With FORWARD DROP, a firewall drops all but the
PodCIDR.

| one side | PodCIDR | other side | PodCIDR |
|---|---|---|---|
`)
	for _, pair := range pairs {
		for i, p := range pair {
			fmt.Fprintf(&b, "| %v | %s ", p, cmp.Or(p.podCIDR, "half of the nodes' subnet"))
			if i == 1 {
				b.WriteString("|\n")
			}
		}
	}
	b.WriteString(`
## During faults

In ` + "`go test ./cni -run Chaos -long`" + `, a pod of each of two clusters (three nodes each) sends the other a datagram every 10 ms, which the
other answers. The test repeats one fault for a minute. No packet for a peer may be in the clear, objects of other programs may
not change on any node, and all pods must reach their peers afterwards. The table counts datagrams without an answer in one run for each
pair (2026-11-23, two cores, load 25 to 35). A process may wait a second for a processor, as the first row shows.

- *A*: flannel with VXLAN, iptables-legacy, and with host-gw, iptables-nft; FORWARD DROP and strict reverse path filter on both sides.
- *B*: Calico with VXLAN, nftables, FORWARD DROP, and AWS VPC CNI, iptables-legacy; strict reverse path filter on both sides.

| fault | how often | A: lost | A: most for one event, longest pause | B: lost | B: most for one event, longest pause |
|---|---|---|---|---|---|
| none, for comparison | | 0 of 11,671 | 0, 1.10 s | 0 of 11,652 | 0, 0.70 s |
| a route, rule, neighbour, FDB entry, table of nftables, rule in a foreign chain or device of Isthmus on any node is deleted or changed | 0.5 s | 29 of 10,453 | 10, 1.02 s | 44 of 10,750 | 11, 0.45 s |
| a route agent is killed, and starts again | 3 s | 0 of 11,501 | 0, 0.85 s | 0 of 11,459 | 0, 0.74 s |
| the active gateway ends, in turn in each cluster, and starts again as the standby | 5 s | 841 of 11,633 | 81, 0.77 s | 860 of 11,530 | 81, 1.66 s |
| a node without these pods is removed, comes again, gets another InternalIP and its old one | 4 s | 0 of 11,015 | 0, 1.06 s | 0 of 10,204 | 0, 1.02 s |

With Weave Net and Cilium, the rows lost 0, 39, 0, 865 and 0 datagrams. The end of a gateway costs a third of a second on average;
[faults.md](faults.md) has the cost on an idle machine.

## What cannot be imitated

- **eBPF.** Cilium with eBPF host routing, masquerading or kube-proxy replacement, and Calico's eBPF data plane, bypass the host's
  routes, rules and packet filters. The row of Cilium is its tunnel mode with iptables masquerading.
- **Cilium's proxy** for policies of layer 7. A rule of Cilium sends the proxy's packets through cilium_host before our rules. Nodes
  drop those for peers, and count them as ` + "`in_the_clear`" + `. So pods under such a policy cannot exchange packets with peers
  through the proxy.
- **Open vSwitch.** OVN-Kubernetes with shared gateways, its default, never shows pods' packets to the host, so **they leave for the peer's
  network in the clear** by br-ex. Set local gateways (` + "`routingViaHost: true`" + ` on OpenShift, ` + "`--gateway-mode local`" + `), as in the row.
  ` + "`isthmus diagnose`" + ` and ` + "`status`" + ` name nodes without them. The row has a macvlan in the place of ovn-k8s-mp0, and no
  port security. OVN's port security lets a pod send only from its own addresses, so the gateway can trust packets from addresses of
  nodes. The row of Weave has the bridge and the tunnel, without Open vSwitch between them.
- **IPVS.** The kernels of the tests have no IPVS. Packets of pods to a Service of kube-proxy's mode ipvs keep their source. [decision
  14](decisions/0014-sources-are-settled-before-the-cni.md) has the exceptions.
- **IPIP.** The kernels of the tests have no such device. Calico's IPIP pools are like its VXLAN pools here.
`)
	return b.String()
}
