// Package inband lets managers reach the API servers of peers through the tunnel.
//
//	manager ─ CONNECT ─► gateway ═ tunnel ═ gateway of the peer ─► API server of the peer
//	        └────────────── TLS, from end to end ───────────────┘
//
// The gateways only copy octets. They cannot decrypt the TLS between a manager and an API server,
// which contains the manager's token. The connection from a manager to its gateway has its own TLS,
// in which both prove that they have the gateways' private key. Managers use Dial, and gateways use
// Server.
package inband

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/internal/pinned"
)

const (
	// ManagerPort is the TCP port on which gateways accept the manager of their cluster.
	ManagerPort = 5879
	// Port is the TCP port on which gateways accept connections inside the tunnel.
	Port = 6443

	// purpose distinguishes the TLS keys of managers and gateways from other keys that are derived
	// from the same private key.
	purpose = "isthmus in-band manager"

	// answerTime is how long a manager waits for its gateway to connect to the peer.
	answerTime = 10 * time.Second
	// connectTime is the timeout of a gateway's connection, through the tunnel or to its API
	// server.
	connectTime = 5 * time.Second
	// requestLen is the maximum length of a manager's request, in octets.
	requestLen = 4 << 10
	// reasonLen is the maximum number of octets that a manager reads of a gateway's reason.
	reasonLen = 512
)

// A RefusedError has the gateway's reason for refusing a connection.
type RefusedError struct{ Reason string }

func (e *RefusedError) Error() string { return e.Reason }

// Dial connects to the API server of a peer through a gateway of this cluster. private is the
// gateways' private key.
func Dial(ctx context.Context, gateway netip.Addr, private [32]byte, peer string) (net.Conn, error) {
	config, err := pinned.Config(private, purpose)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	dialer := tls.Dialer{NetDialer: &net.Dialer{KeepAlive: 15 * time.Second}, Config: config}
	c, err := dialer.DialContext(ctx, "tcp", netip.AddrPortFrom(gateway, ManagerPort).String())
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	connected, err := connect(c, peer)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return connected, nil
}

// connect asks a gateway to connect to a peer.
func connect(c net.Conn, peer string) (net.Conn, error) {
	if _, err := fmt.Fprintf(c, "CONNECT %[1]s:%[2]d HTTP/1.1\r\nHost: %[1]s:%[2]d\r\n\r\n", peer, Port); err != nil {
		return nil, err
	}
	r := bufio.NewReader(c)
	answer, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return nil, err
	}
	if answer.StatusCode != http.StatusOK {
		reason, err := io.ReadAll(io.LimitReader(answer.Body, reasonLen))
		if err != nil {
			return nil, err
		}
		return nil, &RefusedError{strings.TrimSpace(string(reason))}
	}
	if r.Buffered() > 0 {
		return nil, errors.New("the gateway has sent data after its answer")
	}
	return c, nil
}

// readRequest reads a manager's request and returns the cluster ID of the peer.
func readRequest(c net.Conn) (string, error) {
	r := bufio.NewReader(io.LimitReader(c, requestLen))
	request, err := http.ReadRequest(r)
	if err != nil {
		return "", err
	}
	peer, port, err := net.SplitHostPort(request.Host)
	if request.Method != http.MethodConnect || err != nil || port != fmt.Sprint(Port) || r.Buffered() > 0 {
		return "", fmt.Errorf("want CONNECT ID:%d", Port)
	}
	return peer, nil
}

// answer sends a manager the reason why there is no connection. "" means that there is one.
func answer(c net.Conn, reason string) error {
	if reason == "" {
		_, err := io.WriteString(c, "HTTP/1.1 200 Connected\r\n\r\n")
		return err
	}
	_, err := fmt.Fprintf(c, "HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(reason), reason)
	return err
}
