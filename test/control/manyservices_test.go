package control

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/manager/services"
)

// TestClusterImportsManyServices makes one cluster import services from several peers, and replaces
// the pods of these services. It prints the managers' cost, and the time until the importer's
// EndpointSlices are correct. One peer is a cluster with a real manager. The test simulates the
// other peers: it writes their PeerServices with their permissions, no more often than a manager
// would.
func TestClusterImportsManyServices(t *testing.T) {
	peers, services, pods, replaced, over, rest := 3, 8, 4, 12, 2*time.Second, 5*time.Second
	if *long {
		peers, services, pods, replaced, over, rest = 10, 100, 20, 1000, 30*time.Second, time.Minute
	}
	sites := planSites(t, "10.244.0.0/16", "10.244.0.0/16", "10.128.0.0/14")
	home, b, away := sites[0], sites[1], sites[2]
	for _, s := range sites {
		s.services = true
	}
	w := &world{t: t, home: home, away: away, ready: map[string]time.Time{}, audits: &audits{t: t, sum: tally{}, logs: map[string]*auditLog{
		"home": newAuditLog(t, home, "system:serviceaccounts:"+home.tenant(b)), "b": newAuditLog(t, b), "peer": newAuditLog(t, away),
	}}}
	startSites(t, sites)
	m := &market{world: w, b: b, toHome: newTap(t, home.server.URL()), fromB: newTap(t, home.server.URL()), written: map[change]time.Time{}}
	for _, s := range []*site{home, b} {
		if err := s.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod"}}); err != nil {
			t.Fatal(err)
		}
	}
	home.via = m.toHome.address()
	home.startManager("--services", "--pprof-address", home.address()+":6060")
	b.startManager("--services", "--pprof-address", b.address()+":6060")
	m.join(peers, services, pods)
	w.settle()

	m.phase("all come", func() {
		now := time.Now()
		for _, x := range m.exporters {
			m.expect(now, x.open()...)
		}
	})
	m.checkRight()
	m.checkRest("at rest", rest)
	m.phase(fmt.Sprintf("%d of one peer, within %v", replaced, over), func() { m.replace(replaced, over, m.exporters[0]) })
	m.phase(fmt.Sprintf("%d of all peers, within %v", replaced, over), func() { m.replace(replaced, over, m.exporters...) })
	m.phase(fmt.Sprintf("%d of one peer at once", replaced), func() { m.replace(replaced, 0, m.exporters[0]) })
	m.phase(fmt.Sprintf("%d of all peers at once", replaced), func() { m.replace(replaced, 0, m.exporters...) })
	m.checkRight()
	m.checkRest("at rest afterwards", rest)

	began := time.Now()
	home.killManager()
	home.restartManager()
	home.eventually("all services in the metrics of a manager that started again", func() (string, bool) {
		n := 0
		for line := range strings.Lines(home.scrape()) {
			if name, number, _ := strings.Cut(strings.TrimSpace(line), " "); strings.HasPrefix(name, "isthmus_services_imported{") {
				imported, _ := strconv.Atoi(number)
				n += imported
			}
		}
		return strconv.Itoa(n), n == peers*services
	})
	took := time.Since(began)
	w.settle()
	if asked := w.audits.next(); asked.writes() != 1 || asked[newSession] != 1 {
		t.Errorf("a manager that starts again among %d services writes more than its session: %v", peers*services, asked.dividedBy(1))
	}
	u := home.load()
	m.remark("it starts again: all services looked at after %.1f s, its session alone written, %.1f CPU s, peak of resident memory %d MiB", took.Seconds(), u.cpu.Seconds(), u.peak>>20)
}

// A change is an endpoint of a peer that must become ready or be removed.
type change struct {
	addr  netip.Addr // translated address at the importer
	ready bool       // false: it must be removed
}

// A market has the clusters of TestClusterImportsManyServices.
type market struct {
	*world
	b         *site       // the peer with a real manager
	exporters []*exporter // b's exporter comes first
	slices    sight       // EndpointSlices at the importer
	shards    sight       // b's PeerServices at the importer
	toHome    *tap        // connections of the importing manager
	fromB     *tap        // connections of b's manager

	mu      sync.Mutex
	written map[change]time.Time // changes that must arrive, with the time when each was written
}

// expect records changes that must arrive.
func (m *market) expect(since time.Time, all ...change) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range all {
		m.written[c] = since
	}
}

// join peers the clusters and prepares the services that the peers will export.
func (m *market) join(peers, number, pods int) {
	t, home, b := m.t, m.home, m.b
	kubeconfig := home.kubeconfig
	config, err := clientcmd.LoadFromFile(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.Clusters[config.Contexts[config.CurrentContext].Cluster].Server = "https://" + m.fromB.address()
	home.kubeconfig = filepath.Join(home.dir, "tapped")
	if err := clientcmd.WriteToFile(*config, home.kubeconfig); err != nil {
		t.Fatal(err)
	}
	peer(t, home, b, "--services", "prod")
	home.kubeconfig = kubeconfig

	remotes := make([]*remote, peers-1)
	for i := range remotes {
		remotes[i] = newRemote(6 * i) // these have a /20 or a /16
	}
	inParallel(t, remotes, m.prepare)
	m.simulate(remotes)
	inParallel(t, remotes, func(r *remote) error {
		return home.client.Create(t.Context(), &isthmus.Peering{
			ObjectMeta: metav1.ObjectMeta{Name: r.UniqueName()},
			Spec: isthmus.PeeringSpec{
				Cluster: r.ClusterIdentity, TenantNamespace: isthmus.TenantNamespace{Local: r.TenantNamespace(), Remote: r.namespace},
				Services: isthmus.Services{Import: []string{"prod"}},
			},
		})
	})
	m.exporters = []*exporter{m.newExporter(b.name, m.translationOf(b.cluster().UniqueName()), number, pods)}
	m.exporters[0].keepSlices(b)
	for _, r := range remotes {
		x := m.newExporter(r.ClusterName, m.translationOf(r.UniqueName()), number, pods)
		x.keepShards(m.rights(r), r.TenantNamespace())
		m.exporters = append(m.exporters, x)
	}
	go each(t.Context(), home.client, &discoveryv1.EndpointSliceList{}, func(o client.Object) {
		slice := o.(*discoveryv1.EndpointSlice)
		if slice.Labels[isthmus.LabelService] == "" {
			return
		}
		endpoints := make(map[netip.Addr]bool)
		for _, e := range slice.Endpoints {
			endpoints[netip.MustParseAddr(e.Addresses[0])] = *e.Conditions.Ready
		}
		m.slices.see(slice.Name, slice.Size(), endpoints)
	})
	move, tenant := m.exporters[0].move, home.tenant(b)
	go each(t.Context(), home.client, &isthmus.PeerServicesList{}, func(o client.Object) {
		shard := o.(*isthmus.PeerServices)
		if shard.Namespace != tenant {
			return
		}
		endpoints := make(map[netip.Addr]bool)
		for _, s := range shard.Spec.Services {
			for _, e := range s.Subsets[0].Endpoints {
				here, _ := move.Map(netip.MustParseAddr(e.Address))
				endpoints[here] = e.Ready
			}
		}
		m.shards.see(shard.Name, 0, endpoints)
	})
}

// translationOf waits until a Peering has networks, and returns the translation of the peer's pods
// at the importer.
func (m *market) translationOf(peering string) (move services.Remap) {
	m.t.Helper()
	m.home.eventually("networks of "+peering, func() (string, bool) {
		p := &isthmus.Peering{}
		m.home.get(types.NamespacedName{Name: peering}, p)
		from, err := netip.ParsePrefix(p.Status.Remote.PodCIDR)
		to, err2 := netip.ParsePrefix(p.Status.Remote.PodCIDRSeen)
		move = services.Remap{From: from, To: to}
		return fmt.Sprintf("%+v", p.Status), err == nil && err2 == nil
	})
	return move
}

// rights grants a peer the permissions of `isthmus peer --services` at the importer, and returns a
// client with these permissions.
func (m *market) rights(r *remote) client.Client {
	m.t.Helper()
	name := metav1.ObjectMeta{Namespace: r.TenantNamespace(), Name: "isthmus-peer"}
	all := []string{"*"}
	account := &flowcontrolv1.ServiceAccountSubject{Namespace: name.Namespace, Name: name.Name}
	for _, o := range []client.Object{
		&corev1.ServiceAccount{ObjectMeta: name},
		&rbacv1.Role{ObjectMeta: name, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{isthmus.GroupVersion.Group}, Resources: []string{"peerservices"}, Verbs: []string{"get", "list", "watch", "create", "update", "delete"}},
		}},
		&rbacv1.RoleBinding{ObjectMeta: name, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name.Name},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: name.Namespace, Name: name.Name}}},
		&flowcontrolv1.FlowSchema{ObjectMeta: metav1.ObjectMeta{Name: name.Namespace}, Spec: flowcontrolv1.FlowSchemaSpec{
			PriorityLevelConfiguration: flowcontrolv1.PriorityLevelConfigurationReference{Name: deploy.PeerPriority},
			MatchingPrecedence:         850,
			DistinguisherMethod:        &flowcontrolv1.FlowDistinguisherMethod{Type: flowcontrolv1.FlowDistinguisherMethodByUserType},
			Rules: []flowcontrolv1.PolicyRulesWithSubjects{{
				Subjects:      []flowcontrolv1.Subject{{Kind: flowcontrolv1.SubjectKindServiceAccount, ServiceAccount: account}},
				ResourceRules: []flowcontrolv1.ResourcePolicyRule{{Verbs: all, APIGroups: all, Resources: all, Namespaces: all}},
			}},
		}},
	} {
		if err := m.home.client.Create(m.t.Context(), o); err != nil {
			m.t.Fatalf("%T: %v", o, err)
		}
	}
	cert, key, err := m.home.server.ClientCert("system:serviceaccount:" + name.Namespace + ":" + name.Name)
	if err != nil {
		m.t.Fatal(err)
	}
	c, err := client.New(&rest.Config{Host: m.home.server.URL(), QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAData: m.home.server.CA(), CertData: cert, KeyData: key}}, client.Options{Scheme: kubetest.NewScheme()})
	if err != nil {
		m.t.Fatal(err)
	}
	return c
}

// An exporter is a peer that exports services.
type exporter struct {
	m    *market
	name string
	move services.Remap // translation of the exporter's pods at the importer

	pause time.Duration                                                               // pause between two writes
	unit  func(service int) string                                                    // name of the object for a service
	write func(ctx context.Context, unit string, all []isthmus.ExportedService) error // writes the object unit with the services all
	begin func()                                                                      // exports all services

	mu       sync.Mutex
	services []isthmus.ExportedService // each has one subset
	pods     uint32                    // number of pods created so far
	changed  map[string][]change       // changes that are not written yet, by object
}

// newExporter returns an exporter with number services of pods pods each.
func (m *market) newExporter(name string, move services.Remap, number, pods int) *exporter {
	x := &exporter{m: m, name: name, move: move, changed: make(map[string][]change)}
	for i := range number {
		s := exported(fmt.Sprintf("%s-shop-%d", name, i))
		for range pods {
			s.Subsets[0].Endpoints = append(s.Subsets[0].Endpoints, x.pod())
		}
		x.services = append(x.services, s)
	}
	return x
}

// pod returns a new pod.
func (x *exporter) pod() isthmus.ExportedEndpoint {
	x.pods++
	addr := x.move.From.Masked().Addr().As4()
	addr[2], addr[3] = addr[2]+byte(x.pods>>8), byte(x.pods)
	return isthmus.ExportedEndpoint{Address: netip.AddrFrom4(addr).String(), Zone: "zone-1", Ready: true, Serving: true}
}

func (x *exporter) home(e isthmus.ExportedEndpoint) netip.Addr {
	here, _ := x.move.Map(netip.MustParseAddr(e.Address))
	return here
}

// open exports all services, and returns the changes that must arrive.
func (x *exporter) open() (all []change) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, s := range x.services {
		for _, e := range s.Subsets[0].Endpoints {
			all = append(all, change{x.home(e), true})
		}
	}
	x.begin()
	return all
}

// add begins a replacement of the oldest pods of a service: it adds ready pods, and marks as many
// old ones as terminating.
func (x *exporter) add(service, pods int) {
	x.edit(service, func(endpoints []isthmus.ExportedEndpoint) (now []isthmus.ExportedEndpoint, all []change) {
		for i := range endpoints[:pods] {
			endpoints[i].Ready, endpoints[i].Terminating = false, true
		}
		for range pods {
			e := x.pod()
			endpoints = append(endpoints, e)
			all = append(all, change{x.home(e), true})
		}
		return endpoints, all
	})
}

// remove removes the pods that add marked as terminating.
func (x *exporter) remove(service, pods int) {
	x.edit(service, func(endpoints []isthmus.ExportedEndpoint) (now []isthmus.ExportedEndpoint, all []change) {
		for _, e := range endpoints[:pods] {
			all = append(all, change{x.home(e), false})
		}
		return endpoints[pods:], all
	})
}

func (x *exporter) edit(service int, f func([]isthmus.ExportedEndpoint) ([]isthmus.ExportedEndpoint, []change)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	subset := &x.services[service].Subsets[0]
	endpoints, all := f(slices.Clone(subset.Endpoints)) // a copy, because run may be writing the previous list
	x.services[service].Subsets = []isthmus.EndpointSubset{{Targets: subset.Targets, Endpoints: endpoints}}
	unit := x.unit(service)
	x.changed[unit] = append(x.changed[unit], all...)
}

// run writes changed objects until ctx ends.
func (x *exporter) run(ctx context.Context) {
	for ; ctx.Err() == nil; time.Sleep(x.pause) {
		x.mu.Lock()
		units := slices.Sorted(maps.Keys(x.changed))
		x.mu.Unlock()
		var group sync.WaitGroup
		turns := make(chan struct{}, 4)
		for _, unit := range units {
			turns <- struct{}{}
			group.Go(func() {
				defer func() { <-turns }()
				x.mu.Lock()
				var all []isthmus.ExportedService
				for i, s := range x.services {
					if x.unit(i) == unit {
						all = append(all, s)
					}
				}
				changed := x.changed[unit]
				delete(x.changed, unit)
				x.m.expect(time.Now(), changed...)
				x.mu.Unlock()
				if err := x.write(ctx, unit, all); err != nil && ctx.Err() == nil {
					x.m.t.Errorf("%s: %s: %v", x.name, unit, err)
				}
			})
		}
		group.Wait()
	}
}

// keepShards simulates an exporter's manager: the exporter writes PeerServices at the importer.
// Like a manager, it collects changes for 200 ms.
func (x *exporter) keepShards(c client.Client, namespace string) {
	x.pause = 200 * time.Millisecond
	x.unit = func(service int) string { return services.ShardOf(keyFor(x.services[service])) }
	x.begin = func() {
		for i := range x.services {
			x.changed[x.unit(i)] = nil
		}
	}
	x.write = func(ctx context.Context, unit string, all []isthmus.ExportedService) error {
		for {
			o := &isthmus.PeerServices{}
			err := c.Get(ctx, types.NamespacedName{Namespace: namespace, Name: unit}, o)
			o.Spec.Services = all
			switch {
			case apierrors.IsNotFound(err):
				o.Namespace, o.Name = namespace, unit
				return c.Create(ctx, o)
			case err != nil:
				return err
			}
			if err = c.Update(ctx, o); !apierrors.IsConflict(err) { // conflicts with the importer's answers are normal
				return err
			}
		}
	}
	go x.run(x.m.t.Context())
}

// keepSlices makes an exporter write the EndpointSlices of its Services in a cluster with a real
// manager.
func (x *exporter) keepSlices(s *site) {
	ctx := x.m.t.Context()
	x.pause = 10 * time.Millisecond
	x.unit = func(service int) string { return x.services[service].Name }
	sliceOf := make(map[string]*discoveryv1.EndpointSlice) // only one goroutine at a time writes the entry of an object
	for _, service := range x.services {
		name := service.Name
		sliceOf[name] = &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "prod", Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080))}},
		}
		sliceOf[name].Endpoints = endpointsOf(service)
		for _, o := range []client.Object{
			&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}}},
			sliceOf[name],
		} {
			if err := s.client.Create(ctx, o); err != nil {
				s.t.Fatal(err)
			}
		}
	}
	x.begin = func() {
		for _, service := range x.services {
			go func() {
				if err := s.client.Create(ctx, &mcs.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: service.Name}}); err != nil {
					s.t.Error(err)
				}
			}()
		}
	}
	x.write = func(ctx context.Context, unit string, all []isthmus.ExportedService) error {
		sliceOf[unit].Endpoints = endpointsOf(all[0])
		return s.client.Update(ctx, sliceOf[unit])
	}
	go x.run(ctx)
}

func endpointsOf(s isthmus.ExportedService) (all []discoveryv1.Endpoint) {
	for _, e := range s.Subsets[0].Endpoints {
		all = append(all, discoveryv1.Endpoint{Addresses: []string{e.Address}, Zone: &e.Zone, NodeName: new("node-1"), Conditions: discoveryv1.EndpointConditions{
			Ready: &e.Ready, Serving: &e.Serving, Terminating: &e.Terminating,
		}})
	}
	return all
}

// replace replaces pods of the exporters in turn, of another service each time. It spreads the
// replacements evenly over duration; if duration is 0, it replaces all pods at once.
func (m *market) replace(pods int, duration time.Duration, all ...*exporter) {
	m.t.Helper()
	number := len(all[0].services)
	if duration == 0 {
		for _, f := range []func(x *exporter, service, pods int){(*exporter).add, (*exporter).remove} {
			for _, x := range all {
				for service := range number {
					f(x, service, max(1, pods/len(all)/number))
				}
			}
			m.waitForChanges()
		}
		return
	}
	pace := duration / time.Duration(pods)
	later := int(time.Second / pace) // an old pod ends one second after its successor is ready
	ticker := time.NewTicker(pace)
	defer ticker.Stop()
	for i := range pods + later {
		<-ticker.C
		if i < pods {
			all[i%len(all)].add(i/len(all)%number, 1)
		}
		if i := i - later; i >= 0 {
			all[i%len(all)].remove(i/len(all)%number, 1)
		}
	}
}

// waitForChanges waits until all changes are written and have arrived.
func (m *market) waitForChanges() {
	m.t.Helper()
	m.home.eventually("all changes", func() (string, bool) {
		unwritten := 0
		for _, x := range m.exporters {
			x.mu.Lock()
			unwritten += len(x.changed)
			x.mu.Unlock()
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		missing := m.slices.missing(m.written)
		return fmt.Sprintf("%d of %d are missing", missing, len(m.written)), unwritten+missing == 0
	})
}

// phase runs f and prints its cost: the time until all its changes have arrived, and the work of
// the managers until nobody writes any more.
func (m *market) phase(name string, f func()) {
	m.t.Helper()
	m.mu.Lock()
	m.written = make(map[change]time.Time)
	m.mu.Unlock()
	m.audits.next()
	profiled := m.profile(strings.ReplaceAll(name, " ", "-"))
	cpu, theirs, server := m.home.cpu(), m.b.cpu(), m.home.apiServerCPU()
	read, sent := m.toHome.read.Load(), m.fromB.sent.Load()
	events, octets := m.slices.sent()
	began := time.Now()
	f()
	made := time.Since(began)
	m.waitForChanges()
	m.settle()
	profiled()
	cpu, theirs, server = m.home.cpu()-cpu, m.b.cpu()-theirs, m.home.apiServerCPU()-server
	asked := m.audits.next()
	eventsNow, octetsNow := m.slices.sent()
	all := m.slices.delays(m.written)
	written := m.shards.delays(m.written)
	m.t.Logf("column %s", name)
	m.figure("endpoints that change; made within, s", "%s", fmt.Sprintf("%d; %.1f", len(m.written), made.Seconds()))
	m.figure("until its slice is right, s: median, 99 %, last", "%s", quantiles(all))
	m.figure("of this, from the exporter's slice to its PeerServices, s", "%s", quantiles(written))
	m.figure("importing manager: CPU, s", "%.1f", cpu.Seconds())
	m.figure("its API server: CPU, s", "%.1f", server.Seconds())
	m.figure("importing manager: writes", "%s", asked.byOrigin("home"))
	m.figure("importing manager: read of its API server, MiB", "%.1f", float64(m.toHome.read.Load()-read)/(1<<20))
	m.figure("an exporting manager: CPU, s", "%.1f", theirs.Seconds())
	m.figure("an exporting manager: writes at the importer", "%s", asked.byOrigin("home-by-peer"))
	m.figure("an exporting manager: sent to the importer, MiB", "%.1f", float64(m.fromB.sent.Load()-sent)/(1<<20))
	m.figure("an exporting manager: writes in its cluster", "%s", asked.byOrigin("b"))
	m.figure("each kube-proxy: events; MiB", "%s", fmt.Sprintf("%d; %.1f", eventsNow-events, float64(octetsNow-octets)/(1<<20)))
	m.t.Logf("%s: %s", name, asked.dividedBy(1))
}

// byOrigin returns the writes of one origin, by kind.
func (c tally) byOrigin(where string) string {
	all := make(map[string]int)
	for key, number := range c {
		if f := strings.Fields(key); len(f) == 3 && f[0] == where && (tally{key: number}).writes() > 0 {
			all[f[2]] += number
		}
	}
	var text []string
	for _, kind := range slices.Sorted(maps.Keys(all)) {
		text = append(text, fmt.Sprintf("%s %d", kind, all[kind]))
	}
	return cmp.Or(strings.Join(text, ", "), "none")
}

// quantiles returns the median, the 99th percentile and the maximum.
func quantiles(sorted []time.Duration) string {
	if len(sorted) == 0 {
		return ""
	}
	at := func(part float64) float64 { return sorted[int(part*float64(len(sorted)-1))].Seconds() }
	return fmt.Sprintf("%.2f, %.2f, %.2f", at(0.5), at(0.99), at(1))
}

// remark prints a line for benchmarks/manager that does not belong to a column.
func (m *market) remark(format string, args ...any) {
	m.t.Helper()
	m.t.Logf("remark "+format, args...)
}

// checkRest checks that for the duration d nobody writes, and prints the managers' cost in that
// time.
func (m *market) checkRest(what string, d time.Duration) {
	m.t.Helper()
	m.audits.next()
	before, theirs, read := m.home.cpu(), m.b.cpu(), m.toHome.read.Load()
	time.Sleep(d)
	share := func(now, before time.Duration) float64 { return 100 * (now - before).Seconds() / d.Seconds() }
	asked := m.audits.next()
	m.remark("%s, in %v: %d writes; importing manager %.2f %% of a core, %d octets a second read, %d MiB; exporting manager %.2f %% of a core, %d MiB", what, d,
		asked.writes(), share(m.home.cpu(), before), (m.toHome.read.Load()-read)/int64(d.Seconds()), m.home.load().memory>>20, share(m.b.cpu(), theirs), m.b.load().memory>>20)
	if asked.writes() > 0 {
		m.t.Errorf("%s the managers write: %v", what, asked.dividedBy(1))
	}
}

// checkRight fails the test unless the importer has exactly the exported endpoints.
func (m *market) checkRight() {
	m.t.Helper()
	want, have := make(map[string]string), make(map[string]string)
	for _, x := range m.exporters {
		for _, s := range x.services {
			var endpoints []string
			for _, e := range s.Subsets[0].Endpoints {
				endpoints = append(endpoints, fmt.Sprintf("%v %v", x.home(e), e.Ready))
			}
			slices.Sort(endpoints)
			want[s.Name] = fmt.Sprint(x.name, endpoints)
		}
	}
	var list discoveryv1.EndpointSliceList
	m.home.list(&list, client.HasLabels{isthmus.LabelService})
	for _, slice := range list.Items {
		var endpoints []string
		for _, e := range slice.Endpoints {
			endpoints = append(endpoints, fmt.Sprintf("%v %v", e.Addresses[0], *e.Conditions.Ready))
		}
		slices.Sort(endpoints)
		have[slice.Labels[mcs.LabelServiceName]] += fmt.Sprint(slice.Labels[mcs.LabelSourceCluster], endpoints)
	}
	for name, text := range want {
		if have[name] != text {
			m.t.Errorf("%s: %s; want %s", name, have[name], text)
		}
	}
	var imports mcs.ServiceImportList
	m.home.list(&imports)
	if len(have) != len(want) || len(imports.Items) != len(want) {
		m.t.Errorf("%d services have slices, %d ServiceImports; want %d", len(have), len(imports.Items), len(want))
	}
	for _, i := range imports.Items {
		if len(i.Spec.IPs) == 0 || len(i.Status.Clusters) != 1 {
			m.t.Errorf("ServiceImport %s: %+v", i.Name, i)
		}
	}
}

// A sight holds the endpoints of each object that a watch has reported last.
type sight struct {
	mu             sync.Mutex
	of             map[string]map[netip.Addr]bool // by object: addresses, and whether they are ready
	at             map[change]time.Time
	events, octets int
}

// see handles an event of the watch.
func (s *sight) see(object string, octets int, endpoints map[netip.Addr]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of == nil {
		s.of, s.at = make(map[string]map[netip.Addr]bool), make(map[change]time.Time)
	}
	before, now := s.of[object], time.Now()
	if !maps.Equal(before, endpoints) { // equal endpoints: the watch has restarted
		s.events++
		s.octets += octets
	}
	for addr, ready := range endpoints {
		if ready && !before[addr] {
			s.at[change{addr, true}] = now
		}
	}
	for addr := range before {
		if _, is := endpoints[addr]; !is {
			s.at[change{addr, false}] = now
		}
	}
	s.of[object] = endpoints
}

func (s *sight) sent() (events, octets int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.events, s.octets
}

// missing returns the number of changes that have not been seen.
func (s *sight) missing(all map[change]time.Time) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range all {
		if s.at[c].IsZero() {
			n++
		}
	}
	return n
}

// delays returns the sorted times from writing a change until the watch showed it. It omits changes
// that the watch has not shown yet.
func (s *sight) delays(all map[change]time.Time) (took []time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c, since := range all {
		if at := s.at[c]; !at.IsZero() {
			took = append(took, at.Sub(since))
		}
	}
	slices.Sort(took)
	return took
}

// A tap forwards connections to an API server and counts octets, including TLS.
type tap struct {
	listener   net.Listener
	read, sent atomic.Int64 // octets read and sent by the client
}

func newTap(t *testing.T, url string) *tap {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	p := &tap{listener: l}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go p.carry(c, strings.TrimPrefix(url, "https://"))
		}
	}()
	return p
}

func (p *tap) address() string { return p.listener.Addr().String() }

func (p *tap) carry(c net.Conn, to string) {
	defer c.Close()
	s, err := net.Dial("tcp4", to)
	if err != nil {
		return
	}
	go func() {
		defer s.Close()
		_, _ = io.Copy(counting{s, &p.sent}, c)
	}()
	_, _ = io.Copy(counting{c, &p.read}, s)
}

// counting counts the octets that are written through it.
type counting struct {
	io.Writer
	n *atomic.Int64
}

func (c counting) Write(b []byte) (int, error) {
	n, err := c.Writer.Write(b)
	c.n.Add(int64(n))
	return n, err
}
