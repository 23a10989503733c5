// Package cni tests Isthmus beside the networks that CNIs make. It runs whole clusters
// (internal/fleet) whose nodes are set up as the documents of a CNI describe, with the CNI's
// masquerading, packet filter, routes and underlay. Two clusters with different shapes send each
// other packets, and each receiver reports the source that it saw. The traffic inside each cluster,
// and the state of its nodes, must be the same before Isthmus runs, while it runs, and after
// "--cleanup".
//
// Most shapes run no program of their CNI. Each shape names the documents or sources that it
// imitates. docs/cni.md is generated from the assertions of the tests: go test ./cni -run Page
// -update, in test/. It needs root.
package cni

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/test/internal/programs"
)

var (
	long   = flag.Bool("long", false, "try all shapes, and let faults last for a minute")
	update = flag.Bool("update", false, "write docs/cni.md")
)

const patience = expect.Patience

// binary is the isthmus program, and kube the folder of etcd and kube-apiserver; TestMain makes
// both.
var binary, kube string

func TestMain(m *testing.M) { os.Exit(programs.Run(m, &binary, &kube)) }

// shapes are all shapes, in the order of the rows in docs/cni.md.
var shapes = []*shape{flannelReal, flannelVXLAN, flannelHostGW, calicoVXLAN, calicoBGP, weave, canal, cilium, kubenetAKS, azureCNI, awsVPC, gkeNative, ovnKubernetes, kindnet, twoNetworks}

// pairs are the tested combinations of two clusters, with different PodCIDRs and prefix lengths.
// Each kind of packet filter, reverse path filter and location of gateways is in at least one pair.
// Without -long the tests use only the first pair.
var pairs = [][2]plan{
	{{shape: flannelVXLAN, podCIDR: "10.244.0.0/16", filter: legacy, drop: true, strict: true},
		{shape: calicoVXLAN, podCIDR: "10.244.64.0/18", filter: nft, drop: true, strict: true}},
	{{shape: awsVPC, filter: legacy, strict: true},
		{shape: flannelHostGW, podCIDR: "10.244.0.0/17", filter: nftables, drop: true, strict: true}},
	{{shape: calicoBGP, podCIDR: "192.168.0.0/18", filter: legacy, drop: true, strict: true},
		{shape: weave, podCIDR: "10.32.0.0/12", filter: nft, drop: true}},
	{{shape: canal, podCIDR: "10.42.0.0/16", filter: nft, drop: true, strict: true},
		{shape: cilium, podCIDR: "10.42.128.0/19", filter: legacy, drop: true}},
	{{shape: kubenetAKS, podCIDR: "10.244.0.0/16", filter: nft, drop: true},
		{shape: azureCNI, filter: legacy, drop: true}},
	{{shape: gkeNative, podCIDR: "10.8.0.0/14", filter: nft, drop: true, strict: true},
		{shape: kindnet, podCIDR: "10.244.0.0/20", filter: nftables, strict: true}},
	{{shape: ovnKubernetes, podCIDR: "10.128.0.0/14", filter: nft},
		{shape: flannelVXLAN, podCIDR: "10.128.0.0/17", filter: nft, drop: true, host: true}},
	{{shape: calicoVXLAN, podCIDR: "10.244.0.0/16", filter: nft, drop: true, strict: true, host: true},
		{shape: awsVPC, filter: nft, host: true}},
	{{shape: twoNetworks, podCIDR: "10.244.0.0/20", filter: nftables, strict: true},
		{shape: cilium, podCIDR: "10.42.128.0/19", filter: nft}},
	{{shape: flannelReal, podCIDR: "10.244.0.0/16", filter: legacy, drop: true, strict: true},
		{shape: flannelReal, podCIDR: "10.244.0.0/17", filter: nft, drop: true, strict: true}},
}

func TestIsthmusWorksBesideEachCNI(t *testing.T) {
	for i, plans := range pairs {
		if i > 0 && !*long {
			t.Logf("%v and %v, and what follows: with -long", plans[0], plans[1])
			break
		}
		t.Run(plans[0].shape.name+" and "+plans[1].shape.name, func(t *testing.T) {
			w := up(t, plans, 2)
			for i, p := range plans {
				judge(t, p, w.matrix(t, i))
				w.checkReportsNodes(t, i)
			}
			w.checkUnchanged(t, "while Isthmus runs", false)
			w.end(t)
			w.checkUnchanged(t, "after --cleanup", true)
		})
	}
}

// The traffic inside a cluster must work without Isthmus, because otherwise its shape is wrong.
func TestEveryCNISetupWorksWithoutIsthmus(t *testing.T) {
	if !*long {
		t.Skip("the tests of Isthmus beside each CNI check the same traffic: -long runs it")
	}
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	for _, s := range shapes {
		if s.run != nil {
			continue // flannel needs an API server
		}
		t.Run(s.name, func(t *testing.T) {
			w := &world{nodes: 2, listeners: map[*lab.Host]*listener{}}
			for i, f := range []filter{legacy, nft, nftables} {
				w.plans = append(w.plans, plan{shape: s, podCIDR: fmt.Sprintf("10.%d.0.0/1%d", 64*i+64, i+6), filter: f, drop: i != 1, strict: true})
			}
			l, err := lab.Up(t.Context(), w.spec("shape"))
			must(t, err)
			defer func() {
				w.close()
				if err := l.Down(); err != nil {
					t.Error(err)
				}
			}()
			must(t, w.prepare(t.Context(), l))
			for i, c := range l.Clusters {
				must(t, w.recordBefore(t.Context(), i, c))
			}
		})
	}
}
