package httpserve

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
)

// maxConnections is the largest number of connections of one server. An idle connection needs
// about 10 KiB.
const maxConnections = 256

// A bound limits the number of connections of a server. Above the limit, it closes a connection
// that waits for a complete request. It chooses the client that has the most such connections. From
// this client's connections, it closes the one that has waited longest. Thus a client that holds
// connections open cannot shut out other clients, in particular the kubelet.
type bound struct {
	limit int

	mu    sync.Mutex
	since map[net.Conn]uint64 // the value of steps when the connection began to wait for a request; 0 while the server handles a request
	steps uint64
}

// bind applies the bound to a server. The server's handler must be set already.
func (b *bound) bind(s *http.Server) {
	type own struct{}
	b.since = make(map[net.Conn]uint64)
	s.ConnState = b.state
	s.ConnContext = func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, own{}, c) }
	handler := s.Handler
	s.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, _ := r.Context().Value(own{}).(net.Conn)
		b.answering(c, true)
		defer b.answering(c, false)
		handler.ServeHTTP(w, r)
	})
}

// state tracks a connection's state. net/http calls state for a new connection before it accepts
// the next one. state ignores StateActive, which means only that the first octet has arrived.
func (b *bound) state(c net.Conn, state http.ConnState) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch state {
	case http.StateNew:
		b.steps++
		b.since[c] = b.steps
		if len(b.since) > b.limit {
			surplus := b.surplus()
			delete(b.since, surplus)
			closeNow(surplus)
		}
	case http.StateClosed, http.StateHijacked:
		delete(b.since, c)
	}
}

func (b *bound) answering(c net.Conn, begins bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, counted := b.since[c]; !counted {
		return // the connection is being closed
	}
	if b.since[c] = 0; !begins {
		b.steps++
		b.since[c] = b.steps
	}
}

// surplus returns the connection to close. There always is one, because at least the newest
// connection waits for a request.
func (b *bound) surplus() (worst net.Conn) {
	waiting := make(map[string]int)
	for c, since := range b.since {
		if since != 0 {
			waiting[hostOf(c)]++
		}
	}
	for c, since := range b.since {
		if since == 0 {
			continue
		}
		if worst == nil {
			worst = c
			continue
		}
		has, most := waiting[hostOf(c)], waiting[hostOf(worst)]
		if has > most || has == most && since < b.since[worst] {
			worst = c
		}
	}
	return worst
}

func hostOf(c net.Conn) string {
	host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
	return host
}

// closeNow closes a connection without a TLS alert. To send an alert could block, because a client
// might never read it.
func closeNow(c net.Conn) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	_ = c.Close() // ends the goroutine that serves the connection
}
