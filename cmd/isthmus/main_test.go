package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	isthmusv1alpha1 "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/internal/cli"
)

// run executes the program with these arguments and returns its exit code.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	return cli.Run(newRootCommand(), args, stdin, stdout, stderr)
}

// isthmus runs the program with these arguments and standard input.
func isthmus(stdin string, args ...string) (stdout, stderr string, code int) {
	var out, errs bytes.Buffer
	code = run(args, strings.NewReader(stdin), &out, &errs)
	return out.String(), errs.String(), code
}

func sample() gateway.Status {
	at := time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC)
	p := netip.MustParsePrefix
	bravo := gateway.PeerStatus{
		ID: "22222222-0000-4000-8000-000000000000", Name: "bravo", State: check.Connected, Message: "VPN connection established", Since: at,
		Endpoint: "192.0.2.2:5871", Configured: "192.0.2.2:5871", PublicKey: "k", LastHandshake: &at, HandshakeAge: 75.4, RTT: 0.00123, Loss: 0,
		Receive: gateway.TrafficStatus{Packets: 12, Bytes: 1536}, Transmit: gateway.TrafficStatus{Packets: 10_000, Bytes: 14 << 20},
		Rules: gateway.RulesStatus{RemotePods: p("10.244.0.0/16"), RemotePodsHere: p("10.246.0.0/16"), RemoteExternal: p("10.247.0.0/16"),
			LocalPods: p("10.244.0.0/16"), LocalPodsThere: p("10.250.0.0/16"), LocalExternal: p("10.251.0.0/16"), NAPT: netip.MustParseAddr("10.250.0.0")},
		Sessions: 2, MTU: 1392,
		Tunnels: []gateway.TunnelStatus{{Tunnel: 0, State: check.Connected, InUse: true}, {Tunnel: 1, State: check.Connected, InUse: true}, {Tunnel: 2, State: check.Disconnected}},
		Drops:   []gateway.DropStatus{{Direction: "inbound", Reason: "no_mapping", Packets: 3, Text: "nothing is mapped to this address of the ExternalCIDR"}},
	}
	charlie := gateway.PeerStatus{
		ID: "33333333-0000-4000-8000-000000000000", State: check.Disconnected, Message: "No network connectivity towards remote cluster", Since: at, Down: true,
		MTU: 1440, Problem: "resolving gw.example: no such host", Configured: "gw.example:5871", Loss: 1,
		Rules: gateway.RulesStatus{RemotePods: p("10.60.0.0/16"), RemotePodsHere: p("10.60.0.0/16"), RemoteExternal: p("10.61.0.0/16"),
			LocalPods: p("10.244.0.0/16"), LocalPodsThere: p("10.244.0.0/16"), LocalExternal: p("10.245.0.0/16"), NAPT: netip.MustParseAddr("10.244.0.0")},
	}
	return gateway.Status{
		Version: "v1", ClusterID: "11111111-0000-4000-8000-000000000000", ClusterName: "alpha", PublicKey: "pub", ListenPort: 5871, Started: at, Ready: true,
		Namespace: "/proc/7/fd/8", TUN: "isthmus0", MTU: 1440, MTUAuto: true,
		Config: gateway.ConfigStatus{Generation: 4, Since: at,
			Errors: []string{`peers.yaml: TunnelEndpoint x/y: spec.remotePodCIDR: "10.1.2.3/16" has host bits set; want 10.1.0.0/16`}},
		Sessions: gateway.SessionsStatus{Flows: 2, Limit: 1 << 20},
		Peers:    []gateway.PeerStatus{bravo, charlie},
		Drops:    []gateway.DropStatus{{Direction: "outbound", Reason: "no_peer", Packets: 7, Text: "no peer has this address"}},
		Waiting:  []string{"map.yaml: NatMapping z"},
		Flows: []gateway.FlowStatus{{Peer: bravo.ID, Kind: "napt", Protocol: "tcp", Local: netip.MustParseAddrPort("192.0.2.1:4000"),
			Mapped: netip.MustParseAddrPort("10.250.0.0:4000"), Remote: netip.MustParseAddrPort("10.246.1.2:80"), State: "established", Idle: 3, Expires: 7300}},
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	if got != string(b) {
		t.Errorf("%s: got\n%s\nwant\n%s", name, got, b)
	}
}

func TestStatusIsPrintedAsATable(t *testing.T) {
	for _, tc := range []struct {
		file string
		wide bool
	}{{"status.txt", false}, {"status-wide.txt", true}} {
		var b bytes.Buffer
		if err := printStatus(&b, sample(), tc.wide); err != nil {
			t.Fatal(err)
		}
		golden(t, tc.file, b.String())
	}
	relayed := sample()
	relayed.Peers[0].Endpoint, relayed.Peers[0].Hidden = "10.244.1.1:8531", true
	relayed.Mandate = &isthmusv1alpha1.Mandate{Epoch: 7, Since: time.Now().Add(-3 * time.Hour), Takeover: isthmusv1alpha1.Takeover{Reason: isthmusv1alpha1.TakeoverExpired, Previous: "gateway-2"}}
	var b bytes.Buffer
	if err := printStatus(&b, relayed, false); err != nil || strings.Contains(b.String(), "10.244.1.1") || !strings.Contains(b.String(), " 192.0.2.2:5871 (source hidden) ") {
		t.Errorf("behind a relay: %v\n%s", err, b.String())
	}
	if want := "\nactive for 3h0m, epoch 7: Pod gateway-2 did not renew the Lease\n"; !strings.Contains(b.String(), want) {
		t.Errorf("no %q in\n%s", want, b.String())
	}
}

// gatewayWith starts a server that responds like a gateway with this status.
func gatewayWith(t *testing.T, s gateway.Status) (address string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/status" {
			http.Error(w, "what?", http.StatusBadRequest)
			return
		}
		json.NewEncoder(w).Encode(s)
	}))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

func TestStatusExitCodeReflectsHealth(t *testing.T) {
	bad := sample()
	good := sample()
	good.Config.Errors, good.Peers = nil, good.Peers[:1]
	problem := good
	problem.Config.Problems = []string{"ip route replace: operation not permitted"}
	for _, tc := range []struct {
		name   string
		status gateway.Status
		code   int
	}{{"fine", good, 0}, {"peer away, file broken", bad, 1}, {"not applied", problem, 1}} {
		out, errs, code := isthmus("", "status", "--address", gatewayWith(t, tc.status))
		if code != tc.code || errs != "" || !strings.Contains(out, "\nbravo ") {
			t.Errorf("%s: code %d, stderr %q, stdout:\n%s", tc.name, code, errs, out)
		}
	}
	for _, format := range []string{"json", "yaml"} {
		out, _, code := isthmus("", "status", "--address", gatewayWith(t, good), "-o", format)
		if code != 0 || !strings.Contains(out, "remotePodCIDRHere") {
			t.Errorf("%s: code %d:\n%s", format, code, out)
		}
	}
}

func TestUnreachableClusterAndWrongUsageExitWithCodeTwo(t *testing.T) {
	dir := t.TempDir()
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"status", "--address", "127.0.0.1:1"}, "nothing listens there"},
		{[]string{"status", "--address", "no address"}, "want host:port"},
		{[]string{"status", "-o", "xml"}, `--output "xml": want wide, json or yaml`},
		{[]string{"status", "extra"}, "arguments \"extra\": want isthmus status"},
		{[]string{"statsu"}, "Did you mean this?\n\tstatus"},
		{[]string{"status", "--addres", "x"}, "unknown flag: --addres; did you mean --address?"}, //nolint:misspell // the test needs a misspelt flag
		{[]string{"status", "--flows", "many"}, `--flows "many": want a number`},
		{[]string{"peer", "--remote-context", "b", "--timeout", "soon"}, `--timeout "soon": want a duration such as 90s or 5m`},
		{[]string{"trace", "10.0.0.1", "10.0.0.2", "--direction", "up"}, `--direction "up": want out or in`},
		{[]string{"gateway", "--random-ports=perhaps"}, "--random-ports"},
		{[]string{"bogus"}, "unknown command"},
		{[]string{"status", "--bogus"}, "unknown flag"},
		{[]string{"trace", "10.0.0.1"}, "arguments \"10.0.0.1\": want isthmus trace SRC"},
		{[]string{"trace", "x", "10.0.0.1"}, "source: \"x\" is not an address"},
		{[]string{"trace", "10.0.0.1", "10.0.0.2", "--address", "127.0.0.1:1"}, "nothing listens there"},
		{[]string{"trace", "10.0.0.1", "10.0.0.2", "--config", dir}, "no object of kind Gateway"},
		{[]string{"gateway"}, "want --config DIR"},
		{[]string{"gateway", "--config", dir, "--log-level", "loud"}, "want debug, info, warn or error"},
		{[]string{"gateway", "--config", dir, "--udp-offload=maybe"}, `--udp-offload "maybe": want auto, on or off`},
		{[]string{"gateway", "--config", dir, "--pprof-address", ":6060"}, "want a loopback address"},
		{[]string{"pubkey"}, "standard input: the key"},
		{[]string{"pubkey", "--tunnels", "17"}, "--tunnels 17: want 1 to 16"},
	} {
		out, errs, code := isthmus("", tc.args...)
		if code != 2 || !strings.Contains(errs, tc.want) || out != "" {
			t.Errorf("%q: code %d, stderr %q, stdout %q", tc.args, code, errs, out)
		}
	}
}

func TestKeyCommandsMatchWireGuard(t *testing.T) {
	// Alice's keys in RFC 7748, section 6.1.
	out, _, code := isthmus("dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=\n", "pubkey")
	if out != "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=\n" || code != 0 {
		t.Errorf("code %d, %q", code, out)
	}
	one, _, _ := isthmus("", "genkey")
	two, _, _ := isthmus("", "genkey")
	if one == two || len(one) != 45 {
		t.Errorf("%q, %q", one, two)
	}
	if three, errs, code := isthmus("dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=\n", "pubkey", "--tunnels", "3"); len(three) != 3*45 || !strings.HasPrefix(three, out) || code != 0 {
		t.Errorf("the keys of three tunnels: %q, %s, %d; want that of the first first", three, errs, code)
	}
	if public, errs, code := isthmus(one, "pubkey"); len(public) != 45 || code != 0 {
		t.Errorf("code %d, %q", code, errs)
	}
}

// config returns a directory such as a bug report contains.
func config(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"private.key":  "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=\n",
		"gateway.yaml": "apiVersion: isthmus.net/v1alpha1\nkind: Gateway\nclusterID: 11111111-0000-4000-8000-000000000000\nprivateKeyFile: private.key\n",
		"bravo.yaml": `apiVersion: net.liqo.io/v1alpha1
kind: TunnelEndpoint
metadata: {name: bravo, namespace: t}
spec:
  clusterIdentity: {clusterID: 22222222-0000-4000-8000-000000000000, clusterName: bravo}
  localPodCIDR: 10.244.0.0/16
  localNATPodCIDR: 10.246.0.0/16
  localExternalCIDR: 10.245.0.0/16
  localNATExternalCIDR: 10.247.0.0/16
  remotePodCIDR: 10.244.0.0/16
  remoteNATPodCIDR: 10.246.0.0/16
  remoteExternalCIDR: 10.245.0.0/16
  remoteNATExternalCIDR: 10.247.0.0/16
  endpointIP: 192.0.2.2
  backendType: wireguard
  backend_config: {port: "5871", publicKey: "3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08="}
`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestTracePrintsAReadableResult(t *testing.T) {
	dir := config(t)
	for _, tc := range []struct {
		file string
		code int
		args []string
	}{
		{"trace-out.txt", 0, []string{"10.244.1.10:5000", "10.246.1.20:80", "--direction", "out"}},
		{"trace-in.txt", 0, []string{"10.246.1.20:80", "10.246.1.10:5000", "--direction", "in"}},
		// Both clusters use 10.246 for each other, so the addresses are valid in both
		// directions.
		{"trace-both.txt", 0, []string{"10.246.1.20", "10.246.1.10", "udp"}},
		{"trace-node.txt", 0, []string{"192.168.1.1", "10.246.1.20", "icmp"}},
		{"trace-self.txt", 0, []string{"10.246.0.0:12345", "10.247.0.1:12345", "udp", "--direction", "in"}},
		{"trace-dropped.txt", 1, []string{"10.246.1.20", "10.247.0.9", "--direction", "in"}},
	} {
		out, errs, code := isthmus("", append([]string{"trace", "--config", dir}, tc.args...)...)
		if code != tc.code || errs != "" {
			t.Errorf("%q: code %d, stderr %q", tc.args, code, errs)
		}
		golden(t, tc.file, out)
	}
	out, _, code := isthmus("", "trace", "--config", dir, "-o", "json", "10.244.1.10", "10.246.1.20")
	var steps []gateway.TraceStep
	if err := json.Unmarshal([]byte(out), &steps); err != nil || code != 0 || len(steps) != 1 || steps[0].PeerName != "bravo" {
		t.Errorf("code %d, %v: %s", code, err, out)
	}
}

func TestHelpNamesEveryCommand(t *testing.T) {
	out, _, code := isthmus("")
	if code != 0 {
		t.Errorf("code %d", code)
	}
	for _, name := range []string{"install", "uninstall", "peer", "unpeer", "gateway", "status", "trace", "genkey", "pubkey", "manager", "route-agent", "version"} {
		if !strings.Contains(out, "\n  "+name+" ") {
			t.Errorf("no %s in\n%s", name, out)
		}
	}
	if !strings.Contains(out, cli.ExitCodes) {
		t.Errorf("nothing about exit codes in\n%s", out)
	}
	output, _, code := isthmus("", "version")
	if code != 0 || !strings.HasPrefix(output, "isthmus ") {
		t.Errorf("code %d, %q", code, output)
	}
	if short, _, code := isthmus("", "--version"); code != 0 || short != output {
		t.Errorf("--version: code %d, %q; want %q", code, short, output)
	}
}

func TestShellCompletesContextsAndChoices(t *testing.T) {
	noCluster(t)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, []byte(`{apiVersion: v1, kind: Config, contexts: [{name: paris, context: {cluster: c}}, {name: oslo, context: {cluster: c}}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args, want string
	}{
		{"status --kubeconfig FILE --context |", "oslo paris"},
		{"peer --kubeconfig FILE --remote-context p|", "paris"},
		{"peer --remote-kubeconfig FILE --remote-context |", "oslo paris"},
		{"peer --remote-context |", ""},
		{"status -o |", "json wide yaml"},
		{"trace -o |", "json yaml"},
		{"trace --direction |", "in out"},
		{"trace 10.0.0.1 10.0.0.2 |", "icmp tcp udp"},
		{"install --gateway-service |", "LoadBalancer NodePort none"},
		{"gateway --log-level |", "debug error info warn"},
		{"unpeer --kubeconfig FILE |", ""},
	} {
		args := strings.Fields(strings.ReplaceAll(tc.args, "FILE", file))
		args[len(args)-1] = strings.TrimSuffix(args[len(args)-1], "|")
		out, _, code := isthmus("", append([]string{"__complete"}, args...)...)
		words := strings.Split(strings.TrimSpace(out), "\n")
		words = words[:len(words)-1] // remove the completion directive
		slices.Sort(words)
		if got := strings.Join(words, " "); got != tc.want || code != 0 {
			t.Errorf("%s: %q, code %d; want %q", tc.args, got, code, tc.want)
		}
	}
}

// pflag displays text between backquotes in a flag's usage as the name of its value.
func TestFlagHelpHasPlainValueNames(t *testing.T) {
	for _, cmd := range newRootCommand().Commands() {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if strings.Contains(f.Usage, "`") {
				t.Errorf("isthmus %s --%s: backquotes in %q", cmd.Name(), f.Name, f.Usage)
			}
		})
	}
}
