package httpserve

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
)

// maxConnections bounds the connections of one server: an idle one costs some 10 KiB.
const maxConnections = 256

// A bound closes connections when there are too many. It chooses among those that wait for a
// request, or for the rest of one: of the client with most of them, the one that has waited
// longest. So no client that holds connections open shuts out others, least of all the kubelet.
type bound struct {
	most int

	mu    sync.Mutex
	since map[net.Conn]uint64 // the step at which it began to wait; 0: its request is being answered
	steps uint64
}

// bind applies the bound to a server, whose handler must be set.
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

// state is called for a new connection before the next one is accepted. It ignores StateActive,
// which only means that the first octet has come.
func (b *bound) state(c net.Conn, state http.ConnState) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch state {
	case http.StateNew:
		b.steps++
		b.since[c] = b.steps
		if len(b.since) > b.most {
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
		return // it is being closed
	}
	if b.since[c] = 0; !begins {
		b.steps++
		b.since[c] = b.steps
	}
}

// surplus returns the connection to close. There always is one, because the newest one waits.
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

// closeNow closes a connection without TLS's alert, which a client might never read.
func closeNow(c net.Conn) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	_ = c.Close() // its own goroutine notices
}
