package lab

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/source/file"
)

func TestJoinWritesConsistentFilesForBothClusters(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(3)})
	a, b, c := l.Clusters[0], l.Clusters[1], l.Clusters[2]
	if err := l.JoinAll(); err != nil {
		t.Fatal(err)
	}
	if err := l.Map(b, b.OnPrem.Addr); err != nil {
		t.Fatal(err)
	}
	backend, err := backendConfig(a)
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(PeerFile(b, a))
	if err != nil {
		t.Fatal(err)
	}
	// Cluster a is b's first peer, so cluster b allocates the first free networks for it: 10.246 and
	// 10.247. Cluster a allocates the same networks for cluster b.
	want := `# Cluster b's side of its peering with a.
apiVersion: net.liqo.io/v1alpha1
kind: TunnelEndpoint
metadata:
  labels:
    clusterID: ` + a.ID + `
  name: ` + uniqueName(a) + `
  namespace: liqo-tenant-` + uniqueName(a) + `
spec:
  backend_config:
    port: "5871"
    publicKey: ` + backend["publicKey"] + `
  backendType: wireguard
  clusterIdentity:
    clusterID: ` + a.ID + `
    clusterName: a
  endpointIP: 172.30.1.11
  localExternalCIDR: 10.245.0.0/16
  localNATExternalCIDR: 10.247.0.0/16
  localNATPodCIDR: 10.246.0.0/16
  localPodCIDR: 10.244.0.0/16
  remoteExternalCIDR: 10.245.0.0/16
  remoteNATExternalCIDR: 10.247.0.0/16
  remoteNATPodCIDR: 10.246.0.0/16
  remotePodCIDR: 10.244.0.0/16
---
apiVersion: net.liqo.io/v1alpha1
kind: NatMapping
metadata:
  labels:
    clusterID: ` + a.ID + `
    net.liqo.io/natmapping: "true"
  name: natmapping-a
spec:
  clusterID: ` + a.ID + `
  clusterMappings:
    169.254.0.1: 10.247.0.1
    192.168.77.10: 10.247.0.2
  externalCIDR: 10.247.0.0/16
  podCIDR: 10.246.0.0/16
`
	if string(got) != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
	for _, tc := range []struct {
		local, peer *Cluster
		addr        string
		want        string
	}{
		{a, b, "10.244.0.11", "10.246.0.11"},
		{a, c, "10.244.0.11", "10.240.0.11"},
		{c, a, "10.244.0.12", "10.246.0.12"},
		{a, b, "192.168.77.10", "10.247.0.2"},
		{c, b, "192.168.77.10", "10.241.0.2"},
		{a, b, "172.30.2.11", "172.30.2.11"},
		{a, a, "10.244.0.11", "10.244.0.11"},
	} {
		if got, err := l.Seen(tc.local, tc.peer, netip.MustParseAddr(tc.addr)); err != nil || got.String() != tc.want {
			t.Errorf("%s sees %s of %s as %v, %v; want %s", tc.local, tc.addr, tc.peer, got, err, tc.want)
		}
	}
	if got, err := l.Seen(a, c, c.OnPrem.Addr); err == nil {
		t.Errorf("an endpoint that is not mapped has address %v", got)
	}

	opened, err := Open(l.Name)
	if err != nil {
		t.Fatal(err)
	}
	got2, err := opened.Seen(opened.Clusters[2], opened.Clusters[1], b.OnPrem.Addr)
	if err != nil || got2.String() != "10.241.0.2" {
		t.Errorf("another process sees %v, %v", got2, err)
	}

	if err := l.Unjoin(a, b); err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(filepath.Join(a.ConfigDir, "*"))
	if len(files) != 3 { // gateway.yaml, private.key, peer-c.yaml
		t.Errorf("after Unjoin: %v", files)
	}
}

func TestJoinUsesRequestedNetworks(t *testing.T) {
	p := netip.MustParsePrefix
	l := up(t, Spec{Clusters: []ClusterSpec{
		{PodCIDR: p("10.50.0.0/16"), ExternalCIDR: p("10.51.0.0/16")},
		{PodCIDR: p("10.60.16.0/20"), ExternalCIDR: p("10.61.0.0/24")},
	}})
	a, b := l.Clusters[0], l.Clusters[1]
	if err := l.Join(a, b, JoinOptions{AtA: View{Pod: p("100.64.0.0/20")}, AtB: View{Pod: a.PodCIDR}}); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(PeerFile(a, b))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"localPodCIDR: 10.50.0.0/16", "localNATPodCIDR: None", "localNATExternalCIDR: None",
		"remotePodCIDR: 10.60.16.0/20", "remoteNATPodCIDR: 100.64.0.0/20", "remoteNATExternalCIDR: None",
	} {
		if !strings.Contains(string(text), want+"\n") {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	err = l.Join(a, b, JoinOptions{AtA: View{Pod: p("100.64.0.0/16")}})
	if err == nil || !strings.Contains(err.Error(), "same length") {
		t.Errorf("a remapping of another length: %v", err)
	}
}

func TestJoinWritesReadableFilesAndKeepsKeyAndGatewayFile(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(2)})
	a, b := l.Clusters[0], l.Clusters[1]
	if err := l.JoinAll(); err != nil {
		t.Fatal(err)
	}
	for _, c := range l.Clusters {
		loaded, err := file.Load(c.ConfigDir)
		if err != nil || len(loaded.Gateway.Peers) != 1 || loaded.File.ClusterID != c.ID || len(loaded.Gateway.Peers[0].Rules.Endpoints) != 1 {
			t.Errorf("a gateway would read %+v, %v", loaded, err)
		}
	}
	key, err := os.ReadFile(filepath.Join(a.ConfigDir, keyFile))
	if err != nil {
		t.Fatal(err)
	}
	if st, _ := os.Stat(filepath.Join(a.ConfigDir, keyFile)); st.Mode().Perm() != 0o600 {
		t.Errorf("the private key has mode %v", st.Mode())
	}
	edited := filepath.Join(a.ConfigDir, "gateway.yaml")
	if err := os.WriteFile(edited, []byte("edited"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := l.Join(b, a, JoinOptions{}); err != nil {
		t.Fatal(err)
	}
	if again, _ := os.ReadFile(filepath.Join(a.ConfigDir, keyFile)); string(again) != string(key) {
		t.Error("another Join changed the key")
	}
	if again, _ := os.ReadFile(edited); string(again) != "edited" {
		t.Error("another Join changed gateway.yaml")
	}
}

func TestJoinWritesAllTunnelsOfTheOtherSide(t *testing.T) {
	l := up(t, Spec{Tunnels: 2, Clusters: []ClusterSpec{{Tunnels: 3}, {}, {Tunnels: 1}}})
	if err := l.JoinAll(); err != nil {
		t.Fatal(err)
	}
	for i, want := range []int{3, 2, 1} {
		peer := l.Clusters[i]
		own, err := file.Load(peer.ConfigDir)
		if err != nil || own.File.Tunnels != want {
			t.Fatalf("cluster %s has %d tunnels, %v; want %d", peer, own.File.Tunnels, err, want)
		}
		keys := fabric.PublicKeys(own.PrivateKey, want)
		for _, local := range l.Clusters {
			if local == peer {
				continue
			}
			s, err := file.Load(local.ConfigDir)
			if err != nil {
				t.Fatal(err)
			}
			p := s.Gateway.Peers[slices.IndexFunc(s.Gateway.Peers, func(p *fabric.GatewayPeer) bool { return p.ID == peer.ID })]
			ends := append([]fabric.TunnelEnd{{PublicKey: p.PublicKey, Port: p.Port}}, p.Tunnels...)
			for j, key := range keys {
				if len(ends) != want || ends[j] != (fabric.TunnelEnd{PublicKey: key, Port: wireGuardPort + uint16(j)}) {
					t.Errorf("%s knows of %s: %v; want %d tunnels with keys %x", local, peer, ends, want, keys)
				}
			}
		}
	}
}

func TestDescribeShowsEachAddressAsEachClusterSeesIt(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(2)})
	if err := l.JoinAll(); err != nil {
		t.Fatal(err)
	}
	if err := l.Map(l.Clusters[1], l.Clusters[1].OnPrem.Addr); err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	if err := l.Describe(&got); err != nil {
		t.Fatal(err)
	}
	const want = `host       what it is                   seen from a     seen from b
----       ----------                   -----------     -----------
a-node1    node with the gateway        172.30.1.11     -
a-pod1     pod on a-node1               10.244.0.11     10.246.0.11
a-pod2     pod on a-node1               10.244.0.12     10.246.0.12
a-onprem   server outside the cluster   192.168.77.10   -
b-node1    node with the gateway        -               172.30.2.11
b-pod1     pod on b-node1               10.246.0.11     10.244.0.11
b-pod2     pod on b-node1               10.246.0.12     10.244.0.12
b-onprem   server outside the cluster   10.247.0.2      192.168.77.10
`
	if got.String() != want {
		t.Errorf("got:\n%s\nwant:\n%s", got.String(), want)
	}
	a := l.Clusters[0]
	for name, want := range map[string]string{"b-pod2": "10.246.0.12", "a-pod2": "10.244.0.12", "b-onprem": "10.247.0.2", "10.1.2.3": "10.1.2.3"} {
		if got, err := l.Lookup(a.Pods[0].Host, name); err != nil || got.String() != want {
			t.Errorf("%s is %v, %v; want %s", name, got, err, want)
		}
	}
	for _, name := range []string{"a-pod9", "underlay"} {
		if got, err := l.Lookup(a.Pods[0].Host, name); err == nil {
			t.Errorf("%s is %v", name, got)
		}
	}
}
