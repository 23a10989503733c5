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
func TestCNIPageMatchesTheShapes(t *testing.T) {
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
	}
}

func thePage() string {
	var b strings.Builder
	b.WriteString(`# Beside every CNI

For platform engineers: which pod networks Isthmus works beside, which source a receiver sees, and what has to be set.
[matrix.md](matrix.md) has the bridge plugin with real kubelets and kube-proxy.

This page is generated: ` + "`go test ./cni -run Page -update`" + ` in test/ writes it, and ` + "`go test ./cni -long`" + ` (make test-cni) asserts what it
says. The tests run whole clusters with the real manager, gateways and route agents. Their nodes imitate the network of a CNI: its
devices, routes, rules, masquerading, policy and underlay. Only a row that says so runs the real program.

In each pair of clusters below, every one of {pod, host-network pod, node} on {the gateway's node, another node} connects to pods on
both nodes of the other cluster, to a Service with a remote endpoint, and to host-network servers and an outside server as mapped
endpoints. They do so both ways, by TCP (40,000 octets each way), UDP, UDP with 4,000 octets and ICMP. The receiver reports the source.
The clusters' own traffic must show the same sources before, meanwhile and after ` + "`isthmus route-agent --cleanup`" + `. After it, the devices,
addresses, rules, routes, neighbours, packet filters and settings of each node are the same octet for octet.

- *pod*: the address of the sending pod, as the receiver's cluster sees it, one to one.
- *network*: the first address of the sender's PodCIDR, as the receiver's cluster sees it: senders that are not pods share it (NAPT).

## The networks

| network | imitated parts | source of pods | source of nodes and host-network pods | through a Service | a mapped server outside of the cluster sees | to be set |
|---|---|---|---|---|---|---|
`)
	for _, s := range shapes {
		server := "pod, network"
		if s.translates {
			server = "its cluster's node: the CNI masquerades all outbound traffic"
		}
		pods := asPod
		if s == twoNetworks {
			pods = "pod; *network* for pods of the other node, which peers reach as mapped endpoints only"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | network | as without | %s | %s |\n", s.name, s.form, pods, server, cmp.Or(s.set, "nothing"))
	}
	b.WriteString(`
**FORWARD DROP.** If the policy of FORWARD is DROP and the CNI accepts the PodCIDR (flannel, kube-proxy, Calico), pods and peers
reach each other. Route agents accept the other packets of Isthmus by rules at the end of the chain: two for its devices, four for each
gateway's Pod on the node (UDP and ICMP), and two for that and each other gateway's Pod (TCP). These rules accept no packets of other
pods. A CNI that accepts no pods also stops pods of one cluster across nodes, and the managers' connections to the gateways (TCP 5879,
for Peerings with ` + "`spec.inBand`" + `). Only the CNI can repair that.

The rules work in chains of iptables-nft, iptables-legacy and nftables ([decision
14](decisions/0014-sources-are-settled-before-the-cni.md)). ` + "`isthmus status`" + ` and ` + "`diagnose`" + ` name the chains that nobody else may change,
with a command for each: tables that belong to a process (firewalld's), dropping chains to which others jump, and iptables-legacy without
` + "`/run/xtables.lock`" + `.
`)
	b.WriteString(`
## The pairs

The PodCIDRs overlap or have different lengths, so each side sees the other remapped. With FORWARD DROP, a firewall accepts the
PodCIDR and drops everything else.

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

` + "`go test ./cni -run Chaos -long`" + ` has a pod of each of two clusters (three nodes each) send the other a datagram every 10 ms, which the
other answers, and repeats one fault for a minute. It asserts that no packet for a peer is in the clear, that nothing foreign changes on
any node, and that all pods reach their peers afterwards. The table counts datagrams without an answer. One run for each pair, 2026-11-23,
two cores with a load of 25 to 35 from other work, so a process may wait a second for its turn, as the first row shows.

- *A*: flannel with VXLAN, iptables-legacy, and with host-gw, iptables-nft; FORWARD DROP and strict reverse path filter on both sides.
- *B*: Calico with VXLAN, nftables, FORWARD DROP, and AWS VPC CNI, iptables-legacy; strict reverse path filter on both sides.

| fault | how often | A: lost | A: most for one event, longest pause | B: lost | B: most for one event, longest pause |
|---|---|---|---|---|---|
| none, for comparison | | 0 of 11,671 | 0, 1.10 s | 0 of 11,652 | 0, 0.70 s |
| a route, rule, neighbour, FDB entry, table of nftables, rule in a foreign chain or the device is deleted or changed, any of Isthmus's on any node | 0.5 s | 29 of 10,453 | 10, 1.02 s | 44 of 10,750 | 11, 0.45 s |
| a route agent is killed, and starts again | 3 s | 0 of 11,501 | 0, 0.85 s | 0 of 11,459 | 0, 0.74 s |
| the active gateway ends, now of one cluster and now of the other, and starts again as the standby | 5 s | 841 of 11,633 | 81, 0.77 s | 860 of 11,530 | 81, 1.66 s |
| a node (not that of the pods) is removed, comes again, gets another InternalIP and its old one | 4 s | 0 of 11,015 | 0, 1.06 s | 0 of 10,204 | 0, 1.02 s |

Weave Net and Cilium with gateways in Pods lost 0 of 11,121, 39 of 11,059 (9 for one event), 0 of 11,589, 865 of 10,802 (90) and 0 of
10,209. A gateway that ends costs each way 35 datagrams on average, a third of a second. [faults.md](faults.md) has the cost on a quiet
machine.

## What cannot be imitated

- **eBPF.** Cilium with eBPF host routing, masquerading or kube-proxy replacement, and Calico's eBPF data plane, bypass the host's
  routes, rules and packet filters. The row of Cilium is its tunnel mode with iptables masquerading.
- **Cilium's proxy** for policies of layer 7. Its packets have a mark, and a rule of priority 10 sends them through cilium_host before our
  rules. Nodes drop those for peers, counted as ` + "`in_the_clear`" + `: pods under such a policy and peers do not reach each other through the proxy.
- **Open vSwitch.** OVN-Kubernetes with shared gateways, its default, never shows pods' packets to the host, so **they leave for the peer's
  network in the clear** by br-ex. Set local gateways (` + "`routingViaHost: true`" + ` on OpenShift, ` + "`--gateway-mode local`" + `), as in the row;
  ` + "`isthmus diagnose`" + ` and ` + "`status`" + ` name nodes without them. The row has a macvlan in the place of ovn-k8s-mp0. OVN lets a pod send from its
  own addresses only (port security), so the gateway may accept those of nodes. The row of Weave has the bridge and the tunnel, without
  Open vSwitch between them.
- **IPVS.** The kernels of the tests have none. Packets of pods to a Service of kube-proxy's mode ipvs keep their source; [decision
  14](decisions/0014-sources-are-settled-before-the-cni.md) names what goes astray.
- **IPIP.** The kernels of the tests have no such device. Calico's IPIP pools are like its VXLAN pools here.

## Sources

| network | documents and sources |
|---|---|
`)
	for _, s := range shapes {
		fmt.Fprintf(&b, "| %s | %s |\n", s.name, s.source)
	}
	return b.String()
}
