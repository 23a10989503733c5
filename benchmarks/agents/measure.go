package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// The roles of the measured process.
const (
	agentRole   = "route-agent"
	gatewayRole = "gateway"
)

const (
	restTime      = 30 * time.Second
	repeats       = 10                     // runs of each change
	changePause   = 400 * time.Millisecond // pause between two changes, without which the process would handle both at once
	quietInterval = time.Second            // interval in which a settled process uses almost no CPU
)

// A result holds the figures of one cluster size. All sizes have the same rows.
type result struct {
	size
	rows []row
}

type row struct{ what, value string }

func (r *result) add(what, format string, args ...any) {
	r.rows = append(r.rows, row{what, fmt.Sprintf(format, args...)})
	log.Printf("%d nodes, %d peers: %s: %s", r.nodes, r.peers, what, r.rows[len(r.rows)-1].value)
}

// A subject is the measured process in its cluster.
type subject struct {
	*world
	options
	tap   *tap
	cmd   *exec.Cmd
	pid   int
	idle  float64 // CPU seconds per second at rest
	moves int
}

// options select the measured program, its role and the changes to measure.
type options struct {
	role, program string
	repeats       int // runs of each change; 0: the default of that change
	changes       *regexp.Regexp
	profiles      string // output directory; empty: no profiles
}

func measureSize(ctx context.Context, s size, o options) (r *result, err error) {
	user := "system:serviceaccount:" + namespace + ":isthmus-" + o.role
	began := time.Now()
	if err := underlay(o.role); err != nil {
		return nil, err
	}
	w, err := newWorld(ctx, s, user)
	if w != nil {
		defer func() { err = errors.Join(err, w.close()) }()
	}
	if err != nil {
		return nil, err
	}
	log.Printf("%d nodes, %d pods, %d peers are there after %.0f s", s.nodes, s.nodes*s.pods, s.peers, time.Since(began).Seconds())
	u, err := url.Parse(w.server.URL())
	if err != nil {
		return nil, err
	}
	p := &subject{world: w, options: o}
	if p.tap, err = newTap(u.Host); err != nil {
		return nil, err
	}
	defer p.tap.listener.Close()
	if err := p.move(ctx); err != nil { // otherwise the TunnelEndpoints have no active gateway
		return nil, err
	}
	if err := p.start(o.program, user); err != nil {
		return nil, err
	}
	defer func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		_ = run("ip link del isthmus.vxlan")
		_ = run("ip link del eth0")
	}()
	r = &result{size: s}
	return r, p.measure(ctx, r)
}

// underlay creates the network devices of the measured node, or of the gateway's Pod.
func underlay(role string) error {
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return err
	}
	own := nodeAddr(0) + "/16"
	if role == gatewayRole {
		own = gatewayAddr(0) + "/32"
	}
	return run("ip link set lo up", "ip link add eth0 type bridge", "ip addr add "+own+" dev eth0", "ip link set eth0 up", "ip route add default dev eth0")
}

func run(commands ...string) error {
	for _, c := range commands {
		words := strings.Fields(c)
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", c, err, out)
		}
	}
	return nil
}

// start starts the process with the API permissions that it has in a real cluster.
func (p *subject) start(program, user string) error {
	cert, key, err := p.server.ClientCert(user)
	if err != nil {
		return err
	}
	config := clientcmdapi.NewConfig()
	config.Clusters["large"] = &clientcmdapi.Cluster{Server: "https://" + p.tap.listener.Addr().String(), CertificateAuthorityData: p.server.CA()}
	config.AuthInfos["us"] = &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}
	config.Contexts["large"], config.CurrentContext = &clientcmdapi.Context{Cluster: "large", AuthInfo: "us"}, "large"
	kubeconfig := filepath.Join(p.dir, p.role+".kubeconfig")
	if err := clientcmd.WriteToFile(*config, kubeconfig); err != nil {
		return err
	}
	p.cmd = exec.Command(program, p.role, "--kubeconfig", kubeconfig, "--namespace", namespace, "--state-directory", filepath.Join(p.dir, "state"), "--metrics-address", "", "--status-address", "")
	p.cmd.Env = append(os.Environ(), "NODE_NAME="+nodeName(0))
	if p.role == gatewayRole {
		p.cmd.Args = append(p.cmd.Args, "--cluster-id", "ffffffff-0000-4000-8000-000000000000")
		p.cmd.Env = append(os.Environ(), "NODE_NAME="+nodeName(1), "POD_NAME="+gatewayName(0), "POD_IP="+gatewayAddr(0))
	}
	output, err := os.Create(filepath.Join(p.dir, "log"))
	if err != nil {
		return err
	}
	defer output.Close()
	p.cmd.Stderr = output
	if err := os.Mkdir(filepath.Join(p.dir, "state"), 0o700); err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.pid = p.cmd.Process.Pid
	return nil
}

// settle waits until the process is almost idle, for at most a minute.
func (p *subject) settle(ctx context.Context) error {
	for range 60 {
		before, begin := cpu(p.pid), time.Now()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(quietInterval):
		}
		if busy := (cpu(p.pid) - before).Seconds() / time.Since(begin).Seconds(); busy < p.idle*1.5+0.003 {
			return nil
		}
	}
	return nil
}

func (p *subject) measure(ctx context.Context, r *result) error {
	for deadline := time.Now().Add(5 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if out, _ := exec.Command("ip", "-j", "route", "show", "table", "4201").Output(); strings.Count(string(out), `"dst"`) >= 2*p.peers {
			break
		}
		if err := p.cmd.Process.Signal(syscall.Signal(0)); time.Now().After(deadline) || ctx.Err() != nil {
			f, _ := os.ReadFile(filepath.Join(p.dir, "log"))
			return fmt.Errorf("the routes do not exist (%w); the process logged\n%s", err, f[max(0, len(f)-2000):])
		}
	}
	p.idle = 0.02
	if err := p.settle(ctx); err != nil {
		return err
	}
	watches, others, err := auditedRequests(p.audit)
	if err != nil {
		return err
	}
	r.add("at start: CPU, s", "%.2f", cpu(p.pid).Seconds())
	r.add("at start: read of the API server, KiB", "%d", p.tap.read.Load()>>10)
	r.add("watches", "%d", watches)
	r.add("at start: other requests", "%d", others)

	before, read, requests := cpu(p.pid), p.tap.read.Load(), others
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(restTime):
	}
	p.idle = (cpu(p.pid) - before).Seconds() / restTime.Seconds()
	_, others, err = auditedRequests(p.audit)
	if err != nil {
		return err
	}
	r.add("at rest: CPU, of a core", "%.2f %%", 100*p.idle)
	r.add("at rest: octets a second of the API server", "%.0f", float64(p.tap.read.Load()-read)/restTime.Seconds())
	r.add("at rest: requests a minute", "%.0f", float64(others-requests)*60/restTime.Seconds())
	r.add("resident memory, MiB", "%d", memory(p.pid, "VmRSS")>>20)
	r.add("routes, policy rules, neighbours, FDB", "%d, %d, %d, %d", p.count("ip route show table all"), p.count("ip rule show"),
		p.count("ip neigh show nud permanent"), p.count("bridge fdb show dev isthmus.vxlan"))

	for _, c := range p.all() {
		if !p.changes.MatchString(c.what) {
			continue
		}
		if err := p.settle(ctx); err != nil {
			return err
		}
		n := cmp.Or(p.repeats, c.times, repeats)
		done, err := p.profile(ctx, c.what)
		if err != nil {
			return err
		}
		_, requests, err := auditedRequests(p.audit)
		before, read, begin := cpu(p.pid), p.tap.read.Load(), time.Now()
		for i := range n {
			if err := c.do(ctx, i); err != nil {
				return fmt.Errorf("%s: %w", c.what, err)
			}
			time.Sleep(changePause)
		}
		if err := p.settle(ctx); err != nil {
			return err
		}
		if err := done(); err != nil {
			return err
		}
		_, since, failed := auditedRequests(p.audit)
		if err := errors.Join(err, failed); err != nil {
			return err
		}
		spent := (cpu(p.pid) - before).Seconds() - p.idle*time.Since(begin).Seconds()
		r.add(c.what+": CPU, ms", "%.1f", max(0, 1000*spent/float64(n)))
		r.add(c.what+": octets read", "%d", (p.tap.read.Load()-read)/int64(n))
		r.add(c.what+": requests", "%.1f", float64(since-requests)/float64(n))
	}
	return nil
}

// profile starts a perf(1) profile of the process; done ends it.
func (p *subject) profile(ctx context.Context, what string) (done func() error, err error) {
	if p.profiles == "" {
		return func() error { return nil }, nil
	}
	name := filepath.Join(p.profiles, fmt.Sprintf("%d-%d %s.perf", p.nodes, p.peers, what))
	cmd := exec.CommandContext(ctx, "perf", "record", "-q", "-g", "-F", "1999", "-p", strconv.Itoa(p.pid), "-o", strings.ReplaceAll(name, " ", "-"))
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() error {
		_ = cmd.Process.Signal(os.Interrupt)
		err := cmd.Wait()
		if cmd.ProcessState.Exited() || cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() == syscall.SIGINT { // perf ended because done interrupted it
			return nil
		}
		return fmt.Errorf("perf: %w", err)
	}, nil
}

// count returns the number of Isthmus's objects in the output of an ip(8) command.
func (p *subject) count(command string) (n int) {
	words := strings.Fields(command)
	out, _ := exec.Command(words[0], words[1:]...).Output()
	for line := range strings.Lines(string(out)) {
		if ours := strings.Contains(line, "proto 72") || strings.Contains(line, "proto 71") || strings.Contains(line, " 42"); ours || words[1] != "route" && words[1] != "rule" {
			n++
		}
	}
	return n
}

// A change is one measured operation. do gets the number of earlier runs of the change.
type change struct {
	what  string
	times int // runs; 0: the constant repeats
	do    func(ctx context.Context, i int) error
}

func (p *subject) all() []change {
	node := func(i int) *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(i)}} }
	te := func(i int) *v1alpha1.TunnelEndpoint {
		return &v1alpha1.TunnelEndpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("peer-%d", i)}}
	}
	addPod := func(ctx context.Context, on, i int) error {
		pod := p.pod(on, i)
		pod.ManagedFields, pod.TypeMeta = nil, metav1.TypeMeta{}
		status := pod.Status
		if err := p.api.Create(ctx, pod); err != nil {
			return err
		}
		pod.Status = status
		return p.api.Status().Update(ctx, pod)
	}
	removePod := func(ctx context.Context, on, i int) error {
		pod := p.pod(on, i)
		pod.TypeMeta = metav1.TypeMeta{}
		return p.api.Delete(ctx, pod, client.GracePeriodSeconds(0))
	}
	all := []change{
		{"another node sends a heartbeat", 0, func(ctx context.Context, i int) error {
			return p.merge(ctx, node(3), true, map[string]any{"status": map[string]any{"daemonEndpoints": map[string]any{"kubeletEndpoint": map[string]any{"Port": 10250 + i}}}})
		}},
		{"a pod is added on another node", 0, func(ctx context.Context, i int) error { return addPod(ctx, 4, 200+i) }},
		{"a pod is removed on another node", 0, func(ctx context.Context, i int) error { return removePod(ctx, 4, 200+i) }},
		{"a pod is added on this node", 0, func(ctx context.Context, i int) error { return addPod(ctx, 0, 200+i) }},
		{"a pod's link is added on this node", 0, func(_ context.Context, i int) error {
			name := fmt.Sprintf("pod%d", i)
			return run("ip link add "+name+" type veth peer name "+name+"p", "ip link set "+name+" up", "ip link set "+name+"p up", "ip route add "+podAddr(0, 200+i)+"/32 dev "+name)
		}},
		{"a pod's link is removed on this node", 0, func(_ context.Context, i int) error { return run(fmt.Sprintf("ip link del pod%d", i)) }},
		{"a node is added", 0, func(ctx context.Context, i int) error {
			n := p.node(p.nodes + i)
			n.ManagedFields, n.TypeMeta = nil, metav1.TypeMeta{}
			status := n.Status
			if err := p.api.Create(ctx, n); err != nil {
				return err
			}
			n.Status = status
			return p.api.Status().Update(ctx, n)
		}},
		{"a peer's latency changes", 0, func(ctx context.Context, i int) error {
			return p.merge(ctx, te(i), true, map[string]any{"status": p.status(i, p.moves%2, 100+i)})
		}},
		{"an endpoint is mapped for a peer", 0, func(ctx context.Context, i int) error {
			return p.changeIPAM(ctx, func(b ipam.State) (ipam.State, error) {
				b, _, err := b.MapEndpoint(p.endpoint(i).Spec.ClusterIdentity.ClusterID, netip.AddrFrom4([4]byte{172, 20, 0, byte(i)}))
				return b, err
			})
		}},
		{"a peer's answer changes", 0, func(ctx context.Context, i int) error {
			return p.changeIPAM(ctx, func(b ipam.State) (ipam.State, error) {
				seen := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i % 2 << 5), 0, 0}), ownPods.Bits())
				return b.Answered(p.endpoint(0).Spec.ClusterIdentity.ClusterID, seen, netip.Prefix{}), nil
			})
		}},
		{"a peer gets networks", 5, func(ctx context.Context, i int) error {
			id := p.endpoint(p.peers + i).Spec.ClusterIdentity.ClusterID
			pod, external := remote(p.peers + i)
			want := ipam.Request{ID: id, WantPod: netip.MustParsePrefix(pod), WantExternal: netip.MustParsePrefix(external)}
			want.Pod, want.External = want.WantPod, want.WantExternal
			return p.changeIPAM(ctx, func(b ipam.State) (ipam.State, error) {
				b, _, err := b.Allocate(want)
				return b, err
			})
		}},
		{"a peer's TunnelEndpoint is created", 5, func(ctx context.Context, i int) error {
			te := p.endpoint(p.peers + i)
			te.ManagedFields, te.TypeMeta = nil, metav1.TypeMeta{}
			if err := p.api.Create(ctx, te); err != nil {
				return err
			}
			te.Status = p.status(p.peers+i, p.moves%2, 20)
			return p.api.Status().Update(ctx, te)
		}},
		{"a peer's gateway changes", 5, func(ctx context.Context, i int) error {
			return p.merge(ctx, te(i), false, map[string]any{"spec": map[string]any{"endpointIP": fmt.Sprintf("198.19.0.%d", i)}})
		}},
		{"a peer is removed", 5, func(ctx context.Context, i int) error {
			if err := client.IgnoreNotFound(p.api.Delete(ctx, te(p.peers+i))); err != nil {
				return err
			}
			id := p.endpoint(p.peers + i).Spec.ClusterIdentity.ClusterID
			return p.changeIPAM(ctx, func(b ipam.State) (ipam.State, error) { return b.Release(id), nil })
		}},
	}
	if p.role == gatewayRole {
		return all
	}
	return append(all, change{"the gateway moves", 2, func(ctx context.Context, _ int) error { p.moves++; return p.move(ctx) }})
}

// changeIPAM changes the IPAM state by the function that the manager uses.
func (w *world) changeIPAM(ctx context.Context, f func(ipam.State) (ipam.State, error)) error {
	_, err := w.ipam.Update(ctx, f)
	return err
}

// move makes the other gateway active: it writes the objects that a gateway writes on takeover.
func (p *subject) move(ctx context.Context) error {
	g := p.moves % 2
	for i, role := range []string{v1alpha1.GatewayActive, v1alpha1.GatewayStandby} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: gatewayName((g + i) % 2)}}
		if err := p.merge(ctx, pod, false, map[string]any{"metadata": map[string]any{"labels": map[string]any{v1alpha1.LabelGateway: role}}}); err != nil {
			return err
		}
	}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "isthmus-gateway"}}
	if err := p.merge(ctx, service, false, map[string]any{"metadata": map[string]any{"annotations": map[string]any{
		v1alpha1.AnnotationGatewayNodeIP: nodeAddr(g + 1), isthmus.AnnotationGateways: gatewayAddr(g)}}}); err != nil {
		return err
	}
	if p.moves == 0 {
		return nil // fill has already made this gateway the active one in the TunnelEndpoints
	}
	for i := range p.peers {
		te := &v1alpha1.TunnelEndpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("peer-%d", i)}}
		if err := p.merge(ctx, te, true, map[string]any{"status": p.status(i, g, 20)}); err != nil {
			return err
		}
	}
	return nil
}
