package kube

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// A Report is the state of a running gateway and its peers.
type Report struct {
	Interface string     // interface on the gateway's node that routes into the gateway
	Index     int        // index of that interface
	NextHop   netip.Addr // next hop behind that interface
	Peers     []PeerReport
	Rotation  Rotation
}

// PeerReport is the state of one peer in a running gateway.
type PeerReport struct {
	ID         string
	Status     v1alpha1.ConnectionStatus
	Reason     string         // one of v1alpha1.Causes
	Message    string         // explains Reason in a sentence
	RTT        time.Duration  // round-trip time of the last answer; 0: not connected
	Endpoint   netip.AddrPort // resolved address of the configured endpoint; zero: none yet
	PublicKey  string
	AllowedIPs [2]netip.Prefix
	Preshared  string // ID of the exchange whose preshared key protects all sessions; empty: some session is without one
	OwnKey     string // our public key in the session; empty: no session
}

// Reasons of the condition Accepted on a TunnelEndpoint.
const (
	ReasonConfigured = "Configured" // True: the gateway applies the object
	ReasonInvalid    = v1alpha1.ReasonInvalid
)

// The first latency is written when the connection is established. Later ones are written at most
// once per latencyInterval, and only if the latency has changed by more than a fifth and by at
// least latencyStep. So the stored value is off by at most a fifth or latencyStep, and a stable
// latency causes no writes.
const (
	latencyInterval = 30 * time.Second
	latencyStep     = time.Millisecond

	// messageInterval is the minimum time between two writes if only a message has changed, such as
	// the error of a DNS resolver. reasonInterval is that minimum if a reason has changed. Without
	// it, a peer could cause frequent writes by its packets.
	messageInterval = 30 * time.Second
	reasonInterval  = 10 * time.Second

	// maxMessage bounds the message about a connection, in octets.
	maxMessage = 4096
)

func (w *writer) statuses(ctx context.Context, report Report) {
	var endpoints v1alpha1.TunnelEndpointList
	if err := w.objects.List(ctx, &endpoints, client.UnsafeDisableDeepCopy); err != nil {
		w.log.Error("cannot list TunnelEndpoints", "error", err)
		return
	}
	w.mu.Lock()
	desired := w.desired
	w.mu.Unlock()
	problems := make(map[fabric.Origin][]fabric.Problem)
	for _, p := range desired.snapshot.Problems {
		problems[p.Origin] = append(problems[p.Origin], p)
	}
	chosen := make(map[fabric.Origin]bool)
	for _, p := range desired.snapshot.Gateway.Peers {
		chosen[p.Origin] = true
	}
	peers := make(map[string]PeerReport, len(report.Peers))
	for _, p := range report.Peers {
		peers[p.ID] = p
	}

	for i := range endpoints.Items {
		if ctx.Err() != nil {
			return
		}
		have := &endpoints.Items[i]
		m, now, origin := w.memoryOf(have), time.Now(), originOf(have)
		peer, known := peers[have.Spec.ClusterIdentity.ClusterID]
		if known && chosen[origin] {
			m.rtt = smooth(m.rtt, peer.RTT)
			peer.RTT = m.rtt
		}
		var status v1alpha1.TunnelEndpointStatus
		switch {
		case !have.DeletionTimestamp.IsZero():
			continue
		case len(problems[origin]) > 0:
			status = refusedStatus(have, problems[origin])
		case known && chosen[origin]:
			inputs := statusInputsOf(have, report, peer)
			if m.statusInputs == inputs && (peer.Status != v1alpha1.Connected || !outdated(have.Status.Connection.Latency, peer.RTT, now)) {
				continue
			}
			status, m.statusInputs = statusFor(have, w.o.PodIP, report, peer, now), inputs
		default:
			continue // the object is newer than the Snapshot or the report; the next round handles it
		}
		w.writeStatus(ctx, have, status, now)
	}
}

// writeStatus patches the status of a TunnelEndpoint if the stored status would change. Liqo's
// CRD has no status.conditions for TunnelEndpoints, so the API server drops conditions. Then a
// patch that changes only conditions changes nothing, not even the resourceVersion.
func (w *writer) writeStatus(ctx context.Context, have *v1alpha1.TunnelEndpoint, status v1alpha1.TunnelEndpointStatus, now time.Time) {
	m, stored := w.memoryOf(have), status
	if m.pruned {
		stored.Conditions = have.Status.Conditions
	}
	if equality.Semantic.DeepEqual(have.Status, stored) {
		return
	}
	m.statusInputs = statusInputs{} // unknown until the stored status is right
	if !m.due(have, now) || now.Sub(m.written) < mayWait(have.Status, stored) {
		return
	}
	want := have.DeepCopy()
	want.Status = status
	if !w.patch(ctx, "TunnelEndpoint", have, want, true) {
		return
	}
	m.pruned = len(status.Conditions) > 0 && len(want.Status.Conditions) == 0
	if m.pruned && want.ResourceVersion == have.ResourceVersion {
		m.version = "" // the patch changed nothing, so the cached object is the newest
	}
}

// statusInputs has all inputs of a TunnelEndpoint's status except the latency. If they are
// unchanged, the stored status need not be compared. With thousands of peers, this saves time in
// each round, once a second.
type statusInputs struct {
	version string
	iface   string
	index   int
	nextHop netip.Addr
	peer    PeerReport // its RTT is always 0
}

func statusInputsOf(te *v1alpha1.TunnelEndpoint, r Report, p PeerReport) statusInputs {
	p.RTT = 0
	return statusInputs{te.ResourceVersion, r.Interface, r.Index, r.NextHop, p}
}

// refusedStatus returns the status of an invalid TunnelEndpoint. The gateway has no such peer,
// but the status keeps the location of the gateway.
func refusedStatus(te *v1alpha1.TunnelEndpoint, problems []fabric.Problem) v1alpha1.TunnelEndpointStatus {
	lines := make([]string, len(problems))
	for i, p := range problems {
		lines[i] = strings.TrimPrefix(p.Field+": "+p.Message, ": ")
	}
	message := cut(strings.Join(lines, "; "), 32768)
	want := *te.Status.DeepCopy()
	want.Connection = v1alpha1.Connection{
		Status: v1alpha1.ConnectionError, StatusMessage: message,
		Latency: v1alpha1.ConnectionLatency{Value: v1alpha1.LatencyUnknown},
	}
	meta.RemoveStatusCondition(&want.Conditions, v1alpha1.ConditionConnected)
	meta.SetStatusCondition(&want.Conditions, metav1.Condition{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionFalse,
		Reason: ReasonInvalid, Message: message, ObservedGeneration: te.Generation})
	return want
}

// statusFor returns the status for a peer that the gateway has configured (docs/liqo-v0.md,
// sections 2.2 and 8).
func statusFor(te *v1alpha1.TunnelEndpoint, node netip.Addr, r Report, p PeerReport, now time.Time) v1alpha1.TunnelEndpointStatus {
	want := *te.Status.DeepCopy()
	want.GatewayIP = node.String()
	want.VethIFaceName, want.VethIFaceIndex, want.VethIP = r.Interface, r.Index, r.NextHop.String()
	was := te.Status.Connection
	want.Connection = v1alpha1.Connection{
		Status: p.Status, StatusMessage: liqoMessage(p),
		Latency: v1alpha1.ConnectionLatency{Value: v1alpha1.LatencyUnknown},
		PeerConfiguration: v1alpha1.PeerConfiguration{
			v1alpha1.ConfigPublicKey:  p.PublicKey,
			v1alpha1.ConfigAllowedIPs: p.AllowedIPs[0].String() + ", " + p.AllowedIPs[1].String(),
		},
	}
	if p.Endpoint.IsValid() {
		want.Connection.PeerConfiguration[v1alpha1.ConfigEndpointIP] = p.Endpoint.Addr().String()
		want.Connection.PeerConfiguration[v1alpha1.ConfigPort] = strconv.Itoa(int(p.Endpoint.Port()))
	}
	if p.Preshared != "" {
		want.Connection.PeerConfiguration[v1alpha1.ConfigPreshared] = p.Preshared
	}
	if p.OwnKey != "" {
		want.Connection.PeerConfiguration[v1alpha1.ConfigOwnKey] = p.OwnKey
	}
	switch {
	case p.Status != v1alpha1.Connected:
	case was.Status == v1alpha1.Connected && !outdated(was.Latency, p.RTT, now):
		want.Connection.Latency = was.Latency
	default:
		at := metav1.NewTime(now.Truncate(time.Second)) // the stored value has a resolution of one second
		want.Connection.Latency = v1alpha1.ConnectionLatency{Value: latencyText(p.RTT), Timestamp: &at}
	}
	if p.Status == v1alpha1.Connecting && was.Status == v1alpha1.Connected && acceptedCurrent(te) {
		// The previous gateway was connected to this peer with the same configuration. Keep that
		// status until this gateway has checked the peer.
		want.Connection, p.Reason = was, ""
	}
	meta.SetStatusCondition(&want.Conditions, metav1.Condition{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionTrue,
		Reason: ReasonConfigured, Message: "the gateway has applied this object", ObservedGeneration: te.Generation})
	connected := metav1.ConditionFalse
	if v1alpha1.Carries(p.Reason) {
		connected = metav1.ConditionTrue
	}
	if p.Reason == "" {
		return want
	}
	meta.SetStatusCondition(&want.Conditions, metav1.Condition{Type: v1alpha1.ConditionConnected, Status: connected,
		Reason: p.Reason, Message: cut(p.Message, maxMessage), ObservedGeneration: te.Generation})
	return want
}

// acceptedCurrent reports whether the status states that a gateway applies the current generation
// of the object.
func acceptedCurrent(te *v1alpha1.TunnelEndpoint) bool {
	c := meta.FindStatusCondition(te.Status.Conditions, v1alpha1.ConditionAccepted)
	return c != nil && c.Status == metav1.ConditionTrue && c.ObservedGeneration == te.Generation
}

// liqoMessage returns the message for status.connection. Liqo defines this message for some states.
// For all others, it is the message of the condition Connected. The manager compares the status's
// message with the condition's message. A difference means that the condition is stale, because a
// gateway version without this condition writes another message and leaves the condition unchanged.
func liqoMessage(p PeerReport) string {
	switch {
	case p.Status == v1alpha1.Connecting:
		return v1alpha1.ConnectingMessage
	case p.Status == v1alpha1.Connected && (p.Reason == "" || p.Reason == v1alpha1.CauseConnected):
		return v1alpha1.ConnectedMessage
	}
	return cut(p.Message, maxMessage)
}

// smooth returns a moving average of round-trip times, as in RFC 6298, so that one late answer has
// little effect.
func smooth(old, rtt time.Duration) time.Duration {
	if old == 0 || rtt == 0 {
		return rtt
	}
	return old + (rtt-old)/8
}

// outdated reports whether a stored latency has to be replaced.
func outdated(l v1alpha1.ConnectionLatency, rtt time.Duration, now time.Time) bool {
	was, ok := parseLatency(l.Value)
	if !ok || l.Timestamp == nil {
		return true
	}
	age := now.Sub(l.Timestamp.Time)
	if age >= 0 && age < latencyInterval { // a negative age: the clock was set back, so replace the value
		return false
	}
	moved := (rtt - was).Abs()
	return moved >= latencyStep && moved > was/5
}

// latencyText prints a latency as Liqo does: in whole milliseconds, or in whole microseconds if
// it is below one millisecond, with the Greek mu U+03BC.
func latencyText(d time.Duration) string {
	if d < time.Millisecond {
		return fmt.Sprintf("%dμs", d.Microseconds())
	}
	return fmt.Sprintf("%dms", d.Milliseconds())
}

func parseLatency(text string) (time.Duration, bool) {
	d, err := time.ParseDuration(text) // ParseDuration accepts both the Greek mu and the micro sign
	return d, err == nil
}

// mayWait returns the minimum time from the last write until a change from status a to status b is
// written. It is 0 unless only reasons or messages have changed.
func mayWait(a, b v1alpha1.TunnelEndpointStatus) time.Duration {
	without := func(s v1alpha1.TunnelEndpointStatus, reasons bool) v1alpha1.TunnelEndpointStatus {
		s.Connection.StatusMessage = ""
		s.Conditions = slices.Clone(s.Conditions)
		for i := range s.Conditions {
			s.Conditions[i].Message = ""
			if reasons {
				s.Conditions[i].Reason = ""
			}
		}
		return s
	}
	switch {
	case equality.Semantic.DeepEqual(without(a, false), without(b, false)):
		return messageInterval
	case equality.Semantic.DeepEqual(without(a, true), without(b, true)):
		return reasonInterval
	}
	return 0
}

// cut shortens a text to the limit of its field.
func cut(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit-3], "") + "..."
}
