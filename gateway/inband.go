package gateway

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"

	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/internal/inband"
)

// InBand configures how a gateway carries the managers' connections to a peer's API server: see
// package inband.
type InBand struct {
	Listen func() (net.Listener, error)                // listens for the manager of this cluster
	Key    func() [32]byte                             // returns the private key that all gateways of this cluster share
	API    func(ctx context.Context) (net.Conn, error) // connects to the API server of this cluster
}

// inBand connects an inband.Server with the in-process endpoint of the first tunnel. The methods
// of a nil inBand do nothing.
type inBand struct {
	server *inband.Server
	end    *tunnelEnd

	mu      sync.Mutex
	streams *datapath.Streams // nil until a peer has agreed
}

func newInBand(o InBand, end *tunnelEnd, log *slog.Logger) *inBand {
	b := &inBand{end: end}
	b.server = inband.NewServer(inband.Options{Listen: o.Listen, Key: o.Key, API: o.API, Dial: b.dial, Log: log,
		Connected: func(id string) bool { return end.observe(id).State == check.Connected }})
	return b
}

// set replaces the list of peers that agreed to in-band control. It opens the port in the tunnel
// when the first peer has agreed.
func (b *inBand) set(peers []peer) error {
	if b == nil {
		return nil
	}
	var agreed []inband.Peer
	for i := range peers {
		if p := &peers[i]; p.InBand {
			at := gatewayOf(p.GatewayPeer)
			agreed = append(agreed, inband.Peer{ID: p.ID, Source: at[0], Gateway: at[1], Leaving: p.InBandLeaving})
		}
	}
	if err := b.open(len(agreed) > 0); err != nil {
		return fmt.Errorf("in-band control: %w", err)
	}
	b.server.Set(agreed)
	return nil
}

func (b *inBand) open(wanted bool) (err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if wanted && b.streams == nil {
		b.streams, err = b.end.local.OpenStreams(inband.Port, func(r *datapath.StreamRequest) { b.server.Take(r.From, r.Accept, r.Refuse) })
	}
	return err
}

func (b *inBand) dial(ctx context.Context, gateway netip.Addr) (net.Conn, error) {
	b.mu.Lock()
	streams := b.streams
	b.mu.Unlock()
	return streams.Dial(ctx, gateway) // the Server has peers, so set has opened streams
}

// observe adds the metrics of in-band control to a scrape.
func (b *inBand) observe(s *scrape) {
	if b == nil {
		return
	}
	all, strangers := b.server.Stats()
	s.count(familyInBandUnknown, strangers, nil)
	for _, p := range all {
		peer := labelled("peer", p.Peer)
		s.add(familyInBandConns, float64(p.Ours), peer.with("side", "ours"))
		s.add(familyInBandConns, float64(p.Theirs), peer.with("side", "theirs"))
		s.count(familyInBandRx, p.Received, peer)
		s.count(familyInBandTx, p.Sent, peer)
		for reason, n := range p.Refused {
			s.count(familyInBandRefused, n, peer.with("reason", reason))
		}
	}
}
