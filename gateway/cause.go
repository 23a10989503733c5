package gateway

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
)

// A Cause explains why a peer is connected or not. It consists of a word from a closed list
// (v1alpha1.Causes) and a sentence with the observation and the remedy. Status, metrics,
// TunnelEndpoint and Peering show the same Cause.
type Cause struct {
	Reason string
	Text   string
}

// An observation that is older than these ages is not evidence.
const (
	// packetAge applies to events that a live peer causes every two seconds, such as PINGs.
	packetAge = 6 * time.Second
	// handshakeAge applies to events that an unconnected peer causes every five seconds, such as
	// handshakes. While many peers have no session, handshakes with each of them are rarer
	// (gateway/check/away.go).
	handshakeAge = 20 * time.Second
)

// evidence holds the observations of one peer that determine its Cause.
type evidence struct {
	now        time.Time
	check      check.Result
	endpoint   netip.AddrPort // current endpoint of the peer; zero: none yet
	hidden     bool           // endpoint is the address of a node that forwards messages for our Service, so the peer's own address is hidden
	configured string         // endpoint in the configuration
	unresolved error          // reason why the address of the configured endpoint is unknown or outdated; nil: it is current
	failed     error          // error of applying the configuration of this peer, or configuration that concerns all peers; nil: none
	handshake  time.Time      // when the present session was made; zero: never
	heard      time.Time      // when the last authentic message arrived; zero: never
	signs      datapath.Signs
	alone      bool // every other peer answers
	// source and destination are the times when packets from the peer were last dropped because of
	// their source or their destination address.
	source, destination time.Time
	remote, local       ranges
}

// ranges holds the two networks of a cluster that appear in the text of a Cause.
type ranges struct{ pods, external netip.Prefix }

func (n ranges) String() string { return fmt.Sprintf("%v and %v", n.pods, n.external) }

// recent reports whether an event happened at most limit ago. A zero time is never recent.
func (e *evidence) recent(event time.Time, limit time.Duration) bool {
	return !event.IsZero() && e.now.Sub(event) <= limit
}

// cause returns the Cause that fits the evidence. If several fit, it returns the first in the order
// of the cases.
func (e *evidence) cause() Cause {
	const compare = "; compare the TunnelEndpoints of both clusters"
	sentTo := e.configured
	if e.endpoint.IsValid() {
		sentTo = e.endpoint.String()
	}
	source := sentTo
	if e.hidden {
		source = e.configured + " (our Service hides the source address of its packets)"
	}
	connected := e.recent(e.heard, packetAge) // messages arrive in a session, so failed handshakes explain nothing
	// If PINGs arrive, the clusters agree about addresses. Then packets that were dropped because
	// of their address come only from individual pods, and are not the reason for missing answers.
	agreed := e.recent(e.check.Asked, packetAge)
	switch {
	case e.failed != nil:
		return Cause{v1alpha1.CauseNotApplied, fmt.Sprintf("the kernel of this gateway refuses a part of the peer's configuration (retried every second): %s", strings.Join(texts(e.failed), "; "))}
	case e.check.State == check.Connected && e.check.Unasked(e.now) && e.recent(e.source, packetAge):
		return Cause{v1alpha1.CauseRangesDisagree, fmt.Sprintf("the peer answers, but its packets from addresses outside %v (its networks in this cluster) "+
			"are dropped (source), including its connection check; the two clusters disagree about the peer's PodCIDR%s", e.remote, compare)}
	case e.check.State == check.Connected && e.check.Path.State == check.PathError:
		return Cause{v1alpha1.CausePathMTU, fmt.Sprintf("the peer answers, but packets of %d octets do not arrive at %s, and no ICMP error comes back; every path should carry packets of this size, "+
			"which is %d octets with WireGuard and outer headers; repair the link that drops them", e.check.Path.Bytes, source, e.check.Path.Bytes+overheadTo(e.endpoint.Addr()))}
	case e.check.State == check.Connected && e.check.Path.Narrow():
		return Cause{v1alpha1.CauseNarrowPath, fmt.Sprintf("the peer answers, but the path to it drops larger packets silently, so this gateway sends packets of at most %d octets instead of %d; "+
			"allow ICMP \"fragmentation needed\" and \"packet too big\" on the path, or repair the link", e.check.Path.Bytes, e.check.Path.Ceiling)}
	case e.check.State == check.Connected:
		return Cause{v1alpha1.CauseConnected, "the peer answers"}
	case !e.endpoint.IsValid() && e.unresolved != nil:
		return Cause{v1alpha1.CauseEndpointName, fmt.Sprintf("%v; correct the DNS record, or the peer's endpoint", e.unresolved)}
	case e.check.State == check.Connecting:
		return Cause{v1alpha1.CauseConnecting, fmt.Sprintf("waiting for the first answer of %s", source)}
	case e.signs.Unsent != nil && e.recent(e.signs.UnsentAt, handshakeAge):
		return Cause{v1alpha1.CauseSendError, fmt.Sprintf("the kernel of this gateway cannot send to %s: %s; %s", sentTo, kernelText(e.signs.Unsent), sendRemedy(e.signs.Unsent))}
	case !connected && e.recent(e.signs.OtherKey, handshakeAge):
		return Cause{v1alpha1.CauseWrongKey, fmt.Sprintf("handshakes from %s are for another public key than this gateway's: the peer has an old or wrong key of this cluster; "+
			"compare it with the key in `isthmus status --gateway -o wide` here", source)}
	case !connected && e.recent(e.signs.Refused, handshakeAge):
		return Cause{v1alpha1.CauseWrongKey, fmt.Sprintf("handshakes from %s are for this gateway's key, but not from the peer's key that is configured here: "+
			"this cluster has an old or wrong key of the peer, or the peer's clock was set back", source)}
	// An answer that we sent within a second of the session's creation may be the one that made the
	// session. So it is no evidence of a lost answer.
	case e.recent(e.signs.Answered, handshakeAge) && e.signs.Answered.Sub(e.handshake) > time.Second:
		return Cause{v1alpha1.CauseAnswersLost, fmt.Sprintf("handshakes of the peer arrive, but our answers do not arrive at %s: a firewall of this cluster or of the peer drops UDP in that direction", source)}
	case !connected && e.alone && e.recent(e.signs.RelayedOtherKey, handshakeAge):
		return Cause{v1alpha1.CauseWrongKey, fmt.Sprintf("nothing comes from %s, but our Service delivers handshakes for another public key than this gateway's, and hides their source "+
			"(externalTrafficPolicy: Local shows it): if they are from this peer, it has an old or wrong key of this cluster; compare it with the key in `isthmus status --gateway -o wide` here", source)}
	case !connected && e.alone && e.recent(e.signs.RelayedRefused, handshakeAge):
		return Cause{v1alpha1.CauseWrongKey, fmt.Sprintf("nothing comes from %s, but our Service delivers handshakes that this gateway refuses, because no peer here has their key or the sender's clock was set back, "+
			"and hides their source (externalTrafficPolicy: Local shows it): if they are from this peer, this cluster has an old or wrong key of the peer, or the peer's clock was set back", source)}
	case e.handshake.IsZero() && e.heard.IsZero() && e.recent(e.signs.Earlier, handshakeAge):
		return Cause{v1alpha1.CauseNoAnswer, fmt.Sprintf("our handshakes are not answered, but messages of an earlier session come from %s: the peer runs and still uses that session; "+
			"either its key here is wrong, or our packets do not arrive; its next handshake, within half a minute, shows which", source)}
	case e.handshake.IsZero() && e.heard.IsZero():
		return Cause{v1alpha1.CauseNoAnswer, fmt.Sprintf("nothing has ever come from %s: its gateway does not run, the address or port is wrong, or a firewall drops UDP on the path; "+
			"allow UDP to that port in both clusters%s", source, e.relayedHint())}
	case !connected:
		return Cause{v1alpha1.CausePeerSilent, fmt.Sprintf("nothing has come from %s%s: its gateway has stopped, or a firewall has dropped UDP on the path since then%s", source, e.sinceHeard(), e.relayedHint())}
	case !agreed && e.recent(e.source, packetAge):
		return Cause{v1alpha1.CauseRangesDisagree, fmt.Sprintf("the peer sends from addresses outside %v (its networks in this cluster), so its packets are dropped (source): "+
			"the two clusters disagree about the peer's networks%s", e.remote, compare)}
	case !agreed && e.recent(e.destination, packetAge):
		return Cause{v1alpha1.CauseRangesDisagree, fmt.Sprintf("the peer sends to addresses outside %v (the networks that it should use for this cluster), so its packets are dropped (destination): "+
			"the two clusters disagree about this cluster's networks%s", e.local, compare)}
	}
	return Cause{v1alpha1.CauseProbeUnanswered, "unanswered: messages of the peer arrive, but no answer to the connection check: our packets may be lost on the path, or dropped by the peer; " +
		"check there what arrives and what is dropped (source, destination): `isthmus status --gateway`, or the log of Liqo's gateway if the peer is a Liqo"}
}

// relayedHint returns a second explanation to append to a message, or an empty string. If
// handshakes with a wrong key arrive through a Service, any of the unconnected peers may have sent
// them.
func (e *evidence) relayedHint() string {
	if !e.recent(e.signs.RelayedOtherKey, handshakeAge) && !e.recent(e.signs.RelayedRefused, handshakeAge) {
		return ""
	}
	return "; or the handshakes with a wrong key that arrive through our Service, which hides their source, are from this peer (externalTrafficPolicy: Local shows the source)"
}

func (e *evidence) sinceHeard() string {
	if e.heard.IsZero() {
		return ""
	}
	return " since " + e.heard.UTC().Format("15:04:05") + " UTC"
}

// kernelText returns the kernel's text for an error, without the context that Go adds.
func kernelText(err error) string {
	if no := unix.Errno(0); errors.As(err, &no) {
		return no.Error()
	}
	return err.Error()
}

// sendRemedy returns advice for an error that the kernel returned when a message was sent.
func sendRemedy(err error) string {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return "a packet filter rule of this host refuses it: allow outgoing UDP"
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETDOWN):
		return "add a route to that address on this host, or set the link up"
	case errors.Is(err, unix.EMSGSIZE):
		return "the path MTU is below the tunnel's MTU: set a smaller MTU"
	}
	return "run `ip route get` for that address on this host"
}

// failedOf returns the errors that concern the peer id: those that name this peer, and those that
// name no peer.
func failedOf(id string, failed error) error {
	var matching []error
	for _, e := range unjoin(failed) {
		if e != nil && (!strings.HasPrefix(e.Error(), "peer ") || strings.HasPrefix(e.Error(), "peer "+id+":")) {
			matching = append(matching, e)
		}
	}
	return errors.Join(matching...)
}

// hidden reports whether an endpoint is the address of a node that forwards messages for our
// Service. Such a node hides the peer's own address.
func (g *gateway) hidden(endpoint netip.AddrPort) bool {
	return endpoint.IsValid() && g.resolver.relaysFrom(endpoint.Addr())
}

// causeOf collects the evidence about a peer and returns the Cause of its state.
func (g *gateway) causeOf(v *view, failed error, now time.Time) Cause {
	first := v.primary()
	e := evidence{
		now: now, check: first.check, endpoint: first.stats.Endpoint, hidden: g.hidden(first.stats.Endpoint), configured: hostPort(v.Endpoint, v.Port), unresolved: v.unresolved,
		failed: failedOf(v.ID, failed), handshake: first.stats.Handshake, heard: v.lastHeard(), alone: v.alone,
		remote: ranges{v.Remote.PodSeen, v.Remote.ExternalSeen}, local: ranges{v.Local.PodSeen, v.Local.ExternalSeen},
	}
	if v.state != nil {
		e.signs = g.tunnels[0].Signs(v.state)
		e.source = g.drops.lastIncrease(v.state, natengine.Inbound, natengine.DropSource)
		e.destination = g.drops.lastIncrease(v.state, natengine.Inbound, natengine.DropDestination)
		if m := g.drops.lastIncrease(v.state, natengine.Inbound, natengine.DropNoMapping); m.After(e.destination) {
			e.destination = m
		}
	}
	return e.cause()
}
