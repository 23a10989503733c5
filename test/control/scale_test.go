package control

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// manyUsers is the group of our identities at the peers of TestManagerHandlesManyPeerings. All
// peers are on one API server, each with its own tenant namespace, user and client certificate. So
// the manager has a separate connection for each peer, as if each peer had its own API server.
const manyUsers = "peers"

// Flags of TestManagerHandlesManyPeerings are for benchmarks/manager.
var (
	manyPeers    = flag.Int("peers", 0, "number of peerings of TestManagerHandlesManyPeerings; 0: 20, or 500 with -long")
	manyProfiles = flag.String("profiles", "", "directory for profiles of the manager of TestManagerHandlesManyPeerings, of each thing it does; empty: none")
)

// TestManagerHandlesManyPeerings gives one manager 20 peerings or, with -long, 500. Their networks
// overlap ours and each other. The test prints the cost. It counts the manager's requests in the
// audit logs of the API servers, by the manager's user names.
func TestManagerHandlesManyPeerings(t *testing.T) {
	number, rest := 20, 10*time.Second
	if *long {
		number, rest = 500, time.Minute
	}
	if *manyPeers > 2 {
		number = *manyPeers
	}
	home := &site{t: t, name: "a", id: "aaaa0000-1111-4222-8333-000000000000", podCIDR: "10.244.0.0/16", dir: t.TempDir()}
	away := &site{t: t, name: "b", id: "bbbb0000-1111-4222-8333-000000000000", podCIDR: "10.128.0.0/14", dir: t.TempDir()}
	audits := &audits{t: t, sum: tally{}, logs: map[string]*auditLog{"home": newAuditLog(t, home), "peer": newAuditLog(t, away)}}
	startSites(t, []*site{home, away})
	w := &world{t: t, home: home, away: away, audits: audits, ready: map[string]time.Time{}}
	peers := make([]*remote, number)
	for i := range peers {
		peers[i] = newRemote(i)
	}
	later := min(laterPeers, number-2)
	first, most, last := peers[:1], peers[1:number-later], peers[number-later:]
	inParallel(t, peers, w.prepare)
	w.simulate(peers)
	home.startManager("--pprof-address", home.address()+":6060")
	w.settle()
	p := w.home.load()
	t.Logf("no peerings: %v", p)

	one, _ := w.peer("the first peer", first, 0)
	profiled := w.profile("come")
	w.peer("many peers are added", most, 0)
	profiled()
	before, so := w.home.load(), number-later
	t.Logf("%d peerings: %v; %.1f goroutines for each", so, before, float64(before.goroutines-p.goroutines)/float64(so))
	w.checkNetworks(number - later)

	profiled = w.profile("rest")
	idle := w.atRest("at rest", rest)
	profiled()
	profiled = w.profile("one more")
	var another tally
	var cost time.Duration
	for i := range last {
		var c time.Duration
		another, c = w.peer("one more peer", last[i:i+1], idle)
		cost += c
	}
	profiled()
	w.figure("one more peer: CPU beside that at rest, ms", "%.0f", 1000*cost.Seconds()/float64(later))
	// The manager may write the status of a Peering only once, or once for each step, depending on
	// the speed of other changes. It makes the same other writes for each peer. The number of
	// conflicts is random.
	if cost, first := another.writes()-another.conflicts(), one.writes()-one.conflicts(); cost > 2*first {
		t.Errorf("the last peer cost %d writes, the first one %d", cost, first)
	}
	if another[patched] > 2*one[patched] {
		t.Errorf("for the last peer %d octets were patched into the IpamStorage, for the first one %d", another[patched], one[patched])
	}
	if each := before.cpu / time.Duration(so); each > 300*time.Millisecond { // normally 30 ms; more on a machine with shared cores
		t.Errorf("%v of CPU time for each peer; want less than 300 ms", each)
	}
	if each := float64(before.goroutines-p.goroutines) / float64(so); each > 20 {
		t.Errorf("%.1f goroutines for each peer; want less than 20", each)
	}
	if most := max(300, number*6/10); before.memory > most<<20 {
		t.Errorf("%d MiB of memory; want less than %d", before.memory>>20, most)
	}
	w.checkNetworks(number)

	profiled = w.profile("change")
	w.change(most[:min(len(most), changes)], idle)
	profiled()

	home.killManager()
	audits.next()
	began := time.Now()
	home.restartManager()
	profiled = w.profile("restart")
	w.waitRestarted(began, number)
	profiled()
	idle = w.atRest("after the restart", rest/2)
	w.rotate(peers, idle)
}

// A remote is a simulated peer, with the values that it publishes and its answer to our
// NetworkConfig.
type remote struct {
	v1alpha1.ClusterIdentity
	user, namespace string // our user and tenant namespace at the peer
	spec            v1alpha1.NetworkConfigSpec
	status          v1alpha1.NetworkConfigStatus
}

// newRemote returns a remote with one of 36 networks of six lengths, six of them inside ours, so
// that most networks overlap others. Every 25th remote has the same network as our cluster.
func newRemote(i int) *remote {
	r := &remote{
		ClusterIdentity: v1alpha1.ClusterIdentity{ClusterID: fmt.Sprintf("cccc0000-1111-4222-8333-%012d", i), ClusterName: fmt.Sprintf("peer-%d", i)},
		user:            fmt.Sprintf("a-at-peer-%d", i), namespace: fmt.Sprintf("tenant-of-peer-%d", i),
	}
	bits := 20 + i%6
	network := func(a, b int) string {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(a), byte(b), 0, 0}), bits).String()
	}
	pod, external := network(10, 240+i/6%6), network(172, 24)
	if i%25 == 24 {
		bits = 16
		pod, external = network(10, 244), network(172, 24)
	}
	key := sha256.Sum256([]byte(r.ClusterID))
	key[31] &= 0x7f // a public key is below 2^255
	r.spec = v1alpha1.NetworkConfigSpec{
		RemoteCluster: v1alpha1.ClusterIdentity{ClusterID: "aaaa0000-1111-4222-8333-000000000000", ClusterName: "a"},
		PodCIDR:       pod, ExternalCIDR: external, EndpointIP: fmt.Sprintf("198.18.%d.%d", i/256, i%256), BackendType: v1alpha1.BackendWireGuard,
		BackendConfig: v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: base64.StdEncoding.EncodeToString(key[:]), v1alpha1.ConfigPort: "5871"},
	}
	r.status = v1alpha1.NetworkConfigStatus{
		Processed: true, PodCIDRNAT: v1alpha1.None, ExternalCIDRNAT: v1alpha1.None,
	}
	if strings.HasPrefix(pod, "10.244.") || i%2 == 0 {
		r.status.PodCIDRNAT, r.status.ExternalCIDRNAT = "10.60.0.0/16", "10.61.0.0/20"
	}
	return r
}

// A world has the clusters of TestManagerHandlesManyPeerings.
type world struct {
	t          *testing.T
	home, away *site
	audits     *audits

	mu    sync.Mutex
	ready map[string]time.Time // by cluster ID: when its Peering became Ready
}

// prepare creates the same objects on both sides as `isthmus peer`, except the Peering.
func (w *world) prepare(r *remote) error {
	cert, key, err := w.away.server.ClientCert(r.user, manyUsers)
	if err != nil {
		return err
	}
	config := clientcmdapi.NewConfig()
	config.Clusters["peer"] = &clientcmdapi.Cluster{Server: w.away.server.URL(), CertificateAuthorityData: w.away.server.CA()}
	config.AuthInfos["a"] = &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}
	config.Contexts["peer"], config.CurrentContext = &clientcmdapi.Context{Cluster: "peer", AuthInfo: "a"}, "peer"
	kubeconfig, err := clientcmd.Write(*config)
	if err != nil {
		return err
	}
	here := r.TenantNamespace()
	named := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name}
	}
	role := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "isthmus"}
	for _, one := range []struct {
		s *site
		o client.Object
	}{
		{w.home, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: here}}},
		{w.home, &rbacv1.Role{ObjectMeta: named(here, "isthmus"), Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{isthmus.DefaultIdentitySecret}, Verbs: []string{"get", "list", "watch", "patch"}},
		}}},
		{w.home, &rbacv1.RoleBinding{ObjectMeta: named(here, "isthmus"), RoleRef: role,
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: installed, Name: "isthmus-manager"}}}},
		{w.home, &corev1.Secret{ObjectMeta: named(here, isthmus.DefaultIdentitySecret), Data: map[string][]byte{isthmus.SecretKubeconfig: kubeconfig}}},
		{w.away, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: r.namespace}}},
		{w.away, &rbacv1.Role{ObjectMeta: named(r.namespace, "isthmus"), Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"networkconfigs"}, Verbs: []string{"get", "list", "watch", "create", "update", "patch", "delete"}},
			{APIGroups: []string{isthmus.GroupVersion.Group}, Resources: []string{"peerservices"}, Verbs: []string{"get", "list", "watch", "create", "update", "delete"}},
		}}},
		{w.away, &rbacv1.RoleBinding{ObjectMeta: named(r.namespace, "isthmus"), RoleRef: role,
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: r.user}}}},
	} {
		if err := one.s.client.Create(w.t.Context(), one.o); err != nil {
			return fmt.Errorf("%T %s: %w", one.o, one.o.GetName(), err)
		}
	}
	return nil
}

// simulate acts as the managers of the peers: each writes its NetworkConfig into our cluster, and
// answers ours as soon as ours exists. simulate also records when our Peerings become Ready.
func (w *world) simulate(peers []*remote) {
	byNamespace := map[string]*remote{}
	for _, r := range peers {
		byNamespace[r.namespace] = r
	}
	ctx := w.t.Context()
	go each(ctx, w.away.client, &v1alpha1.NetworkConfigList{}, func(o client.Object) {
		nc := o.(*v1alpha1.NetworkConfig)
		if nc.Status.Processed || nc.Labels[v1alpha1.LabelOriginID] != w.home.id {
			return
		}
		go func() {
			r := byNamespace[nc.Namespace]
			nc.Status = r.status
			err := w.away.client.Status().Update(ctx, nc)
			if apierrors.IsConflict(err) { // it has changed again, and causes another event
				return
			}
			if err == nil {
				err = client.IgnoreAlreadyExists(w.home.client.Create(ctx, r.networkConfig()))
			}
			if err != nil && ctx.Err() == nil {
				w.t.Errorf("%s: %v", r.ClusterName, err)
			}
		}()
	})
	go each(ctx, w.home.client, &isthmus.PeeringList{}, func(o client.Object) {
		p := o.(*isthmus.Peering)
		w.mu.Lock()
		defer w.mu.Unlock()
		if id := p.Spec.Cluster.ClusterID; !meta.IsStatusConditionTrue(p.Status.Conditions, isthmus.ConditionReady) {
			delete(w.ready, id)
		} else if _, already := w.ready[id]; !already {
			w.ready[id] = time.Now()
		}
	})
}

// networkConfig returns the peer's NetworkConfig as its replicator creates it here.
func (r *remote) networkConfig() *v1alpha1.NetworkConfig {
	return &v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.TenantNamespace(), Name: r.spec.RemoteCluster.UniqueName(),
			Labels: map[string]string{
				v1alpha1.LabelReplication: "false", v1alpha1.LabelReplicated: "true",
				v1alpha1.LabelOriginID: r.ClusterID, v1alpha1.LabelRemoteID: r.spec.RemoteCluster.ClusterID,
			},
		},
		Spec: r.spec,
	}
}

// each calls f with every object of a kind. Until ctx ends, it calls f again after each change.
func each(ctx context.Context, c client.WithWatch, list client.ObjectList, f func(client.Object)) {
	for ctx.Err() == nil {
		watch, err := c.Watch(ctx, list)
		if err != nil {
			time.Sleep(100 * time.Millisecond)
			continue
		}
		for event := range watch.ResultChan() {
			if o, ok := event.Object.(client.Object); ok && event.Type != "DELETED" {
				f(o)
			}
		}
	}
}

// peer creates the Peerings with some peers, and waits until they are Ready and nobody writes any
// more. It prints the cost, and returns the requests to the API servers and the manager's CPU time
// beyond that at rest. idle is the CPU time at rest, as a fraction of one processor.
func (w *world) peer(what string, peers []*remote, idle float64) (tally, time.Duration) {
	w.t.Helper()
	w.audits.next()
	before, began := w.home.cpu(), time.Now()
	inParallel(w.t, peers, func(r *remote) error {
		return w.home.client.Create(w.t.Context(), &isthmus.Peering{
			ObjectMeta: metav1.ObjectMeta{Name: r.UniqueName()},
			Spec: isthmus.PeeringSpec{
				Cluster:         r.ClusterIdentity,
				TenantNamespace: isthmus.TenantNamespace{Local: r.TenantNamespace(), Remote: r.namespace},
			},
		})
	})
	made := time.Since(began)
	var took []time.Duration
	for deadline := began.Add(5*time.Minute + time.Duration(len(peers))*time.Second); len(took) < len(peers); time.Sleep(10 * time.Millisecond) {
		w.mu.Lock()
		took = took[:0]
		for _, r := range peers {
			if at, ok := w.ready[r.ClusterID]; ok {
				took = append(took, at.Sub(began))
			}
		}
		w.mu.Unlock()
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: %d of %d Peerings are Ready after %v; %s", what, len(took), len(peers), time.Since(began), w.reasonsNotReady(peers))
		}
	}
	slices.Sort(took)
	w.settle()
	spent, rested := w.home.cpu()-before, time.Duration(idle*float64(time.Since(began)))
	asked := w.audits.next()
	w.t.Logf("%s, %d: Peerings made in %.2f s, half of them Ready after %.2f s, all after %.2f s; manager %.2f CPU s, %v",
		what, len(peers), made.Seconds(), took[len(took)/2].Seconds(), took[len(took)-1].Seconds(), spent.Seconds(), w.home.load())
	if len(peers) > 1 {
		w.figure(what+": CPU, s", "%.2f", spent.Seconds())
		w.figure(what+": all Ready after, s", "%.1f", took[len(took)-1].Seconds())
		w.figure(what+": writes for each", "%.1f", float64(asked.writes())/float64(len(peers)))
	}
	w.t.Logf("%s: %.2f writes for each: %s", what, float64(asked.writes())/float64(len(peers)), asked.dividedBy(len(peers)))
	if n := asked["home patch ipamstorages"]; n > 0 {
		w.t.Logf("%s: %d octets in each of %d patches of the IpamStorage", what, asked[patched]/n, n)
	}
	return asked, spent - rested
}

// reasonsNotReady returns the reasons of the first peers that are not Ready.
func (w *world) reasonsNotReady(peers []*remote) string {
	for _, r := range peers {
		p := &isthmus.Peering{}
		if err := w.home.client.Get(w.t.Context(), client.ObjectKey{Name: r.UniqueName()}, p); err != nil {
			return err.Error()
		}
		if c := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionReady); c == nil || c.Status != metav1.ConditionTrue {
			return fmt.Sprintf("%s: %+v", p.Name, p.Status.Conditions)
		}
	}
	return "all are by now"
}

// checkNetworks checks that the networks allocated for number peers do not overlap.
func (w *world) checkNetworks(number int) {
	w.t.Helper()
	var list v1alpha1.TunnelEndpointList
	if err := w.home.client.List(w.t.Context(), &list); err != nil {
		w.t.Fatal(err)
	}
	if len(list.Items) != number {
		w.t.Errorf("%d TunnelEndpoints; want %d", len(list.Items), number)
	}
	all := []netip.Prefix{netip.MustParsePrefix(w.home.podCIDR)}
	remapped := 0
	for _, te := range list.Items {
		s := te.Spec
		if s.RemoteNATPodCIDR != v1alpha1.None {
			remapped++
		}
		for _, text := range []string{seenAs(s.RemoteNATPodCIDR, s.RemotePodCIDR), seenAs(s.RemoteNATExternalCIDR, s.RemoteExternalCIDR)} {
			p := netip.MustParsePrefix(text)
			if i := slices.IndexFunc(all, p.Overlaps); i >= 0 {
				w.t.Errorf("%s: %v overlaps %v", te.Name, p, all[i])
			}
			all = append(all, p)
		}
	}
	ipamStorage, err := json.Marshal(w.home.ipamStorage())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("%d of %d PodCIDRs are remapped; the IpamStorage has %d KiB", remapped, number, len(ipamStorage)>>10)
}

// settle waits until nothing has been written for four seconds.
func (w *world) settle() {
	w.t.Helper()
	quiet, last := time.Now(), w.audits.read().writes()
	for deadline := time.Now().Add(5 * time.Minute); time.Since(quiet) < 4*time.Second; time.Sleep(100 * time.Millisecond) {
		if n := w.audits.read().writes(); n != last {
			quiet, last = time.Now(), n
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("the manager does not come to rest: %v", w.audits.next().dividedBy(1))
		}
	}
}

// atRest checks that for the duration d nobody writes, and prints the other requests. It returns
// the manager's CPU time as a fraction of one processor.
func (w *world) atRest(what string, d time.Duration) float64 {
	w.t.Helper()
	w.audits.next()
	before := w.home.cpu()
	time.Sleep(d)
	share, asked := (w.home.cpu()-before).Seconds()/d.Seconds(), w.audits.next()
	after := w.home.load()
	watches, requests := asked.startedRequests()
	w.t.Logf("%s, in %v: manager %.2f %% of a core, %v; %.2f watches and %.2f other requests a second: %s", what, d, 100*share, after,
		float64(watches)/d.Seconds(), float64(requests)/d.Seconds(), asked.dividedBy(1))
	w.figure(what+": CPU, of a core", "%.2f %%", 100*share)
	w.figure(what+": resident memory, MiB", "%d", after.memory>>20)
	w.figure(what+": goroutines", "%d", after.goroutines)
	w.figure(what+": watches that ended, a second", "%.2f", float64(watches)/d.Seconds())
	w.figure(what+": other requests, a second", "%.2f", float64(requests)/d.Seconds())
	if asked.writes() > 0 {
		w.t.Errorf("%s the manager writes", what)
	}
	return share
}

// laterPeers is the number of peers that join one by one after all others.
const laterPeers = 5

// changes is the number of peers that change. With fewer, the CPU time of a change would be below
// the resolution of the kernel.
const changes = 40

// change gives peers a new endpoint, one peer after the other: it waits until a peer's
// TunnelEndpoint has the new endpoint before it continues. It prints the cost of one change beyond
// the manager's cost at rest.
func (w *world) change(peers []*remote, idle float64) {
	w.t.Helper()
	w.audits.next()
	before, began := w.home.cpu(), time.Now()
	for i, r := range peers {
		nc := r.networkConfig()
		if err := w.home.client.Get(w.t.Context(), client.ObjectKeyFromObject(nc), nc); err != nil {
			w.t.Fatal(err)
		}
		nc.Spec.EndpointIP = fmt.Sprintf("198.19.%d.%d", i/256, i%256)
		if err := w.home.client.Update(w.t.Context(), nc); err != nil {
			w.t.Fatal(err)
		}
		w.home.eventually("the TunnelEndpoint of "+r.ClusterName, func() (string, bool) {
			var list v1alpha1.TunnelEndpointList
			if err := w.home.client.List(w.t.Context(), &list, client.InNamespace(r.TenantNamespace())); err != nil {
				return err.Error(), false
			}
			return fmt.Sprint(list.Items), len(list.Items) == 1 && list.Items[0].Spec.EndpointIP == nc.Spec.EndpointIP
		})
	}
	took := time.Since(began)
	w.settle()
	cost, asked := (w.home.cpu()-before).Seconds()-idle*time.Since(began).Seconds(), w.audits.next()
	w.figure("a peer's endpoint changes: CPU, ms", "%.1f", 1000*cost/float64(len(peers)))
	w.figure("a peer's endpoint changes: writes", "%.1f", float64(asked.writes())/float64(len(peers)))
	w.t.Logf("one peer changes: manager %.1f ms of CPU, in the TunnelEndpoint after %.2f s; %.2f writes: %s",
		1000*cost/float64(len(peers)), took.Seconds()/float64(len(peers)), float64(asked.writes())/float64(len(peers)), asked.dividedBy(len(peers)))
}

// figure prints a figure for the table of benchmarks/manager.
func (w *world) figure(name, format string, v any) {
	w.t.Helper()
	w.t.Logf("figure %s = "+format, name, v)
}

// profile begins a CPU profile of the manager, if profiles are requested. The returned function
// waits for the end of that profile, and adds a memory profile.
func (w *world) profile(what string) func() {
	w.t.Helper()
	if *manyProfiles == "" {
		return func() {}
	}
	save := func(from, name string) {
		r, err := http.Get("http://" + w.home.address() + ":6060/debug/pprof/" + from)
		if err != nil {
			w.t.Error(err)
			return
		}
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		if err == nil {
			err = os.WriteFile(filepath.Join(*manyProfiles, name), b, 0o644)
		}
		if err != nil {
			w.t.Error(err)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		save("profile?seconds=30", what+".cpu")
	}()
	return func() {
		<-done
		save("heap?gc=1", what+".heap")
	}
}

// waitRestarted waits until a restarted manager has listed the NetworkConfigs of each peer. It
// checks that the manager has written only newSession.
func (w *world) waitRestarted(began time.Time, number int) {
	w.t.Helper()
	leads := time.Since(began)
	w.home.eventually(fmt.Sprintf("a look at each of %d peers", number), func() (string, bool) {
		n := w.audits.read()["peer list networkconfigs"]
		return strconv.Itoa(n), n >= number
	})
	looked := time.Since(began)
	w.settle()
	u, asked := w.home.load(), w.audits.next()
	w.t.Logf("restart: leader after %.2f s, at all %d peers after %.2f s, %v", leads.Seconds(), number, looked.Seconds(), u)
	w.figure("restart: CPU, s", "%.2f", u.cpu.Seconds())
	w.figure("restart: all peers reconciled after, s", "%.1f", looked.Seconds())
	w.t.Logf("restart: %s", asked.dividedBy(1))
	all, leases := asked.refused()
	w.figure("restart: throttled requests, of them for the Lease", "%s", fmt.Sprintf("%d, %d", all, leases))
	if leases > 0 {
		w.t.Errorf("a manager that is started among %d peerings is told to wait with its Lease", number)
	}
	if asked.writes() != 1 || asked[newSession] != 1 {
		w.t.Errorf("a manager that is started among %d peerings writes more than its session", number)
	}
}

// A load is the manager's use of the machine.
type load struct {
	cpu        time.Duration
	memory     int // resident memory, in octets
	peak       int // peak of memory
	goroutines int
}

func (u load) String() string {
	return fmt.Sprintf("RSS %d MiB (peak %d), %d goroutines, %.2f CPU s since its start", u.memory>>20, u.peak>>20, u.goroutines, u.cpu.Seconds())
}

// cpu returns the CPU time that the manager's threads have used so far. Unlike load, it sends no
// request to the manager.
func (s *site) cpu() time.Duration {
	s.t.Helper()
	return s.cpuOf(s.manager.Process.Pid)
}

// cpuOf returns the CPU time that the threads of a process have used so far.
func (s *site) cpuOf(pid int) (sum time.Duration) {
	s.t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, name := range files {
		b, _ := os.ReadFile(name) // a thread may have ended, though threads of Go programs rarely do
		if fields := strings.Fields(string(b)); len(fields) == 3 {
			n, err := strconv.ParseInt(fields[0], 10, 64)
			if err != nil {
				s.t.Fatal(err)
			}
			sum += time.Duration(n)
		}
	}
	return sum
}

// apiServerCPU returns the CPU time that the API server has used so far.
func (s *site) apiServerCPU() time.Duration {
	s.t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		s.t.Fatal(err)
	}
	_, port, _ := strings.Cut(strings.TrimPrefix(s.server.URL(), "https://"), ":")
	for _, name := range all {
		b, _ := os.ReadFile(name) // the process may have ended
		if words := strings.Split(string(b), "\x00"); filepath.Base(words[0]) == "kube-apiserver" && slices.Contains(words, "--secure-port="+port) {
			pid, _ := strconv.Atoi(strings.Split(name, "/")[2])
			return s.cpuOf(pid)
		}
	}
	s.t.Fatal("no API server")
	return 0
}

func (s *site) load() (u load) {
	s.t.Helper()
	u.cpu = s.cpu()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.manager.Process.Pid))
	if err != nil {
		s.t.Fatal(err)
	}
	u.memory, u.peak = value(string(status), "VmRSS:")<<10, value(string(status), "VmHWM:")<<10
	u.goroutines = value(s.scrape(), "go_goroutines")
	return u
}

// scrape returns the manager's metrics.
func (s *site) scrape() string {
	s.t.Helper()
	response, err := http.Get("http://" + s.metrics + "/metrics")
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return string(body)
}

// value returns the number after a name at the beginning of a line, or 0.
func value(text, name string) (n int) {
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == name {
			n, _ = strconv.Atoi(fields[1])
		}
	}
	return n
}

// A tally counts requests by origin, verb and resource. The key of failed requests also has their
// status code: "home patch peerings/status=409".
type tally map[string]int

// patched is the key for the total octets of all patches of the IpamStorage.
const patched = "octets"

// writes returns the number of writing requests, without those for the Lease, which is renewed
// every two seconds.
func (c tally) writes() (n int) {
	for key, number := range c {
		if f := strings.Fields(key); len(f) == 3 && !strings.HasPrefix(f[2], "leases") && slices.Contains([]string{"create", "update", "patch", "delete"}, f[1]) {
			n += number
		}
	}
	return n
}

// newSession is the first write of a manager. After it, the API server refuses further writes of
// the previous manager.
const newSession = "home patch ipamstorages"

// startedRequests returns the number of watches, counted when they end, and of all other requests.
func (c tally) startedRequests() (watches, requests int) {
	for key, number := range c {
		if f := strings.Fields(key); len(f) == 3 && f[1] == "watch" {
			watches += number
		} else if len(f) == 3 {
			requests += number
		}
	}
	return watches, requests
}

// refused returns the number of requests that were answered with 429, and how many of these were
// for a Lease.
func (c tally) refused() (all, leases int) {
	for key, number := range c {
		if strings.HasSuffix(key, "=429") {
			all += number
			if strings.Contains(key, " leases=") {
				leases += number
			}
		}
	}
	return all, leases
}

// conflicts returns the number of writes that conflicted with another write.
func (c tally) conflicts() (n int) {
	for key, number := range c {
		if strings.HasSuffix(key, "=409") {
			n += number
		}
	}
	return n
}

// dividedBy returns the tally as text, divided by number.
func (c tally) dividedBy(number int) string {
	var all []string
	for _, key := range slices.Sorted(maps.Keys(c)) {
		if key != patched {
			all = append(all, fmt.Sprintf("%s %.4g", key, float64(c[key])/float64(number)))
		}
	}
	return strings.Join(all, ", ")
}

// audits counts the manager's requests.
type audits struct {
	t    *testing.T
	sum  tally                // requests since the last call of next
	logs map[string]*auditLog // by origin
}

type auditLog struct {
	path   string
	offset int64
}

const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- level: Request
  users: ["system:serviceaccount:isthmus-system:isthmus-manager"]
  resources: [{group: net.liqo.io, resources: [ipamstorages]}]
- level: Metadata
  users: ["system:serviceaccount:isthmus-system:isthmus-manager"]
- level: Metadata
  userGroups: [%s]
- level: None
`

// newAuditLog makes a site keep an audit log of the requests of the manager and of the users in
// groups. It must be called before the site is started.
func newAuditLog(t *testing.T, s *site, groups ...string) *auditLog {
	t.Helper()
	policy, path := filepath.Join(s.dir, "policy.yaml"), filepath.Join(s.dir, "audit.log")
	if err := os.WriteFile(policy, fmt.Appendf(nil, auditPolicy, strings.Join(append(groups, manyUsers), ", ")), 0o644); err != nil {
		t.Fatal(err)
	}
	s.apiArgs = []string{"--audit-policy-file=" + policy, "--audit-log-path=" + path, "--audit-log-maxsize=10000"}
	return &auditLog{path: path}
}

// read returns the tally since the last call of next.
func (a *audits) read() tally {
	a.t.Helper()
	for where, l := range a.logs {
		if err := l.read(where, a.sum); err != nil {
			a.t.Fatal(err)
		}
	}
	return a.sum
}

// next returns the tally since the last call of next, and begins a new one.
func (a *audits) next() tally {
	a.t.Helper()
	sum := a.read()
	a.sum = tally{}
	return sum
}

// read adds the lines that were logged since the last call to a tally.
func (l *auditLog) read(where string, to tally) error {
	f, err := os.Open(l.path)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Seek(l.offset, io.SeekStart); err != nil {
		return err
	}
	r := bufio.NewReader(f)
	for {
		line, err := r.ReadBytes('\n')
		if err == io.EOF {
			return nil // an incomplete line is read again
		}
		if err != nil {
			return err
		}
		l.offset += int64(len(line))
		var event struct {
			Verb           string
			User           struct{ Username string }
			ObjectRef      struct{ Resource, Subresource string }
			RequestObject  json.RawMessage
			ResponseStatus struct{ Code int }
		}
		if err := json.Unmarshal(line, &event); err != nil {
			return fmt.Errorf("%s: %w", l.path, err)
		}
		resource := event.ObjectRef.Resource
		if sub := event.ObjectRef.Subresource; sub != "" {
			resource += "/" + sub
		}
		if code := event.ResponseStatus.Code; code >= 400 {
			resource += fmt.Sprintf("=%d", code)
		}
		from := where
		if strings.HasSuffix(event.User.Username, ":isthmus-peer") {
			from += "-by-peer"
		}
		to[from+" "+event.Verb+" "+resource]++
		if event.Verb == "patch" && resource == "ipamstorages" {
			to[patched] += len(event.RequestObject)
		}
	}
}

// inParallel calls f with each peer, in at most sixteen goroutines at a time.
func inParallel(t *testing.T, peers []*remote, f func(*remote) error) {
	t.Helper()
	var group sync.WaitGroup
	turns := make(chan struct{}, 16)
	for _, r := range peers {
		turns <- struct{}{}
		group.Go(func() {
			defer func() { <-turns }()
			if err := f(r); err != nil {
				t.Errorf("%s: %v", r.ClusterName, err)
			}
		})
	}
	group.Wait()
	if t.Failed() {
		t.FailNow()
	}
}
