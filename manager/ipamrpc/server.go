// Package ipamrpc serves Liqo's gRPC service "ipam" (docs/liqo-v0.md, section 5.1) from the IPAM
// state. Virtual kubelets request the address by which a peer reaches an endpoint of ours, and the
// address by which we reach a pod of the peer.
//
//	caller ─► gate: connections ─► TLS: who it is ─► rate ─► guarded? ─► the State, which notes who asked
//
// Liqo's kubelets use neither authentication nor TLS, so any client that reaches the port could
// decide which endpoints peers reach. Callers therefore need a client certificate, unless
// Options.Plain is set.
//
// ipam.pb.go holds the messages of ipam.proto, as protoc-gen-go makes them. The service is so small
// that it is described by hand below.
package ipamrpc

//go:generate go -C ../../internal/tools run ./protogo ../../manager/ipamrpc/ipam.proto

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
)

const (
	// maxRequest bounds a request in bytes: two short strings.
	maxRequest = 4 << 10
	// maxStreams bounds the requests of one connection that wait at a time.
	maxStreams = 128
	// maxIdle is how long a connection may stay without a request.
	maxIdle = 5 * time.Minute
	// drain is how long requests have to end when the server does.
	drain = 3 * time.Second
)

// Options of Serve: its address and the clients that it accepts.
type Options struct {
	// Address is the TCP address to listen on; Liqo's components expect port 6000.
	Address string
	// TLS is the result of the function TLS. Callers are identified by their certificates.
	TLS *tls.Config
	// Plain answers whoever comes, without TLS, as Liqo's own service does: a caller is its
	// address. A NetworkPolicy has to keep others away (deploy/networkpolicy/ipam.yaml).
	Plain bool
	// Allow are the networks whose endpoints may be mapped although they are Guarded: nodes,
	// Services, pods of other peers.
	Allow []netip.Prefix
	// What finds out what has an address now, in any words, such as "node" or "pod"; empty when the
	// cluster knows nothing there. It may be nil, and is asked before an endpoint is mapped.
	What func(context.Context, netip.Addr) (string, error)
}

// Serve answers until ctx ends; then it returns nil. It needs a Store that is loaded and may be
// written to, so it runs on the leader only. Errors reach the caller with the code Unknown, as
// Liqo's do.
func Serve(ctx context.Context, o Options, s *ipamstore.Store, log *slog.Logger) error {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", o.Address)
	if err != nil {
		return fmt.Errorf("IPAM service: %w", err)
	}
	return serve(ctx, listener, o, s, log)
}

func serve(ctx context.Context, listener net.Listener, o Options, s *ipamstore.Store, log *slog.Logger) error {
	settings := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxRequest), grpc.MaxConcurrentStreams(maxStreams), grpc.ConnectionTimeout(10 * time.Second),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: maxIdle}),
	}
	if o.TLS == nil && !o.Plain {
		return errors.Join(errors.New("IPAM service: want certificates of server and callers, or to be told that it is plain"), listener.Close())
	}
	if o.TLS != nil {
		settings = append(settings, grpc.Creds(credentials.NewTLS(o.TLS)))
	}
	g := grpc.NewServer(settings...)
	g.RegisterService(&service, &server{store: s, log: log, allow: o.Allow, what: o.What, callers: newCallers()})
	ended := make(chan error, 1)
	go func() { ended <- g.Serve(newGate(listener)) }()
	select {
	case err := <-ended:
		return fmt.Errorf("IPAM service on %v: %w", listener.Addr(), err)
	case <-ctx.Done():
	}
	impatient := time.AfterFunc(drain, g.Stop)
	defer impatient.Stop()
	g.GracefulStop()
	if err := <-ended; !errors.Is(err, grpc.ErrServerStopped) { // which says that ctx ended before it began
		return err
	}
	return nil
}

// service has no package in its name, because Liqo's has none.
var service = grpc.ServiceDesc{
	ServiceName: "ipam",
	HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{
		method("MapEndpointIP", (*server).mapEndpointIP),
		method("UnmapEndpointIP", (*server).unmapEndpointIP),
		method("GetHomePodIP", (*server).getHomePodIP),
		method("BelongsToPodCIDR", (*server).belongsToPodCIDR),
	},
	Metadata: "ipam.proto",
}

// method describes a unary method. There are no interceptors.
func method[Request, Response any](name string, call func(*server, context.Context, *Request) (*Response, error)) grpc.MethodDesc {
	return grpc.MethodDesc{
		MethodName: name,
		Handler: func(srv any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			in, s := new(Request), srv.(*server)
			if err := s.callers.admit(callerOf(ctx), time.Now()); err != nil {
				return nil, err
			}
			if err := decode(in); err != nil {
				return nil, err
			}
			return call(s, ctx, in)
		},
	}
}

type server struct {
	store   *ipamstore.Store
	log     *slog.Logger
	allow   []netip.Prefix
	what    func(context.Context, netip.Addr) (string, error) // or nil
	callers *callers
}

func (s *server) mapEndpointIP(ctx context.Context, in *MapRequest) (*MapResponse, error) {
	seen, err := s.mapEndpoint(ctx, in.GetClusterID(), in.GetIp())
	if err != nil {
		return nil, s.refuse("map endpoint", in, err)
	}
	return &MapResponse{Ip: seen.String()}, nil
}

func (s *server) mapEndpoint(ctx context.Context, id, text string) (seen netip.Addr, err error) {
	ip, err := parse(id, text)
	if err != nil {
		return seen, err
	}
	if !s.store.State().KnowsNodes() {
		return seen, errors.New("the nodes and Services of this cluster are not known yet, so that nobody knows whether the endpoint is one of them; try again")
	}
	if what := s.store.State().Guarded(ip); what != "" && !slices.ContainsFunc(s.allow, func(p netip.Prefix) bool { return p.Contains(ip) }) {
		return seen, fmt.Errorf("%s; want --ipam-allow with a network that it is in, if peers are to reach it", what)
	}
	caller, what := callerOf(ctx), ""
	now := s.store.State()
	next, seen, err := now.MapEndpoint(id, ip)
	if err == nil && s.what != nil && next.Mapped(id, ip) && !slices.Contains(now.AskedFor(id, ip), caller) {
		what, err = s.what(ctx, ip)
	}
	if err != nil {
		return seen, err
	}
	err = s.update(ctx, func(b ipam.State) (next ipam.State, err error) {
		if next, seen, err = b.MapEndpoint(id, ip); err == nil {
			next, err = next.Asked(id, ip, caller, what)
		}
		return next, err
	})
	return seen, err
}

func (s *server) unmapEndpointIP(ctx context.Context, in *UnmapRequest) (*UnmapResponse, error) {
	if err := s.unmapEndpoint(ctx, in.GetClusterID(), in.GetIp()); err != nil {
		return nil, s.refuse("unmap endpoint", in, err)
	}
	return &UnmapResponse{}, nil
}

// unmapEndpoint undoes what the caller mapped. The mapping stays as long as another caller has it.
func (s *server) unmapEndpoint(ctx context.Context, id, text string) error {
	ip, err := parse(id, text)
	if err != nil {
		return err
	}
	caller, gone := callerOf(ctx), s.gone(ctx, id, ip)
	return s.update(ctx, func(b ipam.State) (ipam.State, error) { return b.Withdraw(id, ip, caller, gone) })
}

// gone returns the requesters of a mapping that are known by the address of a Pod that no longer exists.
// A virtual kubelet without a certificate gets another address when it restarts, so its mappings under
// the former address would stay for ever.
func (s *server) gone(ctx context.Context, id string, ip netip.Addr) (gone []string) {
	if s.what == nil {
		return nil
	}
	b := s.store.State()
	pods := b.Own().PodCIDR
	for _, by := range b.AskedFor(id, ip) {
		text, plain := strings.CutPrefix(by, byAddress)
		addr, err := netip.ParseAddr(text)
		if !plain || err != nil || !pods.Contains(addr) || by == callerOf(ctx) {
			continue
		}
		if what, err := s.what(ctx, addr); err == nil && what == "" {
			gone = append(gone, by)
		}
	}
	return gone
}

func (s *server) getHomePodIP(_ context.Context, in *GetHomePodIPRequest) (*GetHomePodIPResponse, error) {
	ip, err := parse(in.GetClusterID(), in.GetIp())
	if err == nil {
		ip, err = s.store.State().HomePodIP(in.GetClusterID(), ip)
	}
	if err != nil {
		return nil, s.refuse("home address of pod", in, err)
	}
	return &GetHomePodIPResponse{HomeIP: ip.String()}, nil
}

func (s *server) belongsToPodCIDR(_ context.Context, in *BelongsRequest) (*BelongsResponse, error) {
	ip, err := parseIP(in.GetIp())
	pods := s.store.State().Own().PodCIDR
	if err == nil && !pods.IsValid() {
		err = errors.New("the PodCIDR is not known yet")
	}
	if err != nil {
		return nil, fmt.Errorf("address %.100q belongs to PodCIDR: %w", in.GetIp(), err)
	}
	return &BelongsResponse{Belongs: pods.Contains(ip)}, nil
}

// update changes the State. What is so already is answered without the API server: most questions
// are asked again and again.
func (s *server) update(ctx context.Context, change func(ipam.State) (ipam.State, error)) error {
	now := s.store.State()
	if next, err := change(now); err != nil || len(next.Changed(now)) == 0 {
		return err
	}
	_, err := s.store.Update(ctx, change)
	return err
}

// refuse puts the error into the words that the caller gets, and logs it for those who run this
// side.
func (s *server) refuse(what string, in interface {
	GetClusterID() string
	GetIp() string
}, err error) error {
	err = fmt.Errorf("%s %.100q for cluster %.100q: %w", what, in.GetIp(), in.GetClusterID(), err)
	s.log.Debug("IPAM service refuses", "error", err)
	return err
}

func parse(id, ip string) (netip.Addr, error) {
	if id == "" {
		return netip.Addr{}, errors.New("clusterID is empty")
	}
	return parseIP(ip)
}

// parseIP takes IPv4 addresses in IPv6 form, as Liqo does.
func parseIP(s string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(s)
	if err != nil || addr.Zone() != "" {
		return netip.Addr{}, errors.New("not an IP address")
	}
	return addr.Unmap(), nil
}
