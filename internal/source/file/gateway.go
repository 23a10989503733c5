package file

import (
	stdjson "encoding/json"
	"fmt"
	"net"
	"strconv"
	"strings"

	"sigs.k8s.io/json"

	"github.com/isthmus-net/isthmus/fabric"
)

// GatewayAPIVersion and GatewayKind identify the object that GatewayFile describes.
const (
	GatewayAPIVersion = "isthmus.net/v1alpha1"
	GatewayKind       = "Gateway"
)

// Names of the fields that contain names of key files.
const (
	fieldKey     = "privateKeyFile"
	fieldNextKey = "nextPrivateKeyFile"
)

// Defaults of the fields that a Gateway object may leave out.
const (
	DefaultListenPort     = 5871             // Liqo's port
	DefaultMetricsAddress = "127.0.0.1:5872" // Liqo's port for metrics; loopback, for clients on the same machine
	DefaultStatusAddress  = "127.0.0.1:5873" // for the CLI on the same machine
)

// Bounds of the numeric fields.
const (
	MinMTU   = 576     // every IPv4 host has to accept this size (RFC 791)
	MaxMTU   = 65475   // 65535 minus outer IPv4 and UDP headers (28) and WireGuard's header and tag (32)
	MaxFlows = 1 << 26 // more flows would need tens of gigabytes
)

// GatewayFile is the gateway's own part of the configuration. Its format is that of a Kubernetes
// object, but no API server has this kind.
//
//	apiVersion: isthmus.net/v1alpha1
//	kind: Gateway
//	clusterID: 11111111-1111-4111-8111-111111111111
//	clusterName: alpha
//	privateKeyFile: private.key
type GatewayFile struct {
	APIVersion string `json:"apiVersion"` // always GatewayAPIVersion
	Kind       string `json:"kind"`       // always GatewayKind

	ClusterID   string `json:"clusterID"`             // ID of our own cluster; a valid Kubernetes label value
	ClusterName string `json:"clusterName,omitempty"` // only shown to people; may be empty

	// PrivateKeyFile is the name of the file with our WireGuard private key, in base64 as wg(8)
	// prints it. A relative name is relative to the directory of the configuration.
	PrivateKeyFile string `json:"privateKeyFile"`

	// NextPrivateKeyFile is the name of the file with the next private key while our key is being
	// rotated. The gateway then responds to both keys. By default, there is no such file.
	NextPrivateKeyFile string `json:"nextPrivateKeyFile,omitempty"`

	ListenPort     uint16 `json:"listenPort,omitempty"`     // UDP port of WireGuard, default 5871
	Tunnels        int    `json:"tunnels,omitempty"`        // maximum number of tunnels per peer, on UDP ports from listenPort upwards, default 1
	MTU            MTU    `json:"mtu"`                      // MTU of the tunnel in octets, or "auto" (default)
	MetricsAddress string `json:"metricsAddress,omitempty"` // TCP "host:port" of /metrics, /healthz, /readyz, default "127.0.0.1:5872"
	StatusAddress  string `json:"statusAddress,omitempty"`  // TCP "host:port" of the JSON status, default "127.0.0.1:5873"

	// FlowLog is the name of the file to which the gateway appends one line of JSON for each flow that opens,
	// closes or is refused; "-" is standard output. By default, there is no log.
	FlowLog          string `json:"flowLog,omitempty"`
	FlowLogSample    int    `json:"flowLogSample,omitempty"`    // log only one of this many flows, default 1
	FlowLogPerSecond int    `json:"flowLogPerSecond,omitempty"` // maximum number of lines per second, default 1000

	NAT
}

// MaxFlowLog is the maximum of FlowLogSample and FlowLogPerSecond.
const MaxFlowLog = 1_000_000

// MTU is an MTU in octets. The zero value is AutoMTU; its JSON is "auto".
type MTU int

// AutoMTU means an MTU derived from the path to the peers.
const AutoMTU MTU = 0

// MarshalJSON returns a number, or "auto".
func (m MTU) MarshalJSON() ([]byte, error) {
	if m == AutoMTU {
		return []byte(`"auto"`), nil
	}
	return strconv.AppendInt(nil, int64(m), 10), nil
}

// UnmarshalJSON accepts a number from MinMTU to MaxMTU, or "auto".
func (m *MTU) UnmarshalJSON(b []byte) error {
	if string(b) == `"auto"` {
		*m = AutoMTU
		return nil
	}
	n, wrong := integer(b, MinMTU, MaxMTU)
	if wrong != "" {
		return fmt.Errorf("%s, or \"auto\"", wrong)
	}
	*m = MTU(n)
	return nil
}

// String returns "auto" or the number.
func (m MTU) String() string {
	if m == AutoMTU {
		return "auto"
	}
	return strconv.Itoa(int(m))
}

// integer parses a JSON number from minimum to maximum. problem explains why the number is invalid;
// it is empty if the number is valid.
func integer(b []byte, minimum, maximum int64) (n int64, problem string) {
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil || n < minimum || n > maximum {
		found := "is not a whole number"
		if err == nil {
			found = "is " + string(b)
		}
		return 0, fmt.Sprintf("%s; want a number from %d to %d", found, minimum, maximum)
	}
	return n, ""
}

// gateway reads the Gateway object. It rejects unknown fields, because a misspelt field would
// silently leave the default in force.
func (l *loader) gateway(origin fabric.Origin, raw []byte) {
	// Numbers stay raw, so that each invalid number has its own message.
	var in struct {
		APIVersion     string             `json:"apiVersion"`
		Kind           string             `json:"kind"`
		ClusterID      string             `json:"clusterID"`
		ClusterName    string             `json:"clusterName"`
		PrivateKeyFile string             `json:"privateKeyFile"`
		NextKeyFile    string             `json:"nextPrivateKeyFile"`
		ListenPort     stdjson.RawMessage `json:"listenPort"`
		Tunnels        stdjson.RawMessage `json:"tunnels"`
		MTU            stdjson.RawMessage `json:"mtu"`
		MetricsAddress string             `json:"metricsAddress"`
		StatusAddress  string             `json:"statusAddress"`

		FlowLog          string             `json:"flowLog"`
		FlowLogSample    stdjson.RawMessage `json:"flowLogSample"`
		FlowLogPerSecond stdjson.RawMessage `json:"flowLogPerSecond"`
		natRaw
	}
	l.unread = true
	before := len(l.problems)
	strict, err := json.UnmarshalStrict(raw, &in)
	if err != nil {
		l.decodeProblem(origin, "", err)
		return
	}
	l.strictProblems(origin, strict)

	g := GatewayFile{
		APIVersion:     in.APIVersion,
		Kind:           in.Kind,
		ClusterID:      in.ClusterID,
		ClusterName:    in.ClusterName,
		PrivateKeyFile: in.PrivateKeyFile,

		NextPrivateKeyFile: in.NextKeyFile,

		ListenPort:     DefaultListenPort,
		Tunnels:        1,
		MetricsAddress: DefaultMetricsAddress,
		StatusAddress:  DefaultStatusAddress,
	}
	if wrong := fabric.CheckClusterID(g.ClusterID); wrong != "" {
		l.problem(origin, "clusterID", "%s", wrong)
	}
	if wrong := fabric.CheckClusterName(g.ClusterName); wrong != "" {
		l.problem(origin, "clusterName", "%s", wrong)
	}
	if g.PrivateKeyFile == "" {
		l.problem(origin, fieldKey, "is empty; want the name of the file with the WireGuard private key")
	}
	for field, name := range map[string]string{fieldKey: g.PrivateKeyFile, fieldNextKey: g.NextPrivateKeyFile} {
		if strings.HasSuffix(name, "=") { // every base64-encoded key ends in "="
			l.problem(origin, field, "looks like a key (not shown); want the name of a file that holds it")
		}
	}
	if in.ListenPort != nil {
		port, wrong := integer(in.ListenPort, 1, 65535)
		if g.ListenPort = uint16(port); wrong != "" {
			l.problem(origin, "listenPort", "%s", wrong)
		}
	}
	if in.Tunnels != nil {
		n, wrong := integer(in.Tunnels, 1, fabric.MaxTunnels)
		if g.Tunnels = int(n); wrong != "" {
			l.problem(origin, "tunnels", "%s", wrong)
		}
	}
	if last := int(g.ListenPort) + g.Tunnels - 1; last > 65535 {
		l.problem(origin, "tunnels", "is %d, and the last would listen on port %d (listenPort is %d); want ports up to 65535", g.Tunnels, last, g.ListenPort)
	}
	if in.MTU != nil {
		if err := g.MTU.UnmarshalJSON(in.MTU); err != nil {
			l.problem(origin, "mtu", "%v", err)
		}
	}
	g.FlowLog = in.FlowLog
	for _, f := range []struct {
		name string
		raw  stdjson.RawMessage
		to   *int
	}{{"flowLogSample", in.FlowLogSample, &g.FlowLogSample}, {"flowLogPerSecond", in.FlowLogPerSecond, &g.FlowLogPerSecond}} {
		if f.raw == nil {
			continue
		}
		n, wrong := integer(f.raw, 1, MaxFlowLog)
		if *f.to = int(n); wrong != "" {
			l.problem(origin, f.name, "%s", wrong)
		}
	}
	g.NAT.read(&in.natRaw, func(field, format string, args ...any) { l.problem(origin, field, format, args...) })
	l.address(origin, "metricsAddress", in.MetricsAddress, &g.MetricsAddress)
	l.address(origin, "statusAddress", in.StatusAddress, &g.StatusAddress)
	if len(l.problems) == before {
		l.gateways = append(l.gateways, gatewayObject{origin, g})
	}
}

// address parses a TCP listen address and stores it in *to. If value is empty, *to keeps its
// default.
func (l *loader) address(origin fabric.Origin, field, value string, to *string) {
	if value == "" {
		return
	}
	_, port, err := net.SplitHostPort(value)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		l.problem(origin, field, "%q is not a listen address; want host:port, such as %q", printable(value), *to)
		return
	}
	*to = value
}
