package gateway

import (
	"context"
	"log/slog"
	"net/http"
	"net/netip"
	"reflect"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/flowsync"
	"github.com/isthmus-net/isthmus/natengine"
)

// A Config is a complete configuration. Each one replaces the previous one as a whole.
type Config struct {
	Gateway    fabric.Gateway   // the result of fabric.GatewayFor; never modified
	Refused    []fabric.Problem // API objects and fields that Gateway leaves out as invalid, for display
	PrivateKey Key
	NextKey    Key    // the next key, which the gateway also accepts while the key rotates; otherwise zero
	ListenPort uint16 // UDP port of WireGuard
	MTU        int    // of the tunnel in octets; 0: derived from the paths to the peers
	// PodNetwork holds the nodes and pods of the cluster. Only a gateway that uses its Pod's network
	// needs it (Options.PodNetwork).
	PodNetwork fabric.PodNetwork
	// Preshared holds the preshared keys by cluster ID. A key applies to all tunnels to its peer.
	// The map is never modified.
	Preshared map[string]datapath.PresharedKeys

	// The fields below are read only once, when the gateway starts.
	Tunnels        int    // maximum number of tunnels to one peer, on ports from ListenPort upwards; 0 means 1
	MetricsAddress string // TCP address of /metrics, /healthz and /readyz; empty: none
	StatusAddress  string // TCP address of /status and /trace; empty: none
	FlowLog        FlowLog
	NAT            natengine.Config // bounds and timeouts; the gateway sets the addresses
}

// A Key is a WireGuard private key. Formatting it, with any verb for values, does not reveal it.
type Key [32]byte

// String hides the key.
func (Key) String() string { return "(private key)" }

// GoString hides the key from %#v.
func (Key) GoString() string { return "(private key)" }

// A Source delivers the first Config and every later change. While the configuration is invalid,
// the Source delivers an error instead. It does not call deliver concurrently, and returns when ctx
// ends.
type Source func(ctx context.Context, deliver func(Config, error))

// Options are the options of Run. Source is required.
type Options struct {
	Source  Source
	Log     *slog.Logger // nil: slog.Default()
	Version string       // for metrics and status

	// UDPOffload lets UDP superpackets cross the TUN in both directions. Local senders may pass
	// superpackets (UDP_SEGMENT), and datagrams of one flow that arrived together are passed to
	// hosts as one. It has no effect before Linux 6.2. See tun.TrustsUSO.
	UDPOffload bool

	// PodNetwork is true if the process runs in the network namespace of a Pod, in which the
	// cluster's overlay ends. Otherwise the process runs in the host's namespace, and the gateway
	// creates a namespace of its own.
	PodNetwork bool

	// Ready, if not nil, returns nil, or a reason why the status must report the gateway as not
	// ready although it works. One such reason is that the Source delivers stored objects instead
	// of current ones. Ready may be called concurrently.
	Ready func() error

	// Mandate, if not nil, returns when this gateway became active, and the reason, for the status.
	// It returns nil while these are unknown. It may be called concurrently.
	Mandate func() *isthmus.Mandate

	// Owner, if not nil, returns the pod or node that has an address of this cluster, for the flow
	// log. It may be called concurrently.
	Owner func(netip.Addr) fabric.Owner

	// Calls, if not nil, is closed when this gateway may start handshakes with its peers without a
	// packet to send. A handshake makes a peer send to this gateway instead of the previous one.
	// That would be too early while the nodes still use the previous gateway. Until Calls is
	// closed, the gateway starts a handshake only when a node sends a packet, and it answers
	// handshakes that peers start.
	Calls <-chan struct{}

	// Gate, if not nil, is called right before each system call that sends to a peer. While it
	// returns false, the gateway sends nothing. It is called concurrently.
	Gate func() bool

	// Begin, if not nil, is closed when this gateway becomes active. Until then the gateway prepares
	// only the parts that take long: the TUNs, the rules and the kernel objects. It opens no UDP
	// port, has no peer's key, and does not use Flows and Beside.
	Begin <-chan struct{}

	// Flows, if not nil, holds copies of the flows of the previous active gateway. When this gateway
	// becomes active, it adopts these flows before it handles the first packet. From then on, the
	// standby gateways copy their flows from this one.
	Flows *flowsync.Keeper

	// InBand, if not nil, lets managers connect through the tunnel to peers that have agreed to
	// that.
	InBand *InBand

	// Beside, if not nil, runs in a goroutine of its own while the gateway is active. It starts when
	// the first Config is in force. Its context ends before the gateway removes anything.
	Beside func(ctx context.Context, r Running)
}

// Running is a running gateway. Its methods may be called concurrently, until Options.Beside has
// returned.
type Running struct{ g *gateway }

// Status returns the gateway's status, without a list of flows.
func (r Running) Status() Status { return r.g.status(0) }

// Ready returns the reason why the gateway carries no packets, or nil.
func (r Running) Ready() error { return r.g.unready() }

// Yield prepares for another gateway to become active. From now on this gateway sends no packets to
// peers. If a node sends a packet to a peer, this gateway relays the packet to the gateways that
// copy its flows (Options.Flows). It still delivers packets from peers. When Yield returns, no
// packet is on its way to a peer.
func (r Running) Yield() { r.g.yield() }

// StatusHandler returns the handler of /status, /trace and the other paths that are served at
// Config.StatusAddress.
func (r Running) StatusHandler() http.Handler { return r.g.statusHandler() }

// CaptureHandler returns the handler of /capture, which is also served at CaptureSocket. A
// response ends when the gateway ends.
func (r Running) CaptureHandler() http.Handler { return r.g.captureHandler() }

// Gatherer returns the gateway's metrics.
func (r Running) Gatherer() prometheus.Gatherer { return r.g.metrics }

// samePeers reports whether two configurations are equal, apart from PodNetwork and Gateway.Site.
func (c Config) samePeers(other Config) bool {
	if !slices.EqualFunc(c.Gateway.Peers, other.Gateway.Peers, samePeer) {
		return false
	}
	c.Gateway.Peers, c.Gateway.Site, c.PodNetwork = nil, fabric.Site{}, fabric.PodNetwork{}
	other.Gateway.Peers, other.Gateway.Site, other.PodNetwork = nil, fabric.Site{}, fabric.PodNetwork{}
	return reflect.DeepEqual(c, other)
}
