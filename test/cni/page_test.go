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

// docs/cni.md is made of what TestShapes asserts.
func TestThePageIsWhatIsTried(t *testing.T) {
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

Made by ` + "`go test ./cni -run Page -update`" + ` in test/ from what ` + "`go test ./cni -long`" + ` asserts there. It runs whole clusters with
the real manager, gateways and route agents, whose nodes are dressed after the network that a CNI makes: its devices,
routes, rules, masquerading and policy, and its underlay. A row is an imitation after the documents and sources named
below, unless it says that the real program runs. [matrix.md](matrix.md) has the bridge plugin with real kubelets and
kube-proxy.

For each pair of clusters below, every one of {pod, host-network pod, node} on {the gateway's node, another node} asks pods on
both nodes of the other cluster, a Service whose endpoint is there, host-network servers and a server outside of the
cluster as mapped endpoints, both ways, by TCP (40,000 octets each way), UDP, UDP with 4,000 octets and ICMP; host-network
servers also answer from UDP sockets without an address. The receiver says which source it saw. The clusters' own traffic
(pods, nodes, a Service, the Internet) has to show the same sources before, meanwhile and after ` + "`isthmus route-agent --cleanup`" + `,
and after it the devices, addresses, rules, routes, neighbours, packet filters and settings of each node are octet for octet
what they were.

- *pod*: the address of the pod that asked, as the receiver's cluster sees it, one to one.
- *network*: the first address of the sender's PodCIDR, as the receiver's cluster sees it: all that is no pod shares it, by NAPT.

## The networks

| network | what is there of it | pods show themselves as | nodes and host-network pods | through a Service | a mapped server outside of the cluster sees | has to be set |
|---|---|---|---|---|---|---|
`)
	for _, s := range shapes {
		server := "pod, network"
		if s.translates {
			server = "its cluster's node: the CNI masquerades whatever leaves"
		}
		pods := asPod
		if s == twoNetworks {
			pods = "pod; on the other node network, and it is not reached but as a mapped endpoint"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | network | as without | %s | %s |\n", s.name, s.form, pods, server, cmp.Or(s.set, "nothing"))
	}
	b.WriteString(`
**FORWARD DROP.** Where the policy of that chain is DROP, and whoever set it accepts only what comes from or goes to the
PodCIDR (flannel, kube-proxy, Calico), pods reach peers and are reached. Other packets have no pod at either end: from a
peer to a mapped server outside of the cluster and, with gateways on the host's network, between their node and the host
network of other nodes. If the CNI accepts no pods at all, the chain also drops the outer packets of a gateway that is a Pod.
Route agents accept all these packets by their own rules at the end of the chain: two for the devices of Isthmus, and four
for each gateway's Pod on the node, for UDP and ICMP to it and from it. The rules accept no packets of other pods. If the CNI accepts
no pods, pods of one cluster do not reach each other across nodes either. Only the CNI can repair that. The chains are those of iptables-nft,
iptables-legacy and any chain of nftables at the hook forward that drops what nobody has accepted ([decision
14](decisions/0014-sources-are-settled-before-the-cni.md)). What nobody else may change (a table that belongs to a process, as
firewalld's does, a chain that others jump to and that drops, iptables-legacy without ` + "`/run/xtables.lock`" + `), ` + "`isthmus status` and `diagnose`" + `
name with the command that mends it.
`)
	b.WriteString(`
## The pairs

The PodCIDRs overlap or have different lengths, so that each side sees the other remapped. FORWARD DROP is the policy of that
chain, by a firewall that accepts what comes from or goes to the PodCIDR.

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
## While things go wrong

` + "`go test ./cni -run Chaos -long`" + ` lets a pod of each of two clusters (three nodes each) send the other a datagram every 10 ms
and get an answer, and repeats one thing for a minute. It asserts that no packet for a peer is in the clear, that nothing on any
node changes that is not Isthmus's, and that all pods reach their peers afterwards. Lost are datagrams without an answer, of all that
both pods sent. These figures are of one run for each pair on 2026-11-23, up to two at a time (the last row of B is of a run of its own), on two cores with a load of 25 to 35 from
other work, where a process may wait a second for its turn, as the first row shows. Two columns are for each pair:

- *A*: flannel with VXLAN, iptables-legacy, and with host-gw, iptables-nft; FORWARD DROP and strict reverse path filter on both sides.
- *B*: Calico with VXLAN, nftables, FORWARD DROP, and AWS VPC CNI, iptables-legacy; strict reverse path filter on both sides.

| what happens | how often | A: lost | A: most for one event, longest pause | B: lost | B: most for one event, longest pause |
|---|---|---|---|---|---|
| nothing, for comparison | | 0 of 11,671 | 0, 1.10 s | 0 of 11,652 | 0, 0.70 s |
| a route, rule, neighbour, FDB entry, table of nftables, rule in a chain of others or the device is deleted or changed, any of Isthmus's on any node | 0.5 s | 29 of 10,453 | 10, 1.02 s | 44 of 10,750 | 11, 0.45 s |
| a route agent is killed, and starts again | 3 s | 0 of 11,501 | 0, 0.85 s | 0 of 11,459 | 0, 0.74 s |
| the active gateway ends, now of one cluster and now of the other, and starts again as the standby | 5 s | 841 of 11,633 | 81, 0.77 s | 860 of 11,530 | 81, 1.66 s |
| a node (not that of the pods) is removed, comes again, gets another InternalIP and its old one | 4 s | 0 of 11,015 | 0, 1.06 s | 0 of 10,204 | 0, 1.02 s |

The third pair, Weave Net and Cilium with gateways in Pods, lost 0 of 11,121, 39 of 11,059 (9 for one event), 0 of 11,589, 865 of 10,802 (90)
and 0 of 10,209. That a route agent starts again cost 45 of 10,782 there before it knew from the start that bridges are filtered.

A gateway that ends costs each way 35 datagrams on average, a third of a second; with a load of 45 it was three times that, and ten
seconds where a gateway ended while its replica was not ready. [faults.md](faults.md) has what such a fault costs on a quiet machine.

## What cannot be imitated

- **eBPF.** Cilium with eBPF host routing, masquerading or kube-proxy replacement, and Calico's eBPF data plane, pass the host's
  routes, rules and packet filters by. The row of Cilium is its tunnel mode with iptables masquerading.
- **Cilium's proxy**, which policies of layer 7 use. What it sends has a mark, and a rule of priority 10 leads it by cilium_host, around within the
  node, before our rules are asked. Whether it comes back or leaves from there only Cilium's eBPF knows, so that what is for a peer is dropped,
  counted as ` + "`in_the_clear`" + `: pods under such a policy and peers do not reach each other through the proxy.
- **Open vSwitch.** OVN-Kubernetes with shared gateways, its default, never shows pods' packets to the host: nothing on the host can lead them to a
  gateway or refuse them, and **they leave for the peer's network in the clear** by br-ex. Set local gateways (` + "`routingViaHost: true`" + ` on OpenShift,
  ` + "`--gateway-mode local`" + `), which the row is; ` + "`isthmus diagnose` and `status`" + ` name nodes where it is not so. There ovn-k8s-mp0 is a device of Open vSwitch's own kind, here a macvlan.
  OVN lets a pod send from its own addresses only (port security), so that the gateway may believe those of nodes. Of Weave the bridge and the
  tunnel are here, and not Open vSwitch between them.
- **IPVS.** The kernels that run the tests have none. What pods send to a Service of kube-proxy's mode ipvs keeps its source; [decision
  14](decisions/0014-sources-are-settled-before-the-cni.md) says what goes astray there.
- **IPIP.** The kernels that run the tests have no such device. Calico's IPIP pools are like its VXLAN pools here.

## After which documents

| network | documents and sources |
|---|---|
`)
	for _, s := range shapes {
		fmt.Fprintf(&b, "| %s | %s |\n", s.name, s.source)
	}
	return b.String()
}
