// Package control tests the control plane as a whole: clusters with real API servers, with the real
// manager as a process, peered by the real command line. The tests act as the gateways: they write
// the objects that a gateway writes. Package internal/fleet tests whole clusters with packets.
package control

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/test/internal/programs"
	"github.com/isthmus-net/isthmus/test/internal/released"
)

// installed is the namespace of Isthmus.
const installed = "isthmus-system"

// binary is the path of the isthmus program. kube is the folder with etcd and kube-apiserver.
// TestMain sets both.
var binary, kube string

func TestMain(m *testing.M) {
	ctrllog.SetLogger(logr.Discard())
	os.Exit(programs.Run(m, &binary, &kube))
}

// A site is one cluster: a control plane, and a manager once it has been started.
type site struct {
	t          *testing.T
	name, id   string
	podCIDR    string
	server     *kubetest.Server
	config     *rest.Config
	client     client.WithWatch
	kubeconfig string // kubeconfig of an administrator
	dir        string
	args       []string // further arguments of the manager
	apiArgs    []string // further arguments of the API server
	services   bool     // whether Isthmus is installed with the sharing of services
	via        string   // address by which the manager reaches the API server; empty: the server's own

	own                   string // loopback address of this site; empty before the first call of address
	health, metrics, ipam string // addresses of the manager

	manager *exec.Cmd
	ended   chan struct{}
}

// newSites starts clusters called a, b, ... with the given PodCIDRs. It installs Isthmus and acts
// as their gateways.
func newSites(t *testing.T, podCIDRs ...string) []*site {
	t.Helper()
	sites := planSites(t, podCIDRs...)
	startSites(t, sites)
	return sites
}

// planSites returns the clusters that newSites starts, before they are started.
func planSites(t *testing.T, podCIDRs ...string) []*site {
	t.Helper()
	sites := make([]*site, len(podCIDRs))
	for i, cidr := range podCIDRs {
		name := string(rune('a' + i))
		sites[i] = &site{t: t, name: name, id: fmt.Sprintf("%s%s%s%s0000-1111-4222-8333-%012d", name, name, name, name, i), podCIDR: cidr, dir: t.TempDir()}
	}
	return sites
}

// startSites starts several clusters in parallel.
func startSites(t *testing.T, sites []*site) {
	t.Helper()
	errs := make([]error, len(sites))
	var group sync.WaitGroup
	for i, s := range sites {
		t.Cleanup(s.end)
		group.Go(func() { errs[i] = s.start() })
	}
	group.Wait()
	for i, err := range errs {
		if err != nil {
			t.Fatalf("cluster %s: %v", sites[i].name, err)
		}
	}
}

func (s *site) start() (err error) {
	ctx := s.t.Context()
	if s.server, err = kubetest.Start(ctx, kubetest.Options{Name: s.name, Dir: kube, Controllers: true, APIServerArgs: s.apiArgs}); err != nil {
		return err
	}
	s.kubeconfig = filepath.Join(s.dir, "kubeconfig")
	if err := s.server.WriteKubeconfig(s.kubeconfig); err != nil {
		return err
	}
	if s.config, err = s.server.Config(); err != nil {
		return err
	}
	if s.client, err = s.server.Client(); err != nil {
		return err
	}
	args := []string{"install", "--without-workloads", "--kubeconfig", s.kubeconfig, "--cluster-name", s.name, "--cluster-id", s.id}
	if s.services {
		args = append(args, "--services")
	}
	if out, err := s.isthmus(args...); err != nil {
		return fmt.Errorf("isthmus install: %w\n%s", err, out)
	}
	return s.playGateway(ctx)
}

// playGateway writes the objects that a gateway writes. Until ctx ends, it reports every
// TunnelEndpoint as connected.
func (s *site) playGateway(ctx context.Context) error {
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	text := func(b []byte) []byte { return []byte(base64.StdEncoding.EncodeToString(b)) }
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "isthmus-gateway", Namespace: installed, Labels: map[string]string{v1alpha1.LabelGateway: "true"}},
		Spec: corev1.ServiceSpec{
			Type:  corev1.ServiceTypeLoadBalancer,
			Ports: []corev1.ServicePort{{Name: "wireguard", Protocol: corev1.ProtocolUDP, Port: 5871}},
		},
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "wireguard-pubkey", Namespace: installed, Labels: map[string]string{v1alpha1.LabelKey: v1alpha1.BackendWireGuard}},
		Data:       map[string][]byte{"privateKey": text(key.Bytes()), "publicKey": text(key.PublicKey().Bytes())},
	}
	for _, o := range []client.Object{service, secret} {
		if err := s.client.Create(ctx, o); err != nil {
			return err
		}
	}
	service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: fmt.Sprintf("203.0.113.%d", s.name[0]-'a'+1)}}
	if err := s.client.Status().Update(ctx, service); err != nil {
		return err
	}
	go s.connect(ctx)
	return nil
}

// connect reports TunnelEndpoints as connected until ctx ends.
func (s *site) connect(ctx context.Context) {
	for ctx.Err() == nil {
		watch, err := s.client.Watch(ctx, &v1alpha1.TunnelEndpointList{})
		if err != nil {
			time.Sleep(100 * time.Millisecond)
			continue
		}
		for event := range watch.ResultChan() {
			te, ok := event.Object.(*v1alpha1.TunnelEndpoint)
			if !ok || event.Type == "DELETED" || te.Status.Connection.Status == "Connected" {
				continue
			}
			te.Status.GatewayIP = "192.0.2.1"
			te.Status.Connection.Status, te.Status.Connection.StatusMessage = "Connected", "VPN connection established"
			te.Status.Connection.Latency.Value = "1ms"
			err := s.client.Status().Update(ctx, te)
			if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) { // after these errors, another event follows
				watch.Stop()
			}
		}
	}
}

// startManager starts the manager with the permissions of its ServiceAccount, and waits until it is
// ready.
func (s *site) startManager(args ...string) {
	s.t.Helper()
	s.args = args
	s.restartManager()
}

func (s *site) restartManager() {
	s.t.Helper()
	identity := s.identity("isthmus-manager")
	own := s.address()
	s.health, s.metrics, s.ipam = own+":8081", own+":8080", own+":8082"
	log, err := os.OpenFile(s.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		s.t.Fatal(err)
	}
	defer log.Close()
	args := append([]string{"manager", "--kubeconfig", identity, "--namespace", installed, "--pod-cidr", s.podCIDR,
		"--health-address", s.health, "--metrics-address", s.metrics, "--ipam-address", s.ipam, "--ipam-plain",
		"--ipam-allow", "10.96.0.1/32,10.130.0.0/16"}, s.args...) // for the endpoints that the tests' virtual kubelet maps
	if !slices.Contains(s.args, "--service-cidr") {
		args = append(args, s.serviceNetwork()...)
	}
	s.manager = exec.Command(binary, args...)
	s.manager.Stdout, s.manager.Stderr = log, log
	s.manager.Env = append(os.Environ(), "POD_NAME=isthmus-manager-0", "POD_UID=0") // stays the same after a restart, so that the manager keeps its Lease
	s.manager.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	started := time.Now()
	if err := s.manager.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) {
		_ = cmd.Wait()
		close(ended)
	}(s.manager, s.ended)
	s.eventually("a manager of "+s.name+" that holds the Lease", func() (string, bool) {
		lease := &coordinationv1.Lease{}
		if err := s.client.Get(s.t.Context(), client.ObjectKey{Namespace: installed, Name: "isthmus-manager"}, lease); err != nil {
			return err.Error(), false
		}
		renewed := lease.Spec.RenewTime
		return fmt.Sprintf("%+v", lease.Spec), renewed != nil && renewed.After(started)
	})
}

// serviceNetwork returns the flag with the network of Services before Kubernetes 1.33, where the
// manager cannot detect it.
func (s *site) serviceNetwork() []string {
	s.t.Helper()
	if clustertest.ServesServiceCIDRs(s.t, &cluster.Cluster{Client: s.client}) {
		return nil
	}
	return []string{"--service-cidr", "10.96.0.0/12"}
}

func (s *site) log() string { return filepath.Join(s.dir, "manager.log") }

// killManager kills the manager by SIGKILL, so that it cannot release its Lease.
func (s *site) killManager() {
	if s.manager != nil {
		_ = s.manager.Process.Kill()
		<-s.ended
		s.manager = nil
	}
}

// killHard is killManager for goroutines other than the test's: it does not change s.manager. The
// process is dead when it returns.
func (s *site) killHard() {
	_ = s.manager.Process.Kill()
	<-s.ended
}

// stopManager ends the manager by SIGTERM. The manager releases its Lease, so another one can lead
// at once.
func (s *site) stopManager() {
	s.t.Helper()
	if err := s.manager.Process.Signal(syscall.SIGTERM); err != nil {
		s.t.Fatal(err)
	}
	select {
	case <-s.ended:
		s.manager = nil
	case <-time.After(patience):
		s.t.Fatalf("the manager of %s does not end", s.name)
	}
}

// reconfigure restarts the manager with another PodCIDR and other flags.
func (s *site) reconfigure(podCIDR string, args ...string) {
	s.t.Helper()
	s.stopManager()
	s.forget()
	s.podCIDR = podCIDR
	s.startManager(args...)
}

// forget removes the IPAM state of peers that have left, so that the next test gets the same
// networks as for new peers.
func (s *site) forget() {
	s.t.Helper()
	s.eventually("no memory of former peers", func() (string, bool) {
		var list isthmus.NetworkAllocationList
		if err := s.client.List(s.t.Context(), &list); err != nil {
			return err.Error(), false
		}
		for i := range list.Items {
			if list.Items[i].Spec.Previous == nil {
				continue
			}
			if err := s.client.Delete(s.t.Context(), &list.Items[i]); err != nil {
				return err.Error(), false
			}
		}
		return "", true
	})
}

func (s *site) end() {
	s.killManager()
	if s.t.Failed() {
		if text, err := os.ReadFile(s.log()); err == nil {
			lines := strings.Split(string(text), "\n")
			s.t.Logf("manager of %s:\n%s", s.name, strings.Join(lines[max(0, len(lines)-30):], "\n"))
		}
		s.dump()
	}
	if s.server != nil {
		if err := s.server.Stop(); err != nil {
			s.t.Error(err)
		}
	}
}

// dump logs all objects of peerings.
func (s *site) dump() {
	ctx, cancel := context.WithTimeout(context.Background(), prompt)
	defer cancel()
	for _, list := range []client.ObjectList{
		&isthmus.PeeringList{}, &v1alpha1.NetworkConfigList{}, &v1alpha1.TunnelEndpointList{}, &v1alpha1.NatMappingList{}, &v1alpha1.IpamStorageList{},
	} {
		if s.client == nil || s.client.List(ctx, list) != nil {
			return
		}
		_ = meta.EachListItem(list, func(o runtime.Object) error {
			o.(client.Object).SetManagedFields(nil)
			text, err := json.Marshal(o)
			s.t.Logf("%s: %T %s", s.name, o, text)
			return err
		})
	}
}

// identity writes a kubeconfig with a token of a ServiceAccount in the installation namespace.
func (s *site) identity(account string) string {
	s.t.Helper()
	token := &authenticationv1.TokenRequest{}
	sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: installed, Name: account}}
	if err := s.client.SubResource("token").Create(s.t.Context(), sa, token); err != nil {
		s.t.Fatalf("token of %s: %v", account, err)
	}
	config, err := clientcmd.Load(s.server.Kubeconfig())
	if err != nil {
		s.t.Fatal(err)
	}
	for _, user := range config.AuthInfos {
		user.ClientCertificateData, user.ClientKeyData, user.Token = nil, nil, token.Status.Token
	}
	if s.via != "" {
		for _, cluster := range config.Clusters {
			cluster.Server = "https://" + s.via
		}
	}
	path := filepath.Join(s.dir, account+".kubeconfig")
	if err := clientcmd.WriteToFile(*config, path+".next"); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Rename(path+".next", path); err != nil { // renamed, because a process may be reading the previous file
		s.t.Fatal(err)
	}
	return path
}

// isthmus runs the program. The API servers have loopback addresses, so it adds the flags that
// permit such addresses for peers.
func (s *site) isthmus(args ...string) (string, error) {
	if args[0] == "peer" && slices.Contains(args, "--remote-kubeconfig") {
		for flag, of := range map[string]string{"--server": "--kubeconfig", "--remote-server": "--remote-kubeconfig"} {
			config, err := clientcmd.LoadFromFile(args[slices.Index(args, of)+1])
			if err != nil {
				return "", err
			}
			args = append(args, flag, config.Clusters[config.Contexts[config.CurrentContext].Cluster].Server)
		}
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), 5*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, binary, args...).CombinedOutput()
	return string(out), err
}

// peer peers two clusters by the command line, and waits until both Peerings are Ready.
func peer(t *testing.T, a, b *site, flags ...string) {
	t.Helper()
	if out, err := a.isthmus(append([]string{"peer", "--kubeconfig", a.kubeconfig, "--remote-kubeconfig", b.kubeconfig}, flags...)...); err != nil {
		t.Fatalf("isthmus peer %s %s: %v\n%s", a.name, b.name, err, out)
	}
	a.waitReady(b)
	b.waitReady(a)
}

// unpeer un-peers two clusters by the command line.
func unpeer(t *testing.T, a, b *site) {
	t.Helper()
	if out, err := a.isthmus("unpeer", "--kubeconfig", a.kubeconfig, "--remote-kubeconfig", b.kubeconfig); err != nil {
		t.Fatalf("isthmus unpeer %s %s: %v\n%s", a.name, b.name, err, out)
	}
}

// peering returns the Peering with another cluster, or nil.
func (s *site) peering(other *site) *isthmus.Peering {
	var list isthmus.PeeringList
	if err := s.client.List(s.t.Context(), &list); err != nil {
		return nil
	}
	for i := range list.Items {
		if list.Items[i].Spec.Cluster.ClusterID == other.id {
			return &list.Items[i]
		}
	}
	return nil
}

// waitReady waits until the Peering with another cluster is Ready.
func (s *site) waitReady(other *site) {
	s.t.Helper()
	s.waitCondition(other, isthmus.ConditionReady, metav1.ConditionTrue, "")
}

// waitCondition waits until a condition of the Peering has the status and, unless it is empty, the
// reason. It returns the condition.
func (s *site) waitCondition(other *site, kind string, status metav1.ConditionStatus, reason string) *metav1.Condition {
	s.t.Helper()
	var found *metav1.Condition
	s.eventually(fmt.Sprintf("%s's Peering with %s: %s=%s %s", s.name, other.name, kind, status, reason), func() (string, bool) {
		p := s.peering(other)
		if p == nil {
			return "there is no Peering", false
		}
		found = meta.FindStatusCondition(p.Status.Conditions, kind)
		if found == nil {
			return "there is no such condition", false
		}
		return fmt.Sprintf("%s %s: %s", found.Status, found.Reason, found.Message), found.Status == status && (reason == "" || found.Reason == reason)
	})
	return found
}

// conditionOf returns a condition of the Peering with another cluster, or the zero value if there
// is none.
func (s *site) conditionOf(other *site, kind string) metav1.Condition {
	s.t.Helper()
	if p := s.peering(other); p != nil {
		if c := meta.FindStatusCondition(p.Status.Conditions, kind); c != nil {
			return *c
		}
	}
	return metav1.Condition{}
}

// patience bounds the time for which a test waits for an expected event on a busy machine.
const patience = 90 * time.Second

// prompt is the time limit, on a busy machine, for operations that normally take less than a
// second.
const prompt = 30 * time.Second

// eventually waits until f returns true. f also returns a text about the present state, for the
// error message.
func (s *site) eventually(what string, f func() (have string, ok bool)) {
	s.t.Helper()
	s.within(patience, what, f)
}

// within is eventually with another time limit.
func (s *site) within(limit time.Duration, what string, f func() (have string, ok bool)) {
	s.t.Helper()
	have, ok := f()
	for deadline := time.Now().Add(limit); !ok; have, ok = f() {
		if time.Now().After(deadline) {
			s.t.Fatalf("%s did not come within %v; there is: %s", what, limit, have)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// reportTo makes the sites report failures to the subtest t until t ends.
func reportTo(t *testing.T, sites ...*site) {
	for _, s := range sites {
		before := s.t
		s.t = t
		t.Cleanup(func() { s.t = before })
	}
}

// cluster returns the identity of the site.
func (s *site) cluster() v1alpha1.ClusterIdentity {
	return v1alpha1.ClusterIdentity{ClusterID: s.id, ClusterName: s.name}
}

// tenant returns the tenant namespace here for another cluster.
func (s *site) tenant(other *site) string { return other.cluster().TenantNamespace() }

// join creates the Peering with another cluster. `isthmus peer` must have prepared both clusters
// before.
func (s *site) join(other *site, overrides isthmus.Overrides) {
	s.t.Helper()
	p := &isthmus.Peering{
		ObjectMeta: metav1.ObjectMeta{Name: other.cluster().UniqueName()},
		Spec: isthmus.PeeringSpec{
			Cluster:         other.cluster(),
			TenantNamespace: isthmus.TenantNamespace{Local: s.tenant(other), Remote: other.tenant(s)},
			Overrides:       overrides,
		},
	}
	s.eventually(fmt.Sprintf("a Peering of %s with %s", s.name, other.name), func() (string, bool) {
		err := s.client.Create(s.t.Context(), p.DeepCopy())
		return fmt.Sprint(err), err == nil || apierrors.IsAlreadyExists(err)
	})
}

// part deletes the Peering with another cluster. It does not wait.
func (s *site) part(other *site) {
	s.t.Helper()
	p := &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{Name: other.cluster().UniqueName()}}
	s.eventually(fmt.Sprintf("deletion of the Peering of %s with %s", s.name, other.name), func() (string, bool) {
		err := client.IgnoreNotFound(s.client.Delete(s.t.Context(), p))
		return fmt.Sprint(err), err == nil
	})
}

// rejoin creates the Peerings between all of the sites, and waits until all are Ready.
func rejoin(sites ...*site) {
	for _, s := range sites {
		for _, other := range sites {
			if s != other {
				s.join(other, isthmus.Overrides{})
			}
		}
	}
	for _, s := range sites {
		for _, other := range sites {
			if s != other {
				s.waitReady(other)
			}
		}
	}
}

// disjoin deletes all Peerings of the sites, and waits until they are gone.
func disjoin(sites ...*site) {
	for _, s := range sites {
		for _, other := range sites {
			if s != other {
				s.part(other)
			}
		}
	}
	for _, s := range sites {
		s.eventually("an end of the Peerings of "+s.name, func() (string, bool) {
			var list isthmus.PeeringList
			if err := s.client.List(s.t.Context(), &list); err != nil {
				return err.Error(), false
			}
			var have []string
			for _, p := range list.Items {
				c := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionReady)
				have = append(have, fmt.Sprintf("%s: %+v", p.Name, c))
			}
			return strings.Join(have, "; "), len(list.Items) == 0
		})
	}
}

// forgetEachOther calls disjoin, and then frees the clusters' networks, which would be held for a
// day.
func forgetEachOther(sites ...*site) {
	disjoin(sites...)
	for _, s := range sites {
		s.eventually("an IPAM state of "+s.name+" in which nothing is held", func() (string, bool) {
			err := released.EndHolds(s.t.Context(), s.client)
			return fmt.Sprint(err), err == nil && len(s.released()) == 0
		})
	}
}

// get reads an object and reports whether it exists. It tries again if a busy API server does not
// answer.
func (s *site) get(key types.NamespacedName, o client.Object) (found bool) {
	s.t.Helper()
	s.eventually(fmt.Sprintf("%T %v of %s", o, key, s.name), func() (string, bool) {
		err := s.client.Get(s.t.Context(), key, o)
		found = err == nil
		return fmt.Sprint(err), client.IgnoreNotFound(err) == nil
	})
	return found
}

// list reads objects. It tries again if a busy API server does not answer.
func (s *site) list(list client.ObjectList, options ...client.ListOption) {
	s.t.Helper()
	s.eventually(fmt.Sprintf("%T of %s", list, s.name), func() (string, bool) {
		err := s.client.List(s.t.Context(), list, options...)
		return fmt.Sprint(err), err == nil
	})
}

// ipamStorage returns the spec of the IpamStorage, or the zero value unless there is exactly one.
func (s *site) ipamStorage() v1alpha1.IpamStorageSpec {
	s.t.Helper()
	var list v1alpha1.IpamStorageList
	s.list(&list)
	if len(list.Items) != 1 {
		return v1alpha1.IpamStorageSpec{}
	}
	return list.Items[0].Spec
}

// released returns the IDs of peers that have left and whose networks are held.
func (s *site) released() (ids []string) {
	s.t.Helper()
	var list isthmus.NetworkAllocationList
	s.list(&list)
	for i := range list.Items {
		if list.Items[i].Spec.ReleasedAt != "" {
			ids = append(ids, list.Items[i].Spec.ClusterID)
		}
	}
	return ids
}

// leftovers returns the names of all objects of peerings.
func (s *site) leftovers() (all []string) {
	s.t.Helper()
	for _, list := range []client.ObjectList{&isthmus.PeeringList{}, &v1alpha1.NetworkConfigList{}, &v1alpha1.TunnelEndpointList{}, &v1alpha1.NatMappingList{}} {
		s.list(list)
		if err := meta.EachListItem(list, func(o runtime.Object) error {
			object := o.(client.Object)
			all = append(all, fmt.Sprintf("%T %s/%s (finalizers %v)", o, object.GetNamespace(), object.GetName(), object.GetFinalizers()))
			return nil
		}); err != nil {
			s.t.Fatal(err)
		}
	}
	ipamStorage, held := s.ipamStorage(), s.released()
	for _, id := range slices.Sorted(maps.Keys(ipamStorage.ClusterSubnets)) {
		if slices.Contains(held, id) { // networks are held for a day
			continue
		}
		all = append(all, fmt.Sprintf("IpamStorage of %s: %+v", id, ipamStorage.ClusterSubnets[id]))
	}
	for ip, m := range ipamStorage.EndpointMappings {
		all = append(all, fmt.Sprintf("IpamStorage: endpoint %s: %+v", ip, m))
	}
	for id := range ipamStorage.NatMappingsConfigured {
		all = append(all, "IpamStorage: NatMapping of "+id)
	}
	return all
}

// waitClean waits until no object of any peering is left.
func (s *site) waitClean() {
	s.t.Helper()
	s.eventually("no trace of a peering in "+s.name, func() (string, bool) {
		all := s.leftovers()
		return strings.Join(all, "\n"), len(all) == 0
	})
}

// tunnelEndpoint returns the TunnelEndpoint for another cluster, or nil.
func (s *site) tunnelEndpoint(other *site) *v1alpha1.TunnelEndpoint {
	s.t.Helper()
	te := &v1alpha1.TunnelEndpoint{}
	if !s.get(types.NamespacedName{Namespace: s.tenant(other), Name: other.cluster().UniqueName()}, te) {
		return nil
	}
	return te
}

// address returns a loopback address that only this site uses.
func (s *site) address() string {
	if s.own == "" {
		s.own, _, _ = strings.Cut(kubetest.Address(0), ":")
	}
	return s.own
}
