package file

import (
	"encoding/base64"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/natengine"
)

var update = flag.Bool("update", false, "write the golden files anew")

// Each directory of testdata is a configuration. Its want.txt has the expected plan or
// problems.
func TestDirectoriesGiveTheExpectedPlanOrProblems(t *testing.T) {
	dirs, err := filepath.Glob("testdata/*/want.txt")
	if err != nil || len(dirs) == 0 {
		t.Fatal("no test directories", err)
	}
	for _, golden := range dirs {
		dir := filepath.Dir(golden)
		t.Run(filepath.Base(dir), func(t *testing.T) {
			var got string
			if snapshot, err := Load(dir); err != nil {
				if !reflect.DeepEqual(snapshot, Snapshot{}) {
					t.Errorf("an error and %+v", snapshot)
				}
				got = err.Error() + "\n"
			} else {
				engineAccepts(t, snapshot.Gateway)
				text, err := yaml.Marshal(snapshot.File)
				if err != nil {
					t.Error(err)
				}
				got = fmt.Sprintf("%s\n%s", text, snapshot.Gateway)
			}
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got:\n%s\nwant:\n%s", got, want)
			}
		})
	}
}

func engineAccepts(t testing.TB, gw fabric.Gateway) {
	t.Helper()
	var rules []natengine.Peer
	for _, p := range gw.Peers {
		rules = append(rules, p.Rules)
	}
	if err := natengine.New(natengine.Config{Self4: fabric.GatewayAddr, Self6: fabric.GatewayAddr6}).SetPeers(rules); err != nil {
		t.Errorf("the engine refuses\n%s%v", gw, err)
	}
}

func keyText(b byte) string {
	return base64.StdEncoding.EncodeToString([]byte(strings.Repeat(string(rune(b)), 32)))
}

// wantPublicKey belongs to the private key of 32 bytes "k". It was computed with another
// implementation of RFC 7748.
const wantPublicKey = "hGL7PweY+f4sOfOCO7Qc0+/+cLtcgXNb5GoUMTXFhFQ="

const gatewayYAML = `apiVersion: isthmus.net/v1alpha1
kind: Gateway
clusterID: alpha-id
privateKeyFile: private.key
`

// peerYAML returns the TunnelEndpoint of a cluster. Different n give different clusters.
func peerYAML(n int) string {
	return fmt.Sprintf(`apiVersion: net.liqo.io/v1alpha1
kind: TunnelEndpoint
metadata:
  name: peer%d
  namespace: tenant
spec:
  clusterIdentity: {clusterID: id%d, clusterName: name%d}
  localPodCIDR: 10.244.0.0/16
  localNATPodCIDR: 10.246.0.0/16
  localExternalCIDR: 10.245.0.0/16
  localNATExternalCIDR: None
  remotePodCIDR: 10.244.0.0/16
  remoteNATPodCIDR: 11.%d.0.0/16
  remoteExternalCIDR: 10.245.0.0/16
  remoteNATExternalCIDR: 12.%d.0.0/16
  endpointIP: 192.0.2.1
  backendType: wireguard
  backend_config:
    port: "5871"
    publicKey: %s
`, n, n, n, n, n, keyText(byte('a'+n)))
}

const mappingYAML = `apiVersion: net.liqo.io/v1alpha1
kind: NatMapping
metadata: {name: nm}
spec:
  clusterID: id1
  podCIDR: 11.1.0.0/16
  externalCIDR: 10.245.0.0/16
  clusterMappings: {172.30.0.9: 10.245.0.9}
`

func writeDir(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		write(t, filepath.Join(dir, name), text)
	}
	return dir
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// valid returns the files of a valid directory. changes replaces files by name; the content "-"
// removes the file.
func valid(changes map[string]string) map[string]string {
	files := map[string]string{"gateway.yaml": gatewayYAML, "private.key": keyText('k') + "\n", "peers.yaml": peerYAML(1), "mapping.yaml": mappingYAML}
	for name, text := range changes {
		if files[name] = text; text == "-" {
			delete(files, name)
		}
	}
	return files
}

func TestLoadReadsAllObjectsOfADirectory(t *testing.T) {
	dir := writeDir(t, valid(nil))
	got, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	wantGateway := GatewayFile{APIVersion: "isthmus.net/v1alpha1", Kind: "Gateway", ClusterID: "alpha-id", PrivateKeyFile: "private.key",
		ListenPort: 5871, Tunnels: 1, MTU: AutoMTU, MetricsAddress: "127.0.0.1:5872", StatusAddress: "127.0.0.1:5873"}
	if got.File != wantGateway {
		t.Errorf("gateway %+v\nwant    %+v", got.File, wantGateway)
	}
	if string(got.PrivateKey[:]) != strings.Repeat("k", 32) {
		t.Errorf("key %x", [32]byte(got.PrivateKey))
	}
	if gw := got.Gateway; gw.ClusterID != "alpha-id" || len(gw.Peers) != 1 || gw.Peers[0].ID != "id1" ||
		gw.Peers[0].Origin != (fabric.Origin{File: "peers.yaml", Kind: "TunnelEndpoint", Namespace: "tenant", Name: "peer1"}) ||
		len(gw.Peers[0].Rules.Endpoints) != 2 { // the mapped endpoint, and the gateway itself
		t.Errorf("gateway %+v", gw)
	}
}

func TestNextKeyIsReadWhileGatewayFileNamesIt(t *testing.T) {
	dir := writeDir(t, valid(map[string]string{"gateway.yaml": gatewayYAML + "nextPrivateKeyFile: next.key\n", "next.key": keyText('n')}))
	want := func(private, next PrivateKey) {
		t.Helper()
		if s, err := Load(dir); err != nil || s.PrivateKey != private || s.NextKey != next {
			t.Errorf("%x and %x, %v", [32]byte(s.PrivateKey), [32]byte(s.NextKey), err)
		}
	}
	k, n := PrivateKey([]byte(strings.Repeat("k", 32))), PrivateKey([]byte(strings.Repeat("n", 32)))
	want(k, n)
	write(t, filepath.Join(dir, "private.key"), keyText('n'))
	write(t, filepath.Join(dir, "gateway.yaml"), gatewayYAML)
	want(n, PrivateKey{})
}

func TestPrivateKeyIsNotPrinted(t *testing.T) {
	key := PrivateKey([]byte(strings.Repeat("k", 32)))
	s := Snapshot{PrivateKey: key, NextKey: key}
	if text, err := yaml.Marshal(s); err != nil || strings.Contains(string(text), "107") || !strings.Contains(string(text), hiddenKey) {
		t.Errorf("marshals as %s, %v", text, err)
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x", "%d", "%q"} {
		for _, v := range []any{s, &s, s.PrivateKey, []PrivateKey{s.PrivateKey}} {
			if text := fmt.Sprintf(verb, v); strings.Contains(text, "kk") || strings.Contains(text, "6b6b") || strings.Contains(text, "107") || strings.Contains(text, "0x6b") {
				t.Errorf("%s of %T prints %s", verb, v, text)
			}
		}
	}
}

func TestGatewayFileRoundTrips(t *testing.T) {
	for _, g := range []GatewayFile{
		{GatewayAPIVersion, GatewayKind, "a", "alpha", "private.key", "", 5871, 1, AutoMTU, "127.0.0.1:5872", "127.0.0.1:5873", "", 0, 0, NAT{}},
		{GatewayAPIVersion, GatewayKind, "a", "", "private.key", "next.key", 1, 16, MinMTU, "[::1]:0", "localhost:65535", "-", 1, MaxFlowLog,
			NAT{MaxFlows, 2, 3, true, 4, 5, 6, 7, 8e9, 9e9, 10e9, 11e9, 12e9, 13e9, 14e9}},
		{GatewayAPIVersion, GatewayKind, "a", "", "private.key", "", 65534, 2, MaxMTU, ":1", ":2", "/var/log/flows.json", 7, 0, NAT{MaxFlows: 1}},
	} {
		text, err := yaml.Marshal(g)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Load(writeDir(t, valid(map[string]string{"gateway.yaml": string(text), "next.key": keyText('n')})))
		if err != nil || got.File != g {
			t.Errorf("%+v, %v\nwant %+v", got.File, err, g)
		}
	}
}

func TestNATFieldsReachTheEngine(t *testing.T) {
	var n NAT
	for i, f := range n.Fields() {
		text := fmt.Sprint(i + 1)
		switch f.Value.Type() {
		case "bool":
			text = "true"
		case "duration":
			text += "s"
		}
		if err := f.Value.Set(text); err != nil || f.Value.String() != text {
			t.Errorf("%s: %v, %q", f.Name, err, f.Value.String())
		}
		if flag := strings.ReplaceAll(f.Flag, "-", ""); !strings.EqualFold(flag, f.Name) {
			t.Errorf("%s is --%s", f.Name, f.Flag)
		}
	}
	want := natengine.Config{
		MaxFlows: 1, MaxFlowsPerPeer: 2, MaxFlowsPerHost: 3, RandomPorts: true, MaxFragmentSets: 5, MaxFragmentBytes: 6,
		MaxFragmentsPerSet: 7, MaxErrorsPerSecond: 8,
		Timeouts: natengine.Timeouts{UDP: 9 * time.Second, TCPEstablished: 10 * time.Second, TCPTransitory: 11 * time.Second,
			TCPClosing: 12 * time.Second, ICMP: 13 * time.Second, Generic: 14 * time.Second, Fragment: 15 * time.Second},
	}
	if got := n.Config(); got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestLoadAcceptsUnusualValidFiles(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "key")
	write(t, outside, "  "+keyText('k')+"\r\n\n")
	for name, changes := range map[string]map[string]string{
		"byte order mark and CRLF":       {"peers.yaml": "\ufeff" + strings.ReplaceAll(peerYAML(1), "\n", "\r\n")},
		"comments alone":                 {"empty.yaml": "# nothing\n---\n# more of it\n"},
		"an empty list":                  {"empty.yaml": "apiVersion: v1\nkind: List\nitems: []\n"},
		"a list in a list":               {"peers.yaml": "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: List\n"},
		"the gateway in a list":          {"gateway.yaml": "-", "g.json": `{"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "isthmus.net/v1alpha1", "kind": "Gateway", "clusterID": "a", "privateKeyFile": "private.key"}]}`},
		"a key elsewhere":                {"gateway.yaml": strings.Replace(gatewayYAML, "private.key", outside, 1), "private.key": "-"},
		"fields of a later Liqo":         {"peers.yaml": peerYAML(1) + "  keepalive: 25\nstatus: 7\n"},
		"a null creation time":           {"peers.yaml": strings.Replace(peerYAML(1), "metadata:", "metadata:\n  creationTimestamp: null", 1)},
		"aliases":                        {"peers.yaml": strings.Replace(strings.Replace(peerYAML(1), "localPodCIDR: 10", "localPodCIDR: &p 10", 1), "remotePodCIDR: 10.244.0.0/16", "remotePodCIDR: *p", 1)},
		"hidden and foreign files":       {".x.yaml": "{", "README.md": "{", "x.yaml~": "{", "x.yaml.bak": "{"},
		"a mapping whose peer is coming": {"peers.yaml": "-"},
		"empty addresses are defaults":   {"gateway.yaml": gatewayYAML + "metricsAddress: \"\"\n"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Load(writeDir(t, valid(changes))); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestLoadReportsEachProblem(t *testing.T) {
	const te, gw = "peers.yaml: TunnelEndpoint tenant/peer1: ", "gateway.yaml: Gateway: "
	const kinds = `; want TunnelEndpoint or NatMapping (net.liqo.io/v1alpha1), Gateway (isthmus.net/v1alpha1), or a List (v1) of them`
	peer := func(old, new string) map[string]string {
		text := strings.Replace(peerYAML(1), old, new, 1)
		if text == peerYAML(1) {
			t.Fatalf("%q is not there", old)
		}
		return map[string]string{"peers.yaml": text}
	}
	gateway := func(line string) map[string]string {
		return map[string]string{"gateway.yaml": gatewayYAML + line + "\n"}
	}
	key := func(text string) map[string]string { return map[string]string{"private.key": text} }
	next := func(text string) map[string]string {
		return map[string]string{"gateway.yaml": gatewayYAML + "nextPrivateKeyFile: next.key\n", "next.key": text}
	}
	for _, test := range []struct {
		changes map[string]string
		want    []string
	}{
		// Text that is not YAML; the problem has the line.
		{map[string]string{"x.yaml": "a: 1\nb: [1\nc: 2\n"}, []string{"x.yaml: line 3: did not find expected ',' or ']'"}},
		{map[string]string{"x.yaml": "a: 1\nb: c: d\n"}, []string{"x.yaml: line 2: mapping values are not allowed in this context"}},
		{map[string]string{"x.yaml": "a:\n\t b: 1\n"}, []string{"x.yaml: line 2: found character that cannot start any token"}},
		{map[string]string{"x.yaml": "}"}, []string{"x.yaml: line 1: did not find expected node content"}},
		{map[string]string{"x.yaml": peerYAML(2) + "---\nmetadata:\n  name: x\n namespace: y\n"}, []string{"x.yaml: line 24: did not find expected key"}},
		{map[string]string{"x.yaml": "a: 1\nb: 2\na: 3\n"}, []string{`x.yaml: line 3: key "a" already set in map`}},
		{map[string]string{"x.yaml": `{"kind": "List"}` + "\n" + `{"kind": "List"}`}, []string{"x.yaml: line 2: did not find expected <document start>", "x.yaml: List: is of kind \"List\", apiVersion \"\"" + kinds}},
		{map[string]string{"x.yaml": "a: *b\n"}, []string{"x.yaml: line 1: unknown anchor 'b' referenced"}},
		{map[string]string{"x.yaml": "a: \x00\n"}, []string{"x.yaml: line 1: control characters are not allowed"}},
		{map[string]string{"x.yaml": "a: &a [*a]\n"}, []string{"x.yaml: line 1: anchor 'a' value contains itself"}},
		// Documents that are not supported objects.
		{map[string]string{"x.yaml": "hello\n"}, []string{"x.yaml: is of type string; want an object"}},
		{map[string]string{"x.yaml": ""}, []string{"x.yaml: is empty; want an object or a comment, or delete the file"}},
		{map[string]string{"x.yaml": " \n\n"}, []string{"x.yaml: is empty; want an object or a comment, or delete the file"}},
		{map[string]string{"x.yaml": "# one\n--- # empty\n---\n[]\n"}, []string{"x.yaml: document 2: is of type array; want an object"}},
		{map[string]string{"x.yaml": "1: 2\n"}, []string{"x.yaml: the key 1 is not a string; want it in quotes"}},
		{map[string]string{"x.yaml": "a: .inf\n"}, []string{"x.yaml: a number is infinite or NaN; want a finite one"}},
		{map[string]string{"x.yaml": "{}"}, []string{`x.yaml: is of kind "", apiVersion ""` + kinds}},
		{map[string]string{"x.yaml": "apiVersion: v1\nkind: Secret\nmetadata: {name: x, namespace: ns}\n"}, []string{`x.yaml: Secret ns/x: is of kind "Secret", apiVersion "v1"` + kinds}},
		{map[string]string{"x.yaml": "apiVersion: v1\nkind: List\nitems: [{kind: A}]\n"}, []string{`x.yaml: A: items[0]: is of kind "A", apiVersion ""` + kinds}},
		{map[string]string{"x.yaml": "apiVersion: v1\nkind: List\nitems: {}\n"}, []string{"x.yaml: items: is of type object; want a list"}},
		{map[string]string{"x.yaml": "kind: \"\\e[2J\"\n"}, []string{`x.yaml: "\x1b[2J": is of kind "\x1b[2J", apiVersion ""` + kinds}},
		{peer("net.liqo.io/v1alpha1", "net.liqo.io/v1beta1"), []string{te + `is of kind "TunnelEndpoint", apiVersion "net.liqo.io/v1beta1"` + kinds}},
		// Problems of objects other than the Gateway.
		{peer("  name: peer1\n", ""), []string{"peers.yaml: TunnelEndpoint tenant: metadata.name: is empty; want the name of the object"}},
		{peer(`"5871"`, "5871"), []string{te + "spec.backend_config: is of type number; want a string; put numbers, true and false in quotes"}},
		{peer("remotePodCIDR", "remotePodCidr"), []string{te + "spec.remotePodCIDR: is empty; want a CIDR such as 10.244.0.0/16"}},
		{peer("10.244.0.0/16", "10.244.1.0/16"), []string{te + `spec.localPodCIDR: "10.244.1.0/16" has host bits set; want 10.244.0.0/16`}},
		{peer("metadata:", "metadata:\n  creationTimestamp: yesterday"), []string{te + "metadata.creationTimestamp: is not a time; want one such as 2026-11-20T09:30:00Z"}},
		{peer("metadata:", "metadata:\n  creationTimestamp: 5"), []string{te + "metadata.creationTimestamp: is of type number; want a string; put numbers, true and false in quotes"}},
		{map[string]string{"x.yaml": "kind: " + strings.Repeat("k", 300)}, []string{`x.yaml: "` + strings.Repeat("k", 253) + `...": is of kind "` + strings.Repeat("k", 253) + `...", apiVersion ""` + kinds}},
		{map[string]string{"again.yaml": peerYAML(1)}, []string{te + "is also in again.yaml; want each object once"}},
		{map[string]string{"peers.yaml": peerYAML(1) + "---\n" + peerYAML(1)}, []string{te + "is also in peers.yaml; want each object once"}},
		{map[string]string{"peers.yaml": `{"apiVersion": "net.liqo.io/v1alpha1", "kind": "NatMapping", "metadata": {"name": "x"}, "spec": {"clusterID": "a", "clusterID": "b", "podCIDR": "11.1.0.0/16", "externalCIDR": "10.9.0.0/16", "clusterMappings": {}}}`},
			[]string{"peers.yaml: NatMapping x: spec.clusterID: appears twice; want it once"}},
		{map[string]string{"mapping.yaml": strings.Replace(mappingYAML, "10.245.0.9", "10.245.0.1", 1)},
			[]string{`mapping.yaml: NatMapping nm: spec.clusterMappings["172.30.0.9"]: 10.245.0.1 is the gateway's own address, the first host of 10.245.0.0/16; want another address`}},
		{map[string]string{"mapping.yaml": strings.Replace(mappingYAML, "172.30.0.9", "127.0.0.1", 1)},
			[]string{`mapping.yaml: NatMapping nm: spec.clusterMappings["127.0.0.1"]: key: 127.0.0.1 is in 127.0.0.0/8 (loopback); want an address that is reachable from our pod network`}},
		{map[string]string{"x.yaml": strings.Replace(mappingYAML, "nm", "other", 1)},
			[]string{`x.yaml: NatMapping other: spec.clusterID: cluster "id1" already has its mappings in mapping.yaml: NatMapping nm; want one NatMapping for each cluster`}},
		{map[string]string{"x.yaml": strings.Replace(peerYAML(2), "11.2.0.0", "11.1.0.0", 1)},
			[]string{`x.yaml: TunnelEndpoint tenant/peer2: spec.remoteNATPodCIDR: 11.1.0.0/16 overlaps 11.1.0.0/16 of cluster "id1" (peers.yaml: TunnelEndpoint tenant/peer1: spec.remoteNATPodCIDR); want a network that no other peer has here`}},
		{map[string]string{"gateway.yaml": strings.Replace(gatewayYAML, "alpha-id", "id1", 1)},
			[]string{te + `spec.clusterIdentity.clusterID: "id1" is our own cluster ID; want the ID of the remote cluster`}},
		{peer(keyText('b'), wantPublicKey), []string{te + `spec.backend_config.publicKey: is our own public key; want that of cluster "id1"`}},
		// Problems of the Gateway object.
		{map[string]string{"gateway.yaml": "-"}, []string{"no object of kind Gateway (isthmus.net/v1alpha1); want one, usually in gateway.yaml"}},
		{map[string]string{"h.yaml": gatewayYAML}, []string{"h.yaml: Gateway: is a second Gateway, because gateway.yaml has one; want only one"}},
		{gateway("listenport: 1"), []string{gw + "listenport: is not a field of this kind; want it removed or spelled as documented"}},
		{gateway("metadata: {name: x}"), []string{gw + "metadata: is not a field of this kind; want it removed or spelled as documented"}},
		{gateway("clusterID: x"), []string{`gateway.yaml: line 5: key "clusterID" already set in map`}},
		{map[string]string{"gateway.yaml": strings.Replace(gatewayYAML, "alpha-id", "alpha/id", 1)}, []string{gw + `clusterID: "alpha/id" has an invalid character; want at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit`}},
		{map[string]string{"gateway.yaml": strings.Replace(gatewayYAML, "alpha-id", "17", 1)}, []string{gw + "clusterID: is of type number; want a string; put numbers, true and false in quotes"}},
		{gateway(`clusterName: "a\nb"`), []string{gw + `clusterName: "a\nb" has a character that cannot be printed; want at most 253 printable characters`}},
		{gateway("listenPort: 0"), []string{gw + "listenPort: is 0; want a number from 1 to 65535"}},
		{gateway("listenPort: 70000"), []string{gw + "listenPort: is 70000; want a number from 1 to 65535"}},
		{gateway(`listenPort: "5871"`), []string{gw + "listenPort: is not a whole number; want a number from 1 to 65535"}},
		{gateway("listenPort: null"), []string{gw + "listenPort: is not a whole number; want a number from 1 to 65535"}},
		{gateway("tunnels: 0"), []string{gw + "tunnels: is 0; want a number from 1 to 16"}},
		{gateway("tunnels: 17"), []string{gw + "tunnels: is 17; want a number from 1 to 16"}},
		{gateway("tunnels: two"), []string{gw + "tunnels: is not a whole number; want a number from 1 to 16"}},
		{gateway("listenPort: 65534\ntunnels: 3"),
			[]string{gw + "tunnels: is 3, and the last would listen on port 65536 (listenPort is 65534); want ports up to 65535"}},
		{gateway("mtu: 575"), []string{gw + `mtu: is 575; want a number from 576 to 65475, or "auto"`}},
		{gateway("mtu: 65476"), []string{gw + `mtu: is 65476; want a number from 576 to 65475, or "auto"`}},
		{gateway("mtu: Auto"), []string{gw + `mtu: is not a whole number; want a number from 576 to 65475, or "auto"`}},
		{gateway("mtu: 1340.5"), []string{gw + `mtu: is not a whole number; want a number from 576 to 65475, or "auto"`}},
		{gateway("maxFlows: -1"), []string{gw + "maxFlows: is -1; want a number from 0 to 67108864"}},
		{gateway("maxFlowsPerPeer: many\nmaxFlowsPerHost: 67108865"), []string{gw + "maxFlowsPerHost: is 67108865; want a number from 0 to 67108864", gw + "maxFlowsPerPeer: is not a whole number; want a number from 0 to 67108864"}},
		{gateway(`randomPorts: "true"`), []string{gw + "randomPorts: is neither true nor false"}},
		{gateway("maxFragmentsPerSet: 8193"), []string{gw + "maxFragmentsPerSet: is 8193; want a number from 0 to 8192"}},
		{gateway("udpTimeout: 300"), []string{gw + `udpTimeout: is no duration; want a time from 1s to 720h0m0s, such as "5m"`}},
		{gateway("tcpEstablishedTimeout: 100d"), []string{gw + `tcpEstablishedTimeout: is no duration; want a time from 1s to 720h0m0s, such as "5m"`}},
		{gateway("icmpTimeout: 10ms"), []string{gw + `icmpTimeout: is 10ms; want a time from 1s to 720h0m0s, such as "5m"`}},
		{gateway("metricsAddress: 5872"), []string{gw + "metricsAddress: is of type number; want a string; put numbers, true and false in quotes"}},
		{gateway(`metricsAddress: "5872"`), []string{gw + `metricsAddress: "5872" is not a listen address; want host:port, such as "127.0.0.1:5872"`}},
		{gateway(`flowLogSample: 0`), []string{gw + `flowLogSample: is 0; want a number from 1 to 1000000`}},
		{gateway(`flowLogPerSecond: many`), []string{gw + `flowLogPerSecond: is not a whole number; want a number from 1 to 1000000`}},
		{gateway(`statusAddress: "127.0.0.1:http"`), []string{gw + `statusAddress: "127.0.0.1:http" is not a listen address; want host:port, such as "127.0.0.1:5873"`}},
		// The private key: problems name it and never contain it.
		{map[string]string{"gateway.yaml": strings.Replace(gatewayYAML, "privateKeyFile: private.key\n", "", 1)}, []string{gw + "privateKeyFile: is empty; want the name of the file with the WireGuard private key"}},
		{map[string]string{"gateway.yaml": strings.Replace(gatewayYAML, "private.key", keyText('s'), 1)}, []string{gw + "privateKeyFile: looks like a key (not shown); want the name of a file that holds it"}},
		{map[string]string{"private.key": "-"}, []string{gw + "privateKeyFile: private.key: no such file or directory"}},
		{map[string]string{"gateway.yaml": strings.Replace(gatewayYAML, "private.key", ".", 1)}, []string{gw + "privateKeyFile: .: is a directory"}},
		{key(""), []string{gw + "privateKeyFile: the content of private.key has 0 bytes; want 32 bytes in 44 base64 characters"}},
		{key("secret"), []string{gw + "privateKeyFile: the content of private.key is not base64; want 32 bytes in 44 base64 characters"}},
		{key(keyText('k')[:40]), []string{gw + "privateKeyFile: the content of private.key has 30 bytes; want 32 bytes in 44 base64 characters"}},
		{key(keyText('k') + keyText('k')), []string{gw + "privateKeyFile: the content of private.key is not base64; want 32 bytes in 44 base64 characters"}},
		{key(keyText(0)), []string{gw + "privateKeyFile: the content of private.key is all zero; want a key"}},
		{key(strings.Repeat("A", 5000)), []string{gw + "privateKeyFile: private.key: is larger than 4096 bytes"}},
		{gateway("nextPrivateKeyFile: " + keyText('s')), []string{gw + "nextPrivateKeyFile: looks like a key (not shown); want the name of a file that holds it"}},
		{next("-"), []string{gw + "nextPrivateKeyFile: next.key: no such file or directory"}},
		{next("secret"), []string{gw + "nextPrivateKeyFile: the content of next.key is not base64; want 32 bytes in 44 base64 characters"}},
		{next(keyText(0)), []string{gw + "nextPrivateKeyFile: the content of next.key is all zero; want a key"}},
		{next(keyText('k')), []string{gw + "nextPrivateKeyFile: the content of next.key is the key of privateKeyFile; want another key, or remove the field"}},
		{map[string]string{"gateway.yaml": gatewayYAML + "nextPrivateKeyFile: next.key\n", "private.key": "", "next.key": ""}, []string{
			gw + "nextPrivateKeyFile: the content of next.key has 0 bytes; want 32 bytes in 44 base64 characters",
			gw + "privateKeyFile: the content of private.key has 0 bytes; want 32 bytes in 44 base64 characters",
		}},
		// All problems at once, in the order of the files.
		{map[string]string{"gateway.yaml": gatewayYAML + "x: 1\nlistenPort: 0\n", "a.yaml": "x", "z.yaml": "[", "peers.yaml": strings.Replace(peerYAML(1), "192.0.2.1", "", 1)}, []string{
			"a.yaml: is of type string; want an object",
			gw + "listenPort: is 0; want a number from 1 to 65535",
			gw + "x: is not a field of this kind; want it removed or spelled as documented",
			te + "spec.endpointIP: is empty; want the IP address or DNS name of the peer's gateway",
			"z.yaml: line 2: did not find expected node content",
		}},
	} {
		t.Run(test.want[0], func(t *testing.T) {
			snapshot, err := Load(writeDir(t, valid(test.changes)))
			if err == nil {
				t.Fatal("no error")
			}
			if want := strings.Join(test.want, "\n"); err.Error() != want {
				t.Errorf("got:\n%v\nwant:\n%s", err, want)
			}
			if !reflect.DeepEqual(snapshot, Snapshot{}) {
				t.Errorf("an error and %+v", snapshot)
			}
			if joined, ok := err.(interface{ Unwrap() []error }); !ok || len(joined.Unwrap()) != len(test.want) {
				t.Error("the error does not join one error for each problem")
			}
		})
	}
}

func TestLoadNeverShowsAKey(t *testing.T) {
	secret := keyText('s')
	for _, file := range []string{"gateway.yaml", "peers.yaml", "private.key", "next.key", "x.yaml"} {
		for _, text := range []string{secret, gatewayYAML + secret, gatewayYAML + "privateKey: " + secret, gatewayYAML + "listenPort: " + secret,
			gatewayYAML + "mtu: " + secret, "apiVersion: " + secret, "metadata: " + secret, "kind: [" + secret, "x" + secret,
			strings.Replace(gatewayYAML, "private.key", secret, 1), strings.Replace(gatewayYAML, "private.key", "["+secret+"]", 1),
			strings.Replace(peerYAML(1), keyText('b'), secret[1:], 1), strings.Replace(peerYAML(1), keyText('b'), "["+secret+"]", 1)} {
			if strings.HasSuffix(file, ".key") && text == secret || strings.HasPrefix(text, "apiVersion: c") {
				continue // a valid key, or a field in which nobody would put a key: problems may quote its value
			}
			files := valid(map[string]string{"next.key": keyText('n'), file: text})
			if file == "next.key" {
				files["gateway.yaml"] += "nextPrivateKeyFile: next.key\n"
			}
			_, err := Load(writeDir(t, files))
			if err == nil {
				t.Errorf("%s with %q: no error", file, text)
			} else if strings.Contains(err.Error(), secret[1:20]) {
				t.Errorf("%s: %v", file, err)
			}
		}
	}
}

func TestLoadLimitsSizeAndNumberOfFiles(t *testing.T) {
	dir := writeDir(t, valid(nil))
	big := filepath.Join(dir, "big.yaml")
	write(t, big, "")
	if err := os.Truncate(big, MaxFileSize+1); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); err == nil || err.Error() != "big.yaml: is larger than 16777216 bytes" {
		t.Errorf("16 MiB and a byte: %v", err)
	}
	os.Remove(big)
	write(t, big, "# "+strings.Repeat("x", MaxFileSize-2))
	if _, err := Load(dir); err != nil {
		t.Errorf("16 MiB: %v", err)
	}
	os.Remove(big)

	for i := range MaxFiles {
		write(t, filepath.Join(dir, fmt.Sprintf("%d.yaml", i)), "")
	}
	if _, err := Load(dir); err == nil || err.Error() != dir+": more than 4096 files; want a directory that holds only the configuration" {
		t.Errorf("too many files: %v", err)
	}
}

func TestLoadIsNotBlockedByUnusualFiles(t *testing.T) {
	dir := writeDir(t, valid(nil))
	if err := os.Mkdir(filepath.Join(dir, "sub.yaml"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); err != nil {
		t.Errorf("a directory: %v", err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe.yaml"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("nowhere", filepath.Join(dir, "link.yaml")); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); err == nil || err.Error() != "link.yaml: no such file or directory\npipe.yaml: is not a regular file" {
		t.Errorf("a pipe and a dead link: %v", err)
	}
	missing := filepath.Join(dir, "missing")
	if _, err := Load(missing); err == nil || err.Error() != "open "+missing+": no such file or directory" {
		t.Errorf("no directory: %v", err)
	}
}

// FuzzLoad loads two files of arbitrary content. If Load accepts them, all later code must be
// able to use the Snapshot.
func FuzzLoad(f *testing.F) {
	matches, _ := filepath.Glob("testdata/*/*.*")
	for _, path := range matches {
		if text, err := os.ReadFile(path); err == nil && filepath.Ext(path) != ".txt" {
			f.Add(string(text), mappingYAML)
		}
	}
	f.Add(gatewayYAML+"---\n"+peerYAML(1)+"---\n"+peerYAML(2), mappingYAML)
	f.Add(gatewayYAML+"nextPrivateKeyFile: next.key\n", mappingYAML)
	f.Add("a: &a [1,2]\nb: [*a,*a]\n", "{\"kind\": \"\\ud83d\\ude00\"}")
	f.Fuzz(func(t *testing.T, one, two string) {
		contents := []content{{name: "one.yaml", data: []byte(one)}, {name: "two.yaml", data: []byte(two)}}
		if !strings.Contains(one+two, GatewayKind) {
			contents = append(contents, content{name: "gateway.yaml", data: []byte(gatewayYAML)})
		}
		key := func(name string) content {
			if strings.Contains(name, "next") {
				return content{name: name, data: []byte(keyText('n'))}
			}
			return content{name: name, data: []byte(keyText('k'))}
		}
		s, err := parse(contents, key)
		if err != nil {
			if text := err.Error(); !reflect.DeepEqual(s, Snapshot{}) || strings.ContainsFunc(strings.ReplaceAll(text, "\n", ""), func(r rune) bool { return r < ' ' || r == 0x7f }) {
				t.Errorf("error %q", text)
			}
			return
		}
		engineAccepts(t, s.Gateway)
		if again, err := parse(contents, key); err != nil || !reflect.DeepEqual(s, again) {
			t.Errorf("differs when read again: %v\n%+v\n%+v", err, s, again)
		}
		text, err := yaml.Marshal(s.File)
		if err != nil {
			t.Error(err)
		}
		if again, err := parse([]content{{name: "g.yaml", data: text}}, key); err != nil || again.File != s.File {
			t.Errorf("%s\nis read as %+v, %v", text, again.File, err)
		}
	})
}

func TestKeyFileReadableByOthersIsReported(t *testing.T) {
	dir := t.TempDir()
	key, next := filepath.Join(dir, "private.key"), filepath.Join(dir, "next.key")
	for path, text := range map[string]string{filepath.Join(dir, "gateway.yaml"): gatewayYAML + "nextPrivateKeyFile: next.key\n", key: keyText('k'), next: keyText('n')} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for mode, want := range map[os.FileMode]string{
		0o600: "", 0o400: "", 0o644: "private.key (0644)", 0o640: "private.key (0640)", 0o620: "private.key (0620)", 0o604: "private.key (0604)",
	} {
		if err := os.Chmod(key, mode); err != nil {
			t.Fatal(err)
		}
		s, err := Load(dir)
		if err != nil || strings.Join(s.OpenKeys, ", ") != want {
			t.Errorf("%04o: %q, %v; want %q", mode, s.OpenKeys, err, want)
		}
	}
	if err := os.Chmod(next, 0o640); err != nil {
		t.Fatal(err)
	}
	if s, err := Load(dir); err != nil || !slices.Contains(s.OpenKeys, "next.key (0640)") {
		t.Errorf("%q, %v", s.OpenKeys, err)
	}
}
