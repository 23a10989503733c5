package gateway

import (
	"context"
	"log/slog"
	"net/http"
	"net/netip"
	"reflect"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/flowsync"
	"github.com/isthmus-net/isthmus/natengine"
)

// Config is a complete configuration. A later one replaces it.
type Config struct {
	Gateway    fabric.Gateway   // as fabric.GatewayFor decided; never modified
	Refused    []fabric.Problem // what was left out of it, to show
	PrivateKey Key
	NextKey    Key    // to which the gateway answers, too, while its key rotates; zero: there is none
	ListenPort uint16 // UDP, WireGuard
	MTU        int    // of the tunnel in octets; 0: derived from the ways to the peers
	// PodNetwork is where a gateway delivers that has its Pod's network (Options.PodNetwork).
	PodNetwork fabric.PodNetwork
	// Preshared are the preshared keys of peers by cluster ID, for all tunnels to each. Never modified.
	Preshared map[string]datapath.PresharedKeys

	// The rest is read once, when the gateway starts.
	Tunnels        int    // at most this many to one peer, on ports from ListenPort upwards; 0 means 1
	MetricsAddress string // TCP address of /metrics, /healthz and /readyz; empty: none
	StatusAddress  string // TCP address of /status and /trace; empty: none
	FlowLog        FlowLog
	NAT            natengine.Config // bounds and timeouts; the addresses in it are the gateway's to set
}

// Key is a WireGuard private key. It does not print itself.
type Key [32]byte

// String hides the key.
func (Key) String() string { return "(private key)" }

// GoString hides the key from %#v.
func (Key) GoString() string { return "(private key)" }

// Source delivers the first Config and every later change, or the reason why what is there now is
// none, one call at a time. It returns when ctx ends.
type Source func(ctx context.Context, deliver func(Config, error))

// Options of Run. Source is required.
type Options struct {
	Source  Source
	Log     *slog.Logger // nil: slog.Default()
	Version string       // for metrics and status

	// UDPOffload lets UDP superpackets cross the TUN, both ways: those of senders that use
	// UDP_SEGMENT, and towards the hosts datagrams of one flow that came together (Linux 6.2 and
	// later; without it nothing happens). See tun.TrustsUSO.
	UDPOffload bool

	// PodNetwork says that the network namespace of the process is the gateway's own, a Pod's, and
	// that the overlay of the cluster ends in it. Else it is that of the host, and the gateway makes
	// one of its own.
	PodNetwork bool

	// Ready, if any, says why the status must not call the gateway ready though it works, such as
	// that its Source remembers what it delivers. It may be called concurrently.
	Ready func() error

	// Owner, if any, says for the flow log whose an address of this cluster is. It may be called
	// concurrently.
	Owner func(netip.Addr) fabric.Owner

	// Calls, if not nil, is closed when this gateway may call its peers by itself. A handshake moves what
	// a peer sends from the gateway before to this one, so that it is of use when the nodes have moved.
	// What they send until then is called for at once, and peers that call are answered.
	Calls <-chan struct{}

	// Gate, if any, is asked right before each system call that sends to a peer; while it returns false, nothing is sent. It
	// is called concurrently.
	Gate func() bool

	// Begin, if not nil, is closed when this gateway becomes active. Until then it prepares the
	// slow parts: the TUNs, the rules and the kernel's objects. It has no UDP port and no key of a
	// peer, and uses neither Flows nor Beside.
	Begin <-chan struct{}

	// Flows, if not nil, has flows that another gateway had before, which this one adopts before it handles
	// the first packet. It is told the flows of this one.
	Flows *flowsync.Keeper

	// InBand, if not nil, lets managers use the tunnel to the peers that agreed to it.
	InBand *InBand

	// Beside, if any, runs as long as the gateway acts: from when the first Config is in force
	// until its context ends, which is before anything is taken down.
	Beside func(ctx context.Context, r Running)
}

// Running is a gateway that runs. Its methods may be called concurrently, until Options.Beside has
// returned.
type Running struct{ g *gateway }

// Status describes the gateway, without its flows.
func (r Running) Status() Status { return r.g.status(0) }

// Ready says why the gateway carries nothing, or nil.
func (r Running) Ready() error { return r.g.unready() }

// Yield relays what nodes send to peers from now on to the gateways that copy the flows of this one
// (Options.Flows), and no more of it to the peers: another gateway is to be active. What peers send is
// delivered until the end. It returns when nothing is under way to a peer.
func (r Running) Yield() { r.g.yield() }

// StatusHandler answers /status and /trace, as on Config.StatusAddress.
func (r Running) StatusHandler() http.Handler { return r.g.statusHandler() }

// CaptureHandler answers /capture, as at CaptureSocket. The gateway's end ends its answer.
func (r Running) CaptureHandler() http.Handler { return r.g.captureHandler() }

// Gatherer has the gateway's metrics.
func (r Running) Gatherer() prometheus.Gatherer { return r.g.metrics }

// samePeers reports whether both say the same but for where a gateway in a Pod delivers, and where no
// peer's gateway can be.
func (c Config) samePeers(other Config) bool {
	if !slices.EqualFunc(c.Gateway.Peers, other.Gateway.Peers, samePeer) {
		return false
	}
	c.Gateway.Peers, c.Gateway.Site, c.PodNetwork = nil, fabric.Site{}, fabric.PodNetwork{}
	other.Gateway.Peers, other.Gateway.Site, other.PodNetwork = nil, fabric.Site{}, fabric.PodNetwork{}
	return reflect.DeepEqual(c, other)
}
