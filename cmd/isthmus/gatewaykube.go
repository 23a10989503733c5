package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"

	isthmusv1alpha1 "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/flowsync"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/inband"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/metric"
	"github.com/isthmus-net/isthmus/internal/owncluster"
	"github.com/isthmus-net/isthmus/internal/source/file"
	"github.com/isthmus-net/isthmus/internal/source/kube"
)

// kubeGateway is the command `isthmus gateway` if it reads its configuration from the objects of a
// cluster.
type kubeGateway struct {
	kubeconfig, namespace   string
	cluster                 v1alpha1.ClusterIdentity
	port                    uint16
	tunnels                 int
	mtu                     string
	nat                     file.NAT
	metricsAddr, statusAddr string
	flowLog                 gateway.FlowLog
	stateDirectory          string
	hostNetwork, votes      bool
	rotateKeys, patience    time.Duration
	secure                  metricsFlags

	// The method complete sets the fields below.
	source kube.GatewayOptions
	tunnel int // MTU of the tunnel in octets; 0: derived from the path to the peers
}

// kubeGatewayFlags returns the names of the flags that addFlags adds.
func kubeGatewayFlags() []string {
	names := []string{"kubeconfig", "namespace", "cluster-id", "cluster-name", "port", "tunnels", "mtu", "metrics-address", "metrics-secure", "metrics-cert-dir", "status-address", "flow-log", "flow-log-sample", "flow-log-per-second", "state-directory", "host-network", "votes", "rotate-keys", "rotation-patience"}
	for _, f := range new(file.NAT).Fields() {
		names = append(names, f.Flag)
	}
	return names
}

func (k *kubeGateway) addFlags(f *pflag.FlagSet) {
	f.StringVar(&k.kubeconfig, "kubeconfig", "", "kubeconfig file (default: the Pod's ServiceAccount)")
	f.StringVar(&k.namespace, "namespace", "", "namespace of the installation (default: $POD_NAMESPACE, else "+deploy.Namespace+")")
	f.StringVar(&k.cluster.ClusterID, "cluster-id", "", "ID of this cluster (default: the one in the ConfigMap that isthmus install writes, else the UID of kube-system)")
	f.StringVar(&k.cluster.ClusterName, "cluster-name", "", "display name of this cluster, for status and logs")
	f.Uint16Var(&k.port, "port", file.DefaultListenPort, "UDP port of WireGuard")
	f.IntVar(&k.tunnels, "tunnels", 1, "at most this many tunnels to one peer, 1 to 16, on UDP ports from --port upwards")
	f.StringVar(&k.mtu, "mtu", "auto", "MTU of the tunnel in octets, or auto: from the paths to the peers")
	for _, field := range k.nat.Fields() {
		if f.Var(field.Value, field.Flag, field.Usage); field.Value.Type() == "bool" {
			f.Lookup(field.Flag).NoOptDefVal = "true"
		}
	}
	f.StringVar(&k.metricsAddr, "metrics-address", file.DefaultMetricsAddress, "TCP address of /metrics, /healthz and /readyz; empty disables it")
	k.secure.add(f)
	f.StringVar(&k.statusAddr, "status-address", file.DefaultStatusAddress, "TCP address of /status and /trace; empty disables it")
	f.StringVar(&k.flowLog.File, "flow-log", "", "file for a line of JSON for each flow that opens, closes or is refused; - means standard output")
	f.IntVar(&k.flowLog.Sample, "flow-log-sample", 1, "log only one of this many flows")
	f.IntVar(&k.flowLog.PerSecond, "flow-log-per-second", gateway.DefaultFlowLogRate, "maximum number of lines in the flow log per second")
	f.BoolVar(&k.hostNetwork, "host-network", false, "the Pod has hostNetwork: true; the gateway creates its own network namespace on the node")
	f.DurationVar(&k.rotateKeys, "rotate-keys", 0, "age at which the WireGuard key is rotated; 0: only by isthmus rotate-key")
	f.DurationVar(&k.patience, "rotation-patience", 7*24*time.Hour, "how long a rotation waits for peers that do not use the published new key yet, at least 1h; 0: without limit")
	f.BoolVar(&k.votes, "votes", false, "let nodes vote on which gateway is active, if the cluster has at least three nodes")
	f.StringVar(&k.stateDirectory, "state-directory", "", "directory for the private key and the configuration, which a restarted gateway uses until the API server answers; empty disables it")
}

// complete validates the flags, and reads defaults from the environment.
func (k *kubeGateway) complete() error {
	if k.namespace == "" {
		k.namespace = os.Getenv("POD_NAMESPACE")
	}
	if k.namespace == "" {
		k.namespace = deploy.Namespace
	}
	if k.port == 0 {
		return cli.Usage("--port 0: want a UDP port from 1 to 65535")
	}
	if k.tunnels < 1 || k.tunnels > fabric.MaxTunnels {
		return cli.Usage("--tunnels %d: want 1 to %d", k.tunnels, fabric.MaxTunnels)
	}
	if last := int(k.port) + k.tunnels - 1; last > 65535 {
		return cli.Usage("--tunnels %d: the last would listen on port %d (--port is %d); want ports up to 65535", k.tunnels, last, k.port)
	}
	if p := kube.QuestionPort; int(k.port) <= p && p < int(k.port)+k.tunnels {
		return cli.Usage("--port %d: a tunnel would use port %d, which gateways use for messages to each other; want other ports", k.port, p)
	}
	if k.mtu != "auto" {
		n, err := strconv.Atoi(k.mtu)
		if err != nil || n < file.MinMTU || n > file.MaxMTU {
			return cli.Usage("--mtu %q: want auto or a number from %d to %d", k.mtu, file.MinMTU, file.MaxMTU)
		}
		k.tunnel = n
	}
	for _, n := range []struct {
		flag  string
		value int
	}{{"flow-log-sample", k.flowLog.Sample}, {"flow-log-per-second", k.flowLog.PerSecond}} {
		if n.value < 1 || n.value > file.MaxFlowLog {
			return cli.Usage("--%s %d: want 1 to %d", n.flag, n.value, file.MaxFlowLog)
		}
	}
	for _, a := range []struct{ flag, address string }{{"metrics-address", k.metricsAddr}, {"status-address", k.statusAddr}} {
		if _, _, err := net.SplitHostPort(a.address); a.address != "" && err != nil {
			return cli.Usage("--%s %q: want host:port, or :port for all addresses", a.flag, a.address)
		}
	}
	for _, d := range []struct {
		flag  string
		value time.Duration
	}{{"rotate-keys", k.rotateKeys}, {"rotation-patience", k.patience}} {
		if d.value != 0 && d.value < time.Hour {
			return cli.Usage("--%s %v: want an hour or more, or 0", d.flag, d.value)
		}
	}
	if err := k.secure.complete(); err != nil {
		return err
	}
	if k.cluster.ClusterID != "" {
		if wrong := fabric.CheckClusterID(k.cluster.ClusterID); wrong != "" {
			return cli.Usage("--cluster-id: %s", wrong)
		}
	}
	if wrong := fabric.CheckClusterName(k.cluster.ClusterName); wrong != "" {
		return cli.Usage("--cluster-name: %s", wrong)
	}
	config, err := owncluster.RESTConfig(k.kubeconfig)
	if err != nil {
		return cli.Usage("%w; without a cluster, want --config DIR", err)
	}
	pod := os.Getenv("POD_NAME")
	if pod == "" {
		return cli.Usage("POD_NAME is not set; want the name of this Pod (downward API, metadata.name)")
	}
	ip, err := netip.ParseAddr(os.Getenv("POD_IP"))
	if err != nil {
		return cli.Usage("POD_IP is %q; want the address of this Pod (downward API, status.podIP)", os.Getenv("POD_IP"))
	}
	node := os.Getenv("NODE_NAME")
	switch {
	case k.hostNetwork && k.votes:
		return cli.Usage("--votes cannot be combined with --host-network: nodes vote only for gateways with their own network")
	case k.hostNetwork:
		node = "" // with the host's network, the nodes' VXLAN tunnels do not end in this Pod
	case node == "":
		return cli.Usage("NODE_NAME is not set; want the name of the Node of this Pod (downward API, spec.nodeName), or --host-network")
	case !ip.Unmap().Is4():
		return cli.Usage("POD_IP is %s; want an IPv4 address, or --host-network: nodes reach this Pod by VXLAN over IPv4", ip)
	}
	config.UserAgent = "isthmus-gateway/" + cli.Version()
	k.source = kube.GatewayOptions{Config: config, Namespace: k.namespace, Pod: pod, PodIP: ip.Unmap(), Node: node, Cluster: k.cluster, Tunnels: k.tunnels, Votes: k.votes, StateDirectory: k.stateDirectory,
		RotateKeys: k.rotateKeys, RotationPatience: k.patience}
	return nil
}

// After a gateway has published its address, nodes may take nodesFollow to switch to it. Only then
// does the gateway start handshakes with its peers.
const nodesFollow = time.Second

// run runs one replica until ctx ends. It sets Source, Beside and the other fields of options that
// depend on the replica.
func (k *kubeGateway) run(ctx context.Context, options gateway.Options) error {
	log := options.Log
	k.source.Log = log
	kube.UseLogger(log)
	front := &front{own: prometheus.NewRegistry(), idle: prometheus.NewRegistry()}
	k.source.Yield = front.yield
	replica, err := kube.NewGateway(k.source)
	if err != nil {
		return err
	}
	front.replica = replica
	options.Flows = flowsync.NewKeeper()
	front.flows = options.Flows
	front.own.MustRegister(replica.Collector(), options.Flows)
	front.idle.MustRegister(metric.Build(cli.Version()), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	secure, err := k.secure.secure(k.kubeconfig, log)
	if err != nil {
		return err
	}
	stop, err := front.serve(k.metricsAddr, secure, k.statusAddr, log)
	if err != nil {
		return err
	}
	defer stop()
	log.Info("replica starts", "pod", k.source.Pod, "node", os.Getenv("NODE_NAME"), "address", k.source.PodIP, "version", cli.Version())

	events, err := kube.NewPodEvents(k.source.Config, "gateway", k.source.Namespace, k.source.Pod, types.UID(os.Getenv("POD_UID")))
	if err != nil {
		return err
	}
	watching, unwatch := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() { reportStandby(watching, events, replica, log) })
	defer watch.Wait()
	defer unwatch()
	options.PodNetwork, options.Gate = !k.hostNetwork, replica.MaySend
	options.InBand = k.inBand(replica)
	link := flowsync.NewLink(options.Flows, k.linkOptions(replica))
	linked, unlink := context.WithCancel(context.WithoutCancel(ctx))
	var linking sync.WaitGroup
	linking.Go(func() { link.Run(linked) })
	defer linking.Wait()
	defer unlink()
	serve := func(ctx context.Context, begin <-chan struct{}) error {
		options.Source = func(ctx context.Context, deliver func(gateway.Config, error)) {
			replica.Snapshots(ctx, func(s kube.Snapshot, err error) {
				deliver(gateway.Config{Gateway: s.Gateway, Refused: s.Problems, PrivateKey: gateway.Key(s.Keys.Private), NextKey: gateway.Key(s.Keys.Next),
					ListenPort: k.port, Tunnels: k.tunnels, MTU: k.tunnel, NAT: k.nat.Config(), FlowLog: k.flowLog, PodNetwork: s.PodNetwork, Preshared: presharedOf(s.Preshared)}, err)
			})
		}
		options.Ready, options.Owner, options.Mandate = replica.Ready, replica.Owner, replica.Mandate
		calls := make(chan struct{})
		options.Calls = calls
		call := sync.OnceFunc(func() { close(calls) })
		placed := sync.OnceFunc(func() { time.AfterFunc(nodesFollow, call) })
		options.Beside = func(ctx context.Context, r gateway.Running) {
			front.set(&r)
			defer front.set(nil)
			time.AfterFunc(2*nodesFollow, call) // start handshakes even if the address is not published yet
			announce := sync.OnceFunc(func() { reportActive(ctx, events, replica, log) })
			replica.Write(ctx, placed, func() (kube.Report, error) {
				s := r.Status()
				announce()
				reportPod(ctx, events, s, log)
				return reportOf(s), nil
			})
			<-ctx.Done() // the gateway keeps forwarding until the nodes use another one
		}
		known := make(chan struct{})
		options.Begin = known
		go func() { // ends when ctx ends
			select {
			case <-begin:
				if link.Await(ctx); ctx.Err() == nil {
					close(known)
				}
			case <-ctx.Done():
			}
		}()
		return gateway.Run(ctx, options)
	}
	err = replica.Run(ctx, serve, func() error { return gateway.Clear(options.PodNetwork, log) })
	if err != nil && ctx.Err() == nil {
		if eventErr := events.Warn(ctx, "Failed", endedMessage(err)); eventErr != nil {
			log.Warn("cannot send an Event about the failure", "error", eventErr)
		}
	}
	return err
}

// endedMessage returns the message of an Event about a gateway that ended with an error. The log
// has the whole error.
func endedMessage(err error) string {
	return "the gateway ended: " + kubeerr.Plain("the API server", err).Error()
}

func presharedOf(keys map[string]kube.PresharedKey) map[string]datapath.PresharedKeys {
	all := make(map[string]datapath.PresharedKeys, len(keys))
	for id, k := range keys {
		all[id] = datapath.PresharedKeys{ID: k.ID, Key: k.Key, Previous: k.Previous, Changing: k.Changing}
	}
	return all
}

// linkOptions returns the options of the link. Over the link, the gateways of the installation copy
// flows to each other.
func (k *kubeGateway) linkOptions(replica *kube.Gateway) flowsync.Options {
	return flowsync.Options{
		Listen: func() (net.Listener, error) {
			return net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(k.source.PodIP, flowsync.Port)))
		},
		Dial: func(ctx context.Context, to netip.Addr) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", netip.AddrPortFrom(to, flowsync.Port).String())
		},
		Key: replica.SharedKey, Others: replica.Others, Log: k.source.Log,
	}
}

// inBand returns the options for the managers' connections to API servers through the tunnel.
func (k *kubeGateway) inBand(replica *kube.Gateway) *gateway.InBand {
	return &gateway.InBand{
		Listen: func() (net.Listener, error) {
			return net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(k.source.PodIP, inband.ManagerPort)))
		},
		Key: replica.SharedKey,
		API: replica.DialAPIServer,
	}
}

// reportActive sends an Event that this replica is active, with the reason.
func reportActive(ctx context.Context, events *kube.PodEvents, replica *kube.Gateway, log *slog.Logger) {
	m := replica.Mandate()
	if m == nil {
		return
	}
	note := fmt.Sprintf("this gateway is active, epoch %d", m.Epoch)
	if why := m.String(); why != "" {
		note += ": " + why
	}
	if err := events.Note(ctx, isthmusv1alpha1.EventActive, note); err != nil && ctx.Err() == nil {
		log.Debug("cannot send the Event about this active gateway", "error", err) // not a warning, because the Lease has the same information
	}
}

// reportPod sends Events about faults of this gateway itself. Faults of peers are reported in
// TunnelEndpoints.
func reportPod(ctx context.Context, events *kube.PodEvents, s gateway.Status, log *slog.Logger) {
	var err error
	if wrong := slices.Concat(s.Config.Errors, s.Config.Problems); len(wrong) > 0 {
		err = events.Warn(ctx, "NotApplied", strings.Join(wrong, "; "))
	} else {
		err = events.Mended(ctx, "the gateway's configuration is applied again")
	}
	if err != nil && ctx.Err() == nil {
		log.Debug("cannot send an Event", "error", err) // not a warning, because readiness and status show the fault, too
	}
}

// standbyInterval is how often a standby checks whether it could take over.
const standbyInterval = 10 * time.Second

// reportStandby sends Events while this replica is a standby and could not take over. It returns
// when ctx ends.
func reportStandby(ctx context.Context, events *kube.PodEvents, replica *kube.Gateway, log *slog.Logger) {
	reported := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(standbyInterval):
		}
		var err error
		switch why := replica.CannotTakeOver(); {
		case why != nil:
			reported, err = true, events.Warn(ctx, isthmusv1alpha1.EventCannotTakeOver, why.Error())
		case reported:
			reported, err = false, events.Mended(ctx, "a majority of the nodes that vote answers this gateway again")
		}
		if err != nil && ctx.Err() == nil {
			log.Debug("cannot send the Event about this standby, which cannot take over", "error", err) // not a warning, because /readyz has the same information
		}
	}
}

// reportOf returns the part of a status that is written into TunnelEndpoints.
func reportOf(s gateway.Status) kube.Report {
	r := kube.Report{Interface: s.Host.Interface, Index: s.Host.Index, NextHop: s.Host.NextHop}
	for _, p := range s.Peers {
		peer := kube.PeerReport{
			ID: p.ID, Status: v1alpha1.ConnectionStatus(p.State), Reason: p.Reason, Message: p.Message, Endpoint: p.Resolved, PublicKey: p.PublicKey,
			RTT:        time.Duration(p.RTT * float64(time.Second)),
			AllowedIPs: [2]netip.Prefix{p.Rules.RemotePodsHere, p.Rules.RemoteExternal},
			Preshared:  p.Preshared,
			OwnKey:     p.OwnKey,
		}
		r.Peers = append(r.Peers, peer)
		if p.Lags {
			r.Rotation.Lagging = append(r.Rotation.Lagging, p.ID)
		}
	}
	r.Rotation.Next = [32]byte(s.NextKey)
	return r
}
