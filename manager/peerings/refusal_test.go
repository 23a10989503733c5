package peerings

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// The cases are all refusals between two clusters, each as both clusters report it. The message has
// the request, the networks in force, and the remedy.
func TestRefusalMessagesNameTheRequestAndTheRemedy(t *testing.T) {
	const (
		requests = "bravo (bbbbbbbb-2222-4222-8222-222222222222) requests in NetworkConfig tenant/alpha-111111: "
		refuses  = "bravo (bbbbbbbb-2222-4222-8222-222222222222) refuses our NetworkConfig tenant/bravo-924e89: "
		who      = "bravo (bbbbbbbb-2222-4222-8222-222222222222)"
		inForce  = "; in force: our podCIDR 10.244.0.0/16 as 10.70.0.0/16, our externalCIDR 10.245.0.0/16 unchanged; "
		stays    = "; in force: its podCIDR 10.244.64.0/18 as 10.246.0.0/18, its externalCIDR 10.60.0.0/18 unchanged; "
	)
	weRefuse := func(reason, problem string) func(*peeringState) {
		return func(s *peeringState) {
			s.copies[0].Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionFalse, Reason: reason, Message: problem}}
		}
	}
	theyRefuse := func(reason, problem string) func(*peeringState) {
		return func(s *peeringState) {
			s.original.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionFalse, Reason: reason, Message: problem}}
		}
	}
	for _, c := range []struct {
		name            string
		change          func(*peeringState)
		which           string // the condition with the message
		reason, message string
	}{
		{"a key that another peer has", func(s *peeringState) {
			weRefuse(v1alpha1.ReasonKeyConflict, "spec.backend_config.publicKey: is the key of another peer")(s)
			s.keyOwner = "charlie (c) has this key, in TunnelEndpoint tenant-c/charlie"
		}, isthmus.ConditionPeerConfig, v1alpha1.ReasonKeyConflict,
			requests + "spec.backend_config.publicKey: is the key of another peer; charlie (c) has this key, in TunnelEndpoint tenant-c/charlie" + stays +
				"bravo has to replace the key of its gateway: isthmus rotate-key --now there, or, if it runs Liqo, delete its Secret wireguard-pubkey and restart its gateway and its network manager"},
		{"a key of low order", weRefuse(v1alpha1.ReasonInvalid, "spec.backend_config.publicKey: is a point of low order"),
			isthmus.ConditionPeerConfig, v1alpha1.ReasonInvalid,
			requests + "spec.backend_config.publicKey: is a point of low order" + stays + "bravo has to correct that field; to end the peering, run isthmus unpeer here"},
		{"a claim that takes something new", func(s *peeringState) {
			weRefuse(v1alpha1.ReasonConsent, "spec.podCIDR: is 8.0.0.0/12 now")(s)
			s.copies[0].Spec.PodCIDR, s.copies[0].Status.Processed = "8.0.0.0/12", false
			s.translations = [2]ipam.Translation{
				{Claim: netip.MustParsePrefix("8.0.0.0/12"), Here: netip.MustParsePrefix("10.0.0.0/12"), Why: "it is not private"},
				{Claim: netip.MustParsePrefix("10.60.0.0/18"), Here: netip.MustParsePrefix("10.60.0.0/18"), Why: "it is private"},
			}
		}, isthmus.ConditionPeerConfig, v1alpha1.ReasonConsent,
			requests + "spec.podCIDR 8.0.0.0/12 (until now 10.244.64.0/18), which this cluster would use as 10.0.0.0/12, because it is not private" + stays +
				"to agree: isthmus peer here --consent 8.0.0.0/12,10.60.0.0/18"},
		{"an endpoint where none can be", weRefuse(v1alpha1.ReasonEndpoint, "spec.endpointIP: 10.244.1.1 is inside our PodCIDR"),
			isthmus.ConditionPeerConfig, v1alpha1.ReasonEndpoint,
			requests + "spec.endpointIP: 10.244.1.1 is inside our PodCIDR" + stays +
				"bravo has to publish another address: annotation liqo.io/override-address of its gateway's Service, or spec.overrides.address of its Peering with us"},
		{"no room", func(s *peeringState) {
			weRefuse(v1alpha1.ReasonExhausted, "spec.podCIDR: no /16 is free")(s)
			s.endpoint = nil
		}, isthmus.ConditionPeerConfig, v1alpha1.ReasonExhausted,
			requests + "spec.podCIDR: no /16 is free; no networks are in force; enlarge the pools (isthmus manager --pools), set spec.overrides of Peering here, or un-peer another cluster"},
		{"a wanted network that is taken", func(s *peeringState) {
			weRefuse(v1alpha1.ReasonCIDRConflict, "spec.overrides.podCIDR: overlaps")(s)
			s.endpoint, s.allocation = nil, ipam.Allocation{Pod: netip.MustParsePrefix("10.9.0.0/18"), External: netip.MustParsePrefix("10.8.0.0/20")}
		}, isthmus.ConditionPeerConfig, v1alpha1.ReasonCIDRConflict,
			requests + "spec.overrides.podCIDR: overlaps; no networks are in force; 10.9.0.0/18 and 10.8.0.0/20 are reserved for it here; " +
				"correct spec.overrides of Peering here, or reserve the network (isthmus manager --reserved)"},
		{"two NetworkConfigs", func(s *peeringState) { s.copies = append(s.copies, s.copies[0]) }, isthmus.ConditionPeerConfig, isthmus.ReasonAmbiguous,
			who + " has more than one NetworkConfig in namespace tenant" + stays + "delete all but one of them"},
		{"a peer that went", func(s *peeringState) { s.copies[0].DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }, isthmus.ConditionPeerConfig, isthmus.ReasonPeerWithdrew,
			who + " has deleted its NetworkConfig in namespace tenant: it un-peered, or its tenant namespace was deleted; run isthmus unpeer here, or isthmus peer for both clusters"},

		{"our key is another's there", theyRefuse(v1alpha1.ReasonKeyConflict, "spec.backend_config.publicKey: is the key of another peer of the receiver"),
			isthmus.ConditionAnswered, v1alpha1.ReasonKeyConflict,
			refuses + "spec.backend_config.publicKey: is the key of another peer of the receiver" + inForce +
				"replace the key of our gateway (isthmus rotate-key --now), or at bravo un-peer the cluster that has the same key"},
		{"our claim needs consent", theyRefuse(v1alpha1.ReasonConsent, "spec.podCIDR: is 10.244.0.0/16 now"), isthmus.ConditionAnswered, v1alpha1.ReasonConsent,
			refuses + "spec.podCIDR: is 10.244.0.0/16 now" + inForce + "an administrator of bravo has to agree: isthmus peer alpha --consent 10.244.0.0/16,10.245.0.0/16"},
		{"our endpoint is refused", theyRefuse(v1alpha1.ReasonEndpoint, "spec.endpointIP: is a node"), isthmus.ConditionAnswered, v1alpha1.ReasonEndpoint,
			refuses + "spec.endpointIP: is a node" + inForce +
				"publish another address: annotation liqo.io/override-address of our gateway's Service, or spec.overrides.address of Peering here"},
		{"no room there", theyRefuse(v1alpha1.ReasonExhausted, "spec.podCIDR: none is free"), isthmus.ConditionAnswered, v1alpha1.ReasonExhausted,
			refuses + "spec.podCIDR: none is free" + inForce + "bravo has to enlarge its pools (isthmus manager --pools), or to un-peer another cluster"},
		{"a conflict there", theyRefuse(v1alpha1.ReasonCIDRConflict, "spec.podCIDR: a gateway is in there"), isthmus.ConditionAnswered, v1alpha1.ReasonCIDRConflict,
			refuses + "spec.podCIDR: a gateway is in there" + inForce +
				"bravo has to correct spec.overrides of its Peering with us, or to reserve the network (isthmus manager --reserved)"},
		{"nobody there wants us", theyRefuse(v1alpha1.ReasonNotPeered, "no Peering here is for cluster x and namespace y"), isthmus.ConditionAnswered, v1alpha1.ReasonNotPeered,
			refuses + "no Peering here is for cluster x and namespace y" + inForce + "run isthmus peer for both clusters, or isthmus unpeer here"},
		{"the namespace there is another's", theyRefuse(v1alpha1.ReasonWrongOrigin, "is for cluster x"), isthmus.ConditionAnswered, v1alpha1.ReasonWrongOrigin,
			refuses + "is for cluster x" + inForce + "run isthmus peer for both clusters, or isthmus unpeer here"},
		{"two of ours there", theyRefuse(v1alpha1.ReasonAmbiguous, "more than one"), isthmus.ConditionAnswered, v1alpha1.ReasonAmbiguous,
			refuses + "more than one" + inForce + "bravo has to delete all but one of our NetworkConfigs in namespace tenant-a"},
		{"a reason that the peer made up", theyRefuse("SendMoney", "now\n\x1b[2J"), isthmus.ConditionAnswered, v1alpha1.ReasonInvalid,
			refuses + "now  [2J" + inForce + "correct the source of that field in this cluster, or run isthmus unpeer here"},
		{"an answer that cannot be taken", func(s *peeringState) { s.unreadable = no(v1alpha1.ReasonInvalid, "status.podCIDRNAT: is long") },
			isthmus.ConditionAnswered, v1alpha1.ReasonInvalid,
			who + " answers our NetworkConfig tenant/bravo-924e89: status.podCIDRNAT: is long" + inForce + "the peer's manager must answer with networks of the same length"},
		{"answers that do not fit", func(s *peeringState) { s.original.Status.ExternalCIDRNAT = "10.70.0.0/16" }, isthmus.ConditionTunnelEndpoint, isthmus.ReasonInvalid,
			"our NetworkConfig and that of " + who + " contradict each other: NetworkConfig tenant/bravo-924e89: status.externalCIDRNAT: 10.70.0.0/16 overlaps our PodCIDR as the peer uses it, " +
				"10.70.0.0/16; want networks that do not overlap" + stays + "set spec.overrides of the Peerings, or isthmus unpeer here"},

		{"an identity that is revoked", func(s *peeringState) {
			s.identity = s.aboutPeer(no(isthmus.ReasonUnauthorized, "https://b says: Unauthorized; run isthmus peer again"))
		}, isthmus.ConditionIdentity, isthmus.ReasonUnauthorized,
			who + ": https://b says: Unauthorized; run isthmus peer again" + strings.TrimSuffix(stays, "; ")},
		{"a Secret that is refused", func(s *peeringState) {
			s.identity = s.aboutPeer(no(isthmus.ReasonSecretInvalid, "Secret tenant/isthmus-identity: kubeconfig: insecure-skip-tls-verify: refused"))
		}, isthmus.ConditionIdentity, isthmus.ReasonSecretInvalid,
			who + ": Secret tenant/isthmus-identity: kubeconfig: insecure-skip-tls-verify: refused" + strings.TrimSuffix(stays, "; ")},
		{"the peer's admission", func(s *peeringState) {
			s.published = s.aboutPeer(no(isthmus.ReasonForbidden, "https://b says: ValidatingAdmissionPolicy 'isthmus-peer-objects' denied request; run isthmus install there"))
		}, isthmus.ConditionPublished, isthmus.ReasonForbidden,
			who + ": https://b says: ValidatingAdmissionPolicy 'isthmus-peer-objects' denied request; run isthmus install there" + strings.TrimSuffix(stays, "; ")},

		{"the gateway refuses it", func(s *peeringState) {
			s.endpoint.Status.Connection = v1alpha1.Connection{Status: v1alpha1.ConnectionError, StatusMessage: "x"}
			s.endpoint.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonInvalid,
				Message: "spec.remoteNATPodCIDR: 10.246.0.0/18 overlaps that of another"}}
		}, isthmus.ConditionConnected, isthmus.ReasonInvalid,
			"the gateway refuses TunnelEndpoint tenant/bravo-924e89 of " + who + ": spec.remoteNATPodCIDR: 10.246.0.0/18 overlaps that of another; " +
				"it carries no traffic for this peer; run isthmus unpeer here, or un-peer the other peer with the same value"},
		{"the gateway cannot reach it", func(s *peeringState) {
			s.endpoint.Status.Connection = v1alpha1.Connection{Status: v1alpha1.ConnectionError, StatusMessage: "gw.example.org is 10.244.0.7, inside our PodCIDR"}
		}, isthmus.ConditionConnected, isthmus.ReasonLost,
			"the gateway receives no answers from " + who + " at gw.example.org:31000: gw.example.org is 10.244.0.7, inside our PodCIDR"},
		{"a node in its network", func(s *peeringState) {
			s.overlaps = []string{"PodCIDR of peer b, 10.246.0.0/18 here, overlaps a node, 10.246.1.5/32 (status.addresses of Node n1)"}
		}, isthmus.ConditionReady, isthmus.ReasonOverlap,
			who + " has networks that overlap addresses of this cluster: PodCIDR of peer b, 10.246.0.0/18 here, overlaps a node, 10.246.1.5/32 (status.addresses of Node n1)" + stays +
				"remove the overlap, or give the peer other networks: isthmus unpeer here, then isthmus peer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, long := range []bool{false, true} {
				s := agreedState(t)
				s.peering.Name, s.self.ClusterName = "here", "alpha"
				c.change(&s)
				if long { // a long request must not displace the other parts
					for i := range s.copies {
						for j := range s.copies[i].Status.Conditions {
							s.copies[i].Status.Conditions[j].Message = strings.Repeat("ä ", 20_000)
						}
					}
					for j := range s.original.Status.Conditions {
						s.original.Status.Conditions[j].Message = strings.Repeat("ä ", 20_000)
					}
				}
				status := statusFor(s)
				got, ready := meta.FindStatusCondition(status.Conditions, c.which), meta.FindStatusCondition(status.Conditions, isthmus.ConditionReady)
				if got.Reason != c.reason || ready.Reason != c.reason || got.Status != metav1.ConditionFalse {
					t.Errorf("%+v, Ready %+v; want reason %s", got, ready, c.reason)
				}
				if !long && got.Message != c.message {
					t.Errorf("is   %s\nwant %s", got.Message, c.message)
				}
				if tail := c.message[max(0, strings.LastIndex(c.message, "; ")):]; !strings.HasSuffix(got.Message, tail) {
					t.Errorf("long: %v: %s\ndoes not end with %s", long, got.Message, tail)
				}
				for _, text := range []string{got.Message, "Ready: " + ready.Message} { // as in an Event's note
					if len(text) > 1024 || strings.ContainsAny(text, "\n\r\x1b") {
						t.Errorf("%d octets: %q", len(text), text)
					}
				}
			}
		})
	}
}

// The API server accepts the longest possible message in an Event.
func TestLongestConditionMessageFitsIntoAnEvent(t *testing.T) {
	for _, octets := range []int{0, 2, 3, 9, 10, 11} {
		if got := fit("äöüäöü", octets); len(got) > max(3, octets) {
			t.Errorf("%d octets: %q", octets, got)
		}
	}
	s := agreedState(t)
	s.identity = no(isthmus.ReasonUnreachable, "%s", strings.Repeat("x", 5000))
	for _, c := range statusFor(s).Conditions {
		if text := c.Type + ": " + c.Message; len(text) > 1024 {
			t.Errorf("%d octets: %.60s", len(text), text)
		}
	}
}

// The Peering names the peer that has the key, or the Node that has the address. The refused peer
// learns neither.
func TestRefusalNamesTheOwnerOfTheKeyOrAddress(t *testing.T) {
	w := newWorld(t, false)
	w.Gateway("192.0.2.1")
	p := w.peer("b")
	p.join()
	owner := w.describe("owner")
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: owner.NS}})
	te := &v1alpha1.TunnelEndpoint{ObjectMeta: metav1.ObjectMeta{Namespace: owner.NS, Name: "o"}, Spec: p.Endpoint().Spec}
	te.Spec.ClusterIdentity = owner.Cluster
	w.Create(te)
	theirs := p.Theirs()
	w.OK(w.API().Get(w.Ctx, client.ObjectKeyFromObject(theirs), theirs))
	meta.SetStatusCondition(&theirs.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionFalse,
		Reason: v1alpha1.ReasonKeyConflict, Message: "spec.backend_config.publicKey: is the key of another peer"})
	w.OK(w.API().Status().Update(w.Ctx, theirs))
	p.WaitForReason(isthmus.ConditionReady, v1alpha1.ReasonKeyConflict)
	want := owner.Cluster.ClusterName + " (" + owner.Cluster.ClusterID + ") has this key, in TunnelEndpoint " + owner.NS + "/o"
	w.Until("the condition says "+want, func() bool {
		w.stub.report(p.Cluster.ClusterID, replicated) // another event, because the cache may get the owner's TunnelEndpoint late
		return strings.Contains(p.Message(isthmus.ConditionPeerConfig), want)
	})
	for _, c := range []struct{ other, want string }{
		{"192.0.2.77/32", " (status.addresses of Node " + w.Prefix + "-n)"}, {"192.0.2.78/32", ""}, {"192.0.2.0/24", ""},
	} {
		if c.want != "" {
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.Prefix + "-n"}}
			w.Create(node)
			t.Cleanup(func() { w.OK(w.API().Delete(w.Ctx, node)) })
			node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.77"}}
			w.OK(w.API().Status().Update(w.Ctx, node))
		}
		conflict := ipam.Conflict{Peer: "b", Network: "PodCIDR", Prefix: netip.MustParsePrefix("192.0.2.0/25"), With: "a node", Other: netip.MustParsePrefix(c.other)}
		if got, err := overlapText(w.Ctx, w.API(), conflict); err != nil || got != conflict.String()+c.want {
			t.Errorf("%s, %v", got, err)
		}
	}
}

// status.remote explains the peer's networks here. While a claim waits for consent, the condition
// names the networks in force.
func TestStatusHasTheReasonsForRemappedNetworks(t *testing.T) {
	s := agreedState(t)
	s.translations = [2]ipam.Translation{
		{Claim: netip.MustParsePrefix("10.244.64.0/18"), Here: netip.MustParsePrefix("10.246.0.0/18"), Why: "it overlaps our PodCIDR, 10.244.0.0/16"},
		{Claim: netip.MustParsePrefix("10.60.0.0/18"), Here: netip.MustParsePrefix("10.61.0.0/18"), Why: "of what was not answered"},
	}
	status := statusFor(s)
	want := isthmus.Networks{PodCIDR: "10.244.64.0/18", PodCIDRSeen: "10.246.0.0/18", PodCIDRWhy: "it overlaps our PodCIDR, 10.244.0.0/16",
		ExternalCIDR: "10.60.0.0/18", ExternalCIDRSeen: "10.60.0.0/18"}
	if status.Remote != want {
		t.Errorf("%+v", status.Remote)
	}
	const message = "used here: its podCIDR 10.244.64.0/18 as 10.246.0.0/18, because it overlaps our PodCIDR, 10.244.0.0/16; its externalCIDR 10.60.0.0/18 unchanged"
	if c := meta.FindStatusCondition(status.Conditions, isthmus.ConditionPeerConfig); c.Message != message {
		t.Errorf("it says %s", c.Message)
	}
	s.copies[0].Spec.PodCIDR, s.copies[0].Status.Processed = "10.0.0.0/9", false
	want.PodCIDRWhy = ""
	if got := statusFor(s).Remote; got != want {
		t.Errorf("while it waits: %+v", got)
	}
}
