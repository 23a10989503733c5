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

// Config is a complete configuration. A later one replaces it.
type Config struct {
	Gateway    fabric.Gateway   // as fabric.GatewayFor decided; never modified
	Refused    []fabric.Problem // what Gateway leaves out, for display
	PrivateKey Key
	NextKey    Key    // while the key rotates, the gateway accepts this one, too; zero: none
	ListenPort uint16 // UDP, WireGuard
	MTU        int    // of the tunnel in octets; 0: derived from the paths to the peers
	// PodNetwork has the nodes and pods of the cluster, for a gateway with its Pod's network. See
	// Options.PodNetwork.
	PodNetwork fabric.PodNetwork
	// Preshared holds the preshared keys by cluster ID, for all tunnels to a peer. Never modified.
	Preshared map[string]datapath.PresharedKeys

	// The rest is read once, when the gateway starts.
	Tunnels        int    // at most this many to one peer, on ports from ListenPort upwards; 0 means 1
	MetricsAddress string // TCP address of /metrics, /healthz and /readyz; empty: none
	StatusAddress  string // TCP address of /status and /trace; empty: none
	FlowLog        FlowLog
	NAT            natengine.Config // bounds and timeouts; the gateway sets the addresses
}

// Key is a WireGuard private key. It does not print itself.
type Key [32]byte

// String hides the key.
func (Key) String() string { return "(private key)" }

// GoString hides the key from %#v.
func (Key) GoString() string { return "(private key)" }

// Source delivers the first Config and every later change, or an error while the present
// configuration is invalid. It makes one call at a time, and returns when ctx ends.
type Source func(ctx context.Context, deliver func(Config, error))

// Options of Run. Source is required.
type Options struct {
	Source  Source
	Log     *slog.Logger // nil: slog.Default()
	Version string       // for metrics and status

	// UDPOffload lets UDP superpackets cross the TUN in both directions: from senders that use
	// UDP_SEGMENT, and towards hosts, made from datagrams of one flow that came together. Before
	// Linux 6.2 it has no effect. See tun.TrustsUSO.
	UDPOffload bool

	// PodNetwork says that the network namespace of the process is the gateway's own, a Pod's, and
	// that the overlay of the cluster ends in it. Otherwise the process runs in the host's
	// namespace, and the gateway creates its own.
	PodNetwork bool

	// Ready, if any, returns a reason why the status must not call the gateway ready although it
	// works, for example because its Source delivers remembered objects. It may be called
	// concurrently.
	Ready func() error

	// Mandate, if any, returns since when and why this gateway is active, for the status; nil: it is
	// not known. It may be called concurrently.
	Mandate func() *isthmus.Mandate

	// Owner, if any, returns who has an address of this cluster, for the flow log. It may be called
	// concurrently.
	Owner func(netip.Addr) fabric.Owner

	// Calls, if not nil, is closed when this gateway may start handshakes with its peers by itself.
	// A handshake makes a peer send to this gateway instead of the previous one, which is too early
	// before the nodes have moved. Until then a packet from a node still starts a handshake at
	// once, and the gateway answers those that peers start.
	Calls <-chan struct{}

	// Gate, if any, is called right before each system call that sends to a peer. While it returns
	// false, the gateway sends nothing. It is called concurrently.
	Gate func() bool

	// Begin, if not nil, is closed when this gateway becomes active. Until then it prepares the
	// slow parts: the TUNs, the rules and the kernel's objects. It has no UDP port and no key of a
	// peer, and uses neither Flows nor Beside.
	Begin <-chan struct{}

	// Flows, if not nil, has the flows of the previous gateway, which this one adopts before it
	// handles the first packet. From then on the other gateways copy this one's flows from it.
	Flows *flowsync.Keeper

	// InBand, if not nil, lets managers use the tunnel to the peers that agreed to it.
	InBand *InBand

	// Beside, if any, runs while the gateway is active. It starts when the first Config is in
	// force, and its context ends before the gateway takes anything down.
	Beside func(ctx context.Context, r Running)
}

// Running is a running gateway. Its methods may be called concurrently, until Options.Beside has
// returned.
type Running struct{ g *gateway }

// Status describes the gateway, without its flows.
func (r Running) Status() Status { return r.g.status(0) }

// Ready returns why the gateway carries nothing, or nil.
func (r Running) Ready() error { return r.g.unready() }

// Yield prepares for another gateway to become active. From now on this one relays packets that
// nodes send to peers to the gateways that copy its flows (Options.Flows), and sends none to peers.
// It delivers packets from peers until the end. Yield returns when no packet to a peer is under
// way.
func (r Running) Yield() { r.g.yield() }

// StatusHandler answers /status and /trace, as on Config.StatusAddress.
func (r Running) StatusHandler() http.Handler { return r.g.statusHandler() }

// CaptureHandler answers /capture, as at CaptureSocket. A response ends when the gateway does.
func (r Running) CaptureHandler() http.Handler { return r.g.captureHandler() }

// Gatherer returns the gateway's metrics.
func (r Running) Gatherer() prometheus.Gatherer { return r.g.metrics }

// samePeers reports whether both are equal, apart from PodNetwork and Gateway.Site.
func (c Config) samePeers(other Config) bool {
	if !slices.EqualFunc(c.Gateway.Peers, other.Gateway.Peers, samePeer) {
		return false
	}
	c.Gateway.Peers, c.Gateway.Site, c.PodNetwork = nil, fabric.Site{}, fabric.PodNetwork{}
	other.Gateway.Peers, other.Gateway.Site, other.PodNetwork = nil, fabric.Site{}, fabric.PodNetwork{}
	return reflect.DeepEqual(c, other)
}
