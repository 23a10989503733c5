package kube

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

func keyText(n byte) string {
	k := [32]byte{8, n, 1}
	return base64.StdEncoding.EncodeToString(publicKey(k))
}

// endpoint returns a valid TunnelEndpoint of peer n. Its pods are remapped to
// 10.(100+n).0.0/20.
func endpoint(n int) v1alpha1.TunnelEndpoint {
	te := v1alpha1.TunnelEndpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "tenants", Name: fmt.Sprintf("peer%d", n), Generation: 3}}
	te.CreationTimestamp = metav1.Unix(int64(1_000+n), 0)
	te.Spec = v1alpha1.TunnelEndpointSpec{
		ClusterIdentity: v1alpha1.ClusterIdentity{ClusterID: fmt.Sprintf("id-%d", n), ClusterName: "peer"},
		LocalPodCIDR:    "10.244.0.0/16", LocalNATPodCIDR: "10.200.0.0/16", LocalExternalCIDR: "10.245.0.0/24", LocalNATExternalCIDR: v1alpha1.None,
		RemotePodCIDR: "10.244.0.0/20", RemoteNATPodCIDR: fmt.Sprintf("10.%d.0.0/20", 100+n), RemoteExternalCIDR: "10.245.0.0/22", RemoteNATExternalCIDR: fmt.Sprintf("10.%d.128.0/22", 100+n),
		EndpointIP: "192.0.2.9", BackendType: "wireguard", BackendConfig: v1alpha1.BackendConfig{"port": "5871", "publicKey": keyText(byte(n))},
	}
	return te
}

func natMapping(n int, entries map[string]string) v1alpha1.NatMapping {
	nm := v1alpha1.NatMapping{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("natmapping-%d", n)}}
	nm.Spec = v1alpha1.NatMappingSpec{ClusterID: fmt.Sprintf("id-%d", n), PodCIDR: fmt.Sprintf("10.%d.0.0/20", 100+n), ExternalCIDR: "10.245.0.0/24", ClusterMappings: entries}
	return nm
}

var self = v1alpha1.ClusterIdentity{ClusterID: "id-self", ClusterName: "self"}

// The addresses of our own cluster do not change the result for a peer. They are added to a
// result that was made without them.
func TestAddingTheSiteLaterChangesNoDecision(t *testing.T) {
	private := [32]byte{8, 200}
	endpoints := []v1alpha1.TunnelEndpoint{endpoint(1), endpoint(2), endpoint(3)}
	endpoints[2].Spec.RemoteNATPodCIDR = endpoints[1].Spec.RemoteNATPodCIDR // peer 3 is refused, because peer 2 has this network
	var in fabric.Intent
	keys := fabric.PublicKeys(private, fabric.MaxTunnels)
	in.ClusterID, in.ClusterName, in.PublicKey, in.FurtherKeys = self.ClusterID, self.ClusterName, keys[0], keys[1:]
	for i := range endpoints {
		peer, wrong := fabric.PeerFrom(&endpoints[i], originOf(&endpoints[i]))
		if len(wrong) > 0 {
			t.Fatal(wrong)
		}
		in.Peers = append(in.Peers, peer)
	}
	for _, in.Site = range []fabric.Site{site, {Networks: site.Networks}, nodesSite([]netip.Addr{netip.MustParseAddr("192.0.2.9")})} {
		want, wantProblems := fabric.GatewayFor(in)
		got, problems := gatewayFor(self, private, in.Site, endpoints, nil)
		if !reflect.DeepEqual(got, want) || !reflect.DeepEqual(problems, wantProblems) || len(got.Peers) != 2 || len(problems) == 0 {
			t.Errorf("at %v:\n%+v\n%v\nwant\n%+v\n%v", in.Site, got, problems, want, wantProblems)
		}
	}
}

func TestOnlyTheInvalidObjectIsLeftOut(t *testing.T) {
	private := [32]byte{8, 200}
	for _, tc := range []struct {
		name   string
		break_ func(te *v1alpha1.TunnelEndpoint, nm *v1alpha1.NatMapping)
		peers  string // IDs of the peers that remain of 1, 2 and 3; object 2 is invalid
		field  string
	}{
		{"nothing", func(*v1alpha1.TunnelEndpoint, *v1alpha1.NatMapping) {}, "id-1 id-2 id-3", ""},
		{"empty NAT field", func(te *v1alpha1.TunnelEndpoint, _ *v1alpha1.NatMapping) { te.Spec.LocalNATPodCIDR = "" }, "id-1 id-3", "spec.localNATPodCIDR"},
		{"another peer's network", func(te *v1alpha1.TunnelEndpoint, _ *v1alpha1.NatMapping) { te.Spec.RemoteNATPodCIDR = "10.101.0.0/20" }, "id-1 id-3", "spec.remoteNATPodCIDR"},
		{"our own key", func(te *v1alpha1.TunnelEndpoint, _ *v1alpha1.NatMapping) {
			te.Spec.BackendConfig["publicKey"] = base64.StdEncoding.EncodeToString(publicKey(private))
		}, "id-1 id-3", "spec.backend_config.publicKey"},
		{"ourselves", func(te *v1alpha1.TunnelEndpoint, _ *v1alpha1.NatMapping) {
			te.Spec.ClusterIdentity.ClusterID = self.ClusterID
		}, "id-1 id-3", "spec.clusterIdentity.clusterID"},
		{"one mapping", func(_ *v1alpha1.TunnelEndpoint, nm *v1alpha1.NatMapping) {
			nm.Spec.ClusterMappings["10.9.9.9"] = "10.1.1.1"
		}, "id-1 id-2 id-3", `spec.clusterMappings["10.9.9.9"]`},
		{"being deleted", func(te *v1alpha1.TunnelEndpoint, _ *v1alpha1.NatMapping) { te.DeletionTimestamp = new(metav1.Now()) }, "id-1 id-3", ""},
	} {
		endpoints := []v1alpha1.TunnelEndpoint{endpoint(3), endpoint(2), endpoint(1)}
		mappings := []v1alpha1.NatMapping{natMapping(1, map[string]string{"10.7.7.7": "10.245.0.9"}), natMapping(2, map[string]string{"10.8.8.8": "10.245.0.7"})}
		tc.break_(&endpoints[1], &mappings[1])
		gw, problems := gatewayFor(self, private, fabric.Site{}, endpoints, mappings)
		var ids []string
		for _, p := range gw.Peers {
			ids = append(ids, p.ID)
			mapped := p.Rules.Endpoints[1:] // the first mapping is the gateway itself
			if p.ID == "id-1" && len(mapped) != 1 {
				t.Errorf("%s: mappings of id-1: %v", tc.name, mapped)
			}
			if p.ID == "id-2" && (len(mapped) != 1 || mapped[0].Real != netip.MustParseAddr("10.8.8.8")) {
				t.Errorf("%s: mappings of id-2: %v", tc.name, mapped)
			}
		}
		if got := strings.Join(ids, " "); got != tc.peers {
			t.Errorf("%s: peers %s, want %s", tc.name, got, tc.peers)
		}
		found := tc.field == "" && len(problems) == 0
		for _, p := range problems {
			found = found || p.Field == tc.field && (p.Origin.Name == "peer2" || p.Origin.Name == "natmapping-2")
		}
		if !found {
			t.Errorf("%s: problems %v, want one about %q", tc.name, problems, tc.field)
		}
	}
}

func TestStatusDescribesThePeersConnection(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 30, 123456789, time.UTC)
	node := netip.MustParseAddr("172.30.1.11")
	report := Report{Interface: "isthmus.host", Index: 7, NextHop: netip.MustParseAddr("169.254.100.1")}
	peer := PeerReport{ID: "id-1", Status: v1alpha1.Connected, Reason: v1alpha1.CauseConnected, Message: "the peer answers", RTT: 7900 * time.Microsecond,
		Endpoint: netip.MustParseAddrPort("192.0.2.9:5871"), PublicKey: "key",
		AllowedIPs: [2]netip.Prefix{netip.MustParsePrefix("10.101.0.0/20"), netip.MustParsePrefix("10.101.128.0/22")}}
	te := endpoint(1)
	first := statusFor(&te, node, report, peer, now)
	c := first.Connection
	if first.GatewayIP != "172.30.1.11" || first.VethIFaceIndex != 7 || first.VethIFaceName != "isthmus.host" || first.VethIP != "169.254.100.1" ||
		c.Status != "Connected" || c.Latency.Value != "7ms" || !c.Latency.Timestamp.Equal(new(metav1.NewTime(now.Truncate(time.Second)))) ||
		!reflect.DeepEqual(c.PeerConfiguration, v1alpha1.PeerConfiguration{"endpointIP": "192.0.2.9", "port": "5871", "publicKey": "key", "allowedIPs": "10.101.0.0/20, 10.101.128.0/22"}) ||
		c.StatusMessage != v1alpha1.ConnectedMessage || len(first.Conditions) != 2 || first.Conditions[1].Type != "Connected" || first.Conditions[1].Status != "True" || first.Conditions[0].Status != "True" || first.Conditions[0].ObservedGeneration != 3 {
		t.Fatalf("first status: %+v", first)
	}
	te.Status = first
	for _, tc := range []struct {
		name    string
		after   time.Duration
		rtt     time.Duration
		latency string
	}{
		{"soon, whatever it is", 29 * time.Second, time.Second, "7ms"},
		{"later and the same", time.Hour, 7 * time.Millisecond, "7ms"},
		{"moved by less than a millisecond", time.Hour, 6100 * time.Microsecond, "7ms"},
		{"moved by less than a fifth", time.Hour, 8300 * time.Microsecond, "7ms"},
		{"moved by more than both", 31 * time.Second, 8600 * time.Microsecond, "8ms"},
		{"below a millisecond", time.Hour, 690 * time.Microsecond, "690\u03bcs"},
		{"the clock was set back", -time.Hour, 20 * time.Millisecond, "20ms"},
	} {
		p := peer
		p.RTT = tc.rtt
		next := statusFor(&te, node, report, p, now.Add(tc.after))
		if next.Connection.Latency.Value != tc.latency {
			t.Errorf("%s: latency %s, want %s", tc.name, next.Connection.Latency.Value, tc.latency)
		}
		if same := reflect.DeepEqual(next, first); same != (tc.latency == "7ms") {
			t.Errorf("%s: same %v", tc.name, same)
		}
	}

	quick := te
	quick.Status.Connection.Latency.Value = "300\u03bcs"
	p := peer
	p.RTT = 1200 * time.Microsecond
	if next := statusFor(&quick, node, report, p, now.Add(time.Hour)); next.Connection.Latency.Value != "300\u03bcs" {
		t.Errorf("on a near peer: latency %s, which is noise", next.Connection.Latency.Value)
	}

	// A gateway that has just taken over has no result of its own for the peer yet.
	fresh := peer
	fresh.Status, fresh.Reason, fresh.Message, fresh.RTT = v1alpha1.Connecting, v1alpha1.CauseConnecting, "waiting", 0
	if next := statusFor(&te, netip.MustParseAddr("172.30.1.12"), report, fresh, now); next.GatewayIP != "172.30.1.12" ||
		!reflect.DeepEqual(next.Connection, first.Connection) || !reflect.DeepEqual(next.Conditions, first.Conditions) {
		t.Errorf("after a takeover: %+v", next)
	}
	changed := te
	changed.Generation++
	if next := statusFor(&changed, node, report, fresh, now); next.Connection.Status != v1alpha1.Connecting || next.Conditions[1].Reason != v1alpha1.CauseConnecting {
		t.Errorf("of another configuration: %+v", next)
	}

	lost := peer
	lost.Reason = v1alpha1.CauseEndpointName
	lost.Status, lost.Message, lost.RTT, lost.Endpoint = v1alpha1.ConnectionError, "resolving gw.example: no such host", 0, netip.AddrPort{}
	lostStatus := statusFor(&te, node, report, lost, now)
	if l := lostStatus.Connection.Latency; l.Value != "N/A" || l.Timestamp != nil || lostStatus.Connection.PeerConfiguration["endpointIP"] != "" {
		t.Errorf("lost: %+v", lostStatus.Connection)
	}
	lost.Message = "resolving gw.example: i/o timeout"
	stored := te
	stored.Status = lostStatus
	other := statusFor(&stored, node, report, lost, now)
	lost.Reason = v1alpha1.CauseNoAnswer
	third := statusFor(&stored, node, report, lost, now)
	if mayWait(lostStatus, other) != messageInterval || mayWait(other, third) != reasonInterval || mayWait(lostStatus, first) != 0 {
		t.Errorf("another message may wait %v, another reason %v, another state %v", mayWait(lostStatus, other), mayWait(other, third), mayWait(lostStatus, first))
	}
	if c := meta.FindStatusCondition(third.Conditions, v1alpha1.ConditionConnected); c == nil || c.Status != metav1.ConditionFalse ||
		c.Reason != v1alpha1.CauseNoAnswer || c.Message != lost.Message || c.Message != third.Connection.StatusMessage {
		t.Errorf("the condition %+v of %+v", c, third.Connection)
	}

	half := peer
	half.Reason, half.Message = v1alpha1.CauseNotApplied, strings.Repeat("no such device; ", 1000)
	fourth := statusFor(&stored, node, report, half, now)
	if c := meta.FindStatusCondition(fourth.Conditions, v1alpha1.ConditionConnected); fourth.Connection.Status != v1alpha1.Connected ||
		c.Reason != v1alpha1.CauseNotApplied || c.Message != fourth.Connection.StatusMessage || len(c.Message) > 4096 {
		t.Errorf("connected, and something lacks: the condition %+v of %+v", c, fourth.Connection)
	}

	refused := refusedStatus(&te, []fabric.Problem{{Field: "spec.endpointIP", Message: "is wrong"}, {Message: strings.Repeat("é", 20_000)}})
	if c := refused.Connection; c.Status != "Error" || !strings.HasPrefix(c.StatusMessage, "spec.endpointIP: is wrong; é") || len(c.StatusMessage) > 32768 || c.PeerConfiguration != nil {
		t.Errorf("refused: %+v", refused)
	}
	if refused.Conditions[0].Status != "False" || refused.Conditions[0].Reason != "Invalid" || refused.GatewayIP != "172.30.1.11" {
		t.Errorf("refused: %+v", refused)
	}
}

func TestOneLateAnswerBarelyChangesTheLatency(t *testing.T) {
	rtt := 2 * time.Millisecond
	if got := smooth(rtt, 8*time.Millisecond); got != 2750*time.Microsecond {
		t.Errorf("one late answer: %v", got)
	}
	for range 60 {
		rtt = smooth(rtt, 8*time.Millisecond)
	}
	if rtt < 7900*time.Microsecond {
		t.Errorf("sixty late answers: %v", rtt)
	}
	if smooth(0, 5) != 5 || smooth(5, 0) != 0 {
		t.Error("begin and end")
	}
}

func TestStandbyTakesTheLeaseOnlyAfterItExpires(t *testing.T) {
	seen := time.Unix(1000, 0)
	lease := func(holder string, seconds int32) *coordinationv1.Lease {
		return &coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds}}
	}
	for _, tc := range []struct {
		name  string
		lease *coordinationv1.Lease
		after time.Duration
		wait  time.Duration
	}{
		{"there is none", nil, 0, 0},
		{"nobody's", lease("", 7), 0, 0},
		{"no holder at all", &coordinationv1.Lease{}, 0, 0},
		{"ours, however old", lease("me", 7), time.Hour, 0},
		{"another's", lease("you", 7), 2 * time.Second, 5 * time.Second},
		{"another's, expired", lease("you", 7), 7 * time.Second, 0},
		{"another's, which lasts longer", lease("you", 15), 7 * time.Second, 8 * time.Second},
		{"another's, with nonsense", lease("you", -1), 2 * time.Second, 5 * time.Second},
	} {
		if got := standDown(tc.lease, "me", seen, seen.Add(tc.after)); got != tc.wait {
			t.Errorf("%s: wait %v, want %v", tc.name, got, tc.wait)
		}
	}
	taken := withHolder(lease("you", 15), "me", seen)
	if holderOf(taken) != "me" || *taken.Spec.LeaseTransitions != 1 || *taken.Spec.LeaseDurationSeconds != 7 {
		t.Errorf("taken: %+v", taken.Spec)
	}
	renewed := withHolder(taken, "me", seen.Add(time.Second))
	if *renewed.Spec.LeaseTransitions != 1 || !renewed.Spec.AcquireTime.Equal(taken.Spec.AcquireTime) || renewed.Spec.RenewTime.Equal(taken.Spec.RenewTime) {
		t.Errorf("renewed: %+v", renewed.Spec)
	}
}

// After a gap in its contact to the API server, a standby counts the age of the Lease from zero,
// because the holder may have been unable to renew the Lease, too.
func TestLeaseAgeExcludesAPIServerOutages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // time passes only where the test moves it
		e := &election{identity: "me", log: quiet, changed: newSignal(), leaseChanged: newSignal()}
		holder := "you"
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder}}
		e.reached(nil)
		e.observe(lease, time.Now())
		long := time.Now().Add(-time.Hour)
		e.firstSeen = long
		e.reached(nil)
		e.observe(lease, time.Now())
		if e.firstSeen != long {
			t.Error("with contact, the Lease has aged")
		}
		e.last = time.Now().Add(-contactGap - time.Millisecond)
		e.reached(nil)
		e.observe(lease, time.Now())
		if wait := standDown(lease, "me", e.firstSeen, time.Now()); wait < leaseDuration-time.Second {
			t.Errorf("after a gap: wait %v", wait)
		}
	})
}

func TestKeySecretIsWrittenAndParsed(t *testing.T) {
	private := keyring.New()
	good := keySecret("ns", ringOf(private), 1, noon)
	if good.Labels["app.kubernetes.io/managed-by"] != "isthmus" {
		t.Errorf("uninstall does not know it as ours by %v", good.Labels)
	}
	if _, ok := good.Data["tunnels"]; ok {
		t.Error("a gateway with one tunnel tells of others")
	}
	further := fabric.PublicKeys(private, 3)[1:]
	want := base64.StdEncoding.EncodeToString(further[0][:]) + "," + base64.StdEncoding.EncodeToString(further[1][:])
	if got := string(keySecret("ns", ringOf(private), 3, noon).Data["tunnels"]); got != want {
		t.Errorf("tunnels %s, want %s", got, want)
	}
	text := func(b []byte) []byte { return []byte(base64.StdEncoding.EncodeToString(b)) }
	other := keyring.New()
	for _, tc := range []struct {
		name         string
		data         map[string][]byte
		usable       bool
		field, words string
	}{
		{"as made", good.Data, true, "", ""},
		{"empty", nil, false, "data.privateKey", "is absent"},
		{"raw bytes", map[string][]byte{"privateKey": private[:]}, false, "data.privateKey", "is not base64"},
		{"too short", map[string][]byte{"privateKey": text(private[:31])}, false, "data.privateKey", "has 31 bytes"},
		{"all zero", map[string][]byte{"privateKey": text(make([]byte, 32))}, false, "data.privateKey", "is all zero"},
		{"no public key", map[string][]byte{"privateKey": text(private[:])}, true, "data.publicKey", "is absent"},
		{"another public key", map[string][]byte{"privateKey": text(private[:]), "publicKey": text(publicKey(other))}, true, "data.publicKey", "does not belong to data.privateKey"},
	} {
		got, problems, err := keyFrom(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: keyring.SecretName}, Data: tc.data})
		if (err == nil) != tc.usable || tc.usable && got.Private != private {
			t.Errorf("%s: %v, %v", tc.name, got, err)
		}
		logged := ""
		if err != nil {
			logged = err.Error()
		}
		for _, p := range problems {
			logged += p.Error()
		}
		if !strings.Contains(logged, tc.field) || !strings.Contains(logged, tc.words) || (logged == "") != (tc.field == "") {
			t.Errorf("%s: said %q", tc.name, logged)
		}
		if logged != "" && !strings.HasPrefix(logged, "Secret ns/wireguard-pubkey: ") || strings.Contains(logged, base64.StdEncoding.EncodeToString(private[:])) {
			t.Errorf("%s: said %q, which does not name the Secret or tells the key", tc.name, logged)
		}
	}
}

func TestSignalsCloseTogetherAreMerged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s, urgent, looks := newSignal(), newSignal(), make(chan time.Time, 100)
		go s.coalesce(ctx, urgent, func() { looks <- time.Now() })
		begin := time.Now()
		for time.Since(begin) < 100*time.Millisecond {
			s.set()
			time.Sleep(2 * time.Millisecond)
		}
		if at := (<-looks).Sub(begin); at < 100*time.Millisecond || at > 100*time.Millisecond+coalesceQuiet {
			t.Errorf("looked after %v", at)
		}
		time.Sleep(10 * coalesceQuiet)
		if n := len(looks); n > 0 {
			t.Errorf("fifty signals made it look %d times more", n)
		}
		urgent.set()
		time.Sleep(time.Millisecond)
		urgent.set()
		begin = time.Now()
		if first, second := <-looks, <-looks; first.After(begin) || second.Sub(first) != coalesceQuiet {
			t.Errorf("looked for what is urgent %v late, and %v apart", first.Sub(begin), second.Sub(first))
		}
		time.Sleep(coalesceQuiet)
		s.set()
		time.Sleep(time.Millisecond)
		begin = time.Now()
		urgent.set()
		if at := (<-looks).Sub(begin); at != 0 {
			t.Errorf("looked for what is urgent after %v, with something else under way", at)
		}
		begin = time.Now()
		go func() {
			for ctx.Err() == nil {
				s.set()
				time.Sleep(time.Millisecond)
			}
		}()
		if at := (<-looks).Sub(begin); at > coalesceLimit+time.Millisecond {
			t.Errorf("under constant change looked after %v", at)
		}
		cancel()
		time.Sleep(time.Second) // let the other goroutines end
	})
}

// Each Node reports every few minutes that it is ready. This package does not read these
// fields.
func TestChangesOfUnreadFieldsAreIgnored(t *testing.T) {
	node := func(version, address string, ready corev1.ConditionStatus) any {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", ResourceVersion: version}, Status: corev1.NodeStatus{
			Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready, LastHeartbeatTime: metav1.Now()}},
		}}
		slim, err := slimNode(n)
		if err != nil {
			t.Fatal(err)
		}
		return slim
	}
	before := node("1", "192.0.2.1", corev1.ConditionTrue)
	if !sameButVersion(before, node("2", "192.0.2.1", corev1.ConditionFalse)) {
		t.Error("a heartbeat is a change")
	}
	if sameButVersion(before, node("2", "192.0.2.2", corev1.ConditionTrue)) {
		t.Error("another address is no change")
	}
	if before.(*corev1.Node).ResourceVersion != "1" {
		t.Error("the cache's own object was changed")
	}
}

// ringOf returns the ring of a key that is not being rotated.
func ringOf(private [32]byte) keyring.Ring { return keyring.Ring{Private: private, Gateways: private} }
