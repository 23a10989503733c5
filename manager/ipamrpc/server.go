// Package ipamrpc serves Liqo's gRPC service "ipam" (facts, section 5.1) out of the
// IPAM's books. Virtual kubelets ask it for the address under which a peer reaches
// an endpoint, and for ours of a pod that runs there.
//
// ipam.pb.go holds the messages of ipam.proto. It was made by
//
//	protoc --go_out=. --go_opt=paths=source_relative ipam.proto
//
// with protoc 3.21 of Debian and protoc-gen-go of the module google.golang.org/protobuf.
// The service is so small that it is described by hand below.
package ipamrpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"google.golang.org/grpc"

	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
)

const (
	// maxRequest bounds a request in bytes: two short strings. Whoever reaches
	// the port may send one.
	maxRequest = 4 << 10
	// maxStreams bounds the requests of one connection that wait at a time.
	maxStreams = 128
	// drain is how long requests have to end when the server does.
	drain = 3 * time.Second
)

// Serve answers on the TCP address, which Liqo's components expect to have port
// 6000, until ctx ends; then it returns nil. It needs a Store that is loaded and
// may be written to, so it runs on the leader only. Errors reach the caller with
// the code Unknown, as Liqo's do.
func Serve(ctx context.Context, address string, s *ipamstore.Store, log *slog.Logger) error {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("IPAM service: %w", err)
	}
	return serve(ctx, listener, s, log)
}

func serve(ctx context.Context, listener net.Listener, s *ipamstore.Store, log *slog.Logger) error {
	g := grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest), grpc.MaxConcurrentStreams(maxStreams), grpc.ConnectionTimeout(10*time.Second))
	g.RegisterService(&service, &server{store: s, log: log})
	ended := make(chan error, 1)
	go func() { ended <- g.Serve(listener) }()
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
			in := new(Request)
			if err := decode(in); err != nil {
				return nil, err
			}
			return call(srv.(*server), ctx, in)
		},
	}
}

type server struct {
	store *ipamstore.Store
	log   *slog.Logger
}

func (s *server) mapEndpointIP(ctx context.Context, in *MapRequest) (*MapResponse, error) {
	var seen netip.Addr
	err := s.update(ctx, in.GetClusterID(), in.GetIp(), func(b ipam.Book, ip netip.Addr) (next ipam.Book, err error) {
		next, seen, err = b.MapEndpoint(in.GetClusterID(), ip)
		return next, err
	})
	if err != nil {
		return nil, s.refuse("map endpoint", in, err)
	}
	return &MapResponse{Ip: seen.String()}, nil
}

func (s *server) unmapEndpointIP(ctx context.Context, in *UnmapRequest) (*UnmapResponse, error) {
	err := s.update(ctx, in.GetClusterID(), in.GetIp(), func(b ipam.Book, ip netip.Addr) (ipam.Book, error) {
		return b.UnmapEndpoint(in.GetClusterID(), ip), nil
	})
	if err != nil {
		return nil, s.refuse("unmap endpoint", in, err)
	}
	return &UnmapResponse{}, nil
}

func (s *server) getHomePodIP(_ context.Context, in *GetHomePodIPRequest) (*GetHomePodIPResponse, error) {
	ip, err := parse(in.GetClusterID(), in.GetIp())
	if err == nil {
		ip, err = s.store.Book().HomePodIP(in.GetClusterID(), ip)
	}
	if err != nil {
		return nil, s.refuse("home address of pod", in, err)
	}
	return &GetHomePodIPResponse{HomeIP: ip.String()}, nil
}

func (s *server) belongsToPodCIDR(_ context.Context, in *BelongsRequest) (*BelongsResponse, error) {
	ip, err := parseIP(in.GetIp())
	pods := s.store.Book().Own().PodCIDR
	if err == nil && !pods.IsValid() {
		err = errors.New("the PodCIDR is not known yet")
	}
	if err != nil {
		return nil, fmt.Errorf("address %.100q belongs to PodCIDR: %w", in.GetIp(), err)
	}
	return &BelongsResponse{Belongs: pods.Contains(ip)}, nil
}

// update changes the Book. What is so already is answered without the API server:
// most questions are asked again and again.
func (s *server) update(ctx context.Context, id, text string, change func(ipam.Book, netip.Addr) (ipam.Book, error)) error {
	ip, err := parse(id, text)
	if err != nil {
		return err
	}
	now := s.store.Book()
	if next, err := change(now, ip); err != nil || len(next.Changed(now)) == 0 {
		return err
	}
	_, err = s.store.Update(ctx, func(b ipam.Book) (ipam.Book, error) { return change(b, ip) })
	return err
}

// refuse puts the error into the words that the caller gets, and logs it for
// those who run this side.
func (s *server) refuse(what string, in interface {
	GetClusterID() string
	GetIp() string
}, err error) error {
	err = fmt.Errorf("%s %.100q for cluster %.100q: %w", what, in.GetIp(), in.GetClusterID(), err)
	s.log.Debug("IPAM service refuses", "err", err)
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
