// Package podport connects to ports of a Pod's loopback address, through the API server and the
// kubelet, as kubectl port-forward does. It opens no listener on this machine.
package podport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"
)

// protocol is the protocol of kubectl port-forward.
const protocol = "portforward.k8s.io"

// Client returns a client whose connections all go to the given port of the Pod, regardless of the
// URL. It needs the right to create pods/portforward.
func Client(config *rest.Config, namespace, pod string, port uint16) (*http.Client, error) {
	dialer, err := dialerTo(config, namespace, pod)
	if err != nil {
		return nil, err
	}
	return &http.Client{
		Transport: &http.Transport{
			// Each connection to the Pod uses a separate connection to the API server, and closes
			// it at the end.
			DisableKeepAlives: true,
			DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx, dialer, port) },
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// Dial opens a TCP connection to the given port of the Pod. It needs the right to create
// pods/portforward.
func Dial(ctx context.Context, config *rest.Config, namespace, pod string, port uint16) (net.Conn, error) {
	dialer, err := dialerTo(config, namespace, pod)
	if err != nil {
		return nil, err
	}
	return dial(ctx, dialer, port)
}

func dialerTo(config *rest.Config, namespace, pod string) (httpstream.Dialer, error) {
	roundTripper, upgrader, err := spdy.RoundTripperFor(config)
	if err != nil {
		return nil, err
	}
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, err
	}
	to := base.JoinPath("api/v1/namespaces", url.PathEscape(namespace), "pods", url.PathEscape(pod), "portforward")
	return spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: roundTripper}, http.MethodPost, to), nil
}

// dial opens a connection to the API server. It returns when ctx ends, even if the attempt takes
// longer.
func dial(ctx context.Context, dialer httpstream.Dialer, port uint16) (net.Conn, error) {
	type result struct {
		conn *conn
		err  error
	}
	done := make(chan result, 1)
	go func() {
		c, err := open(dialer, port)
		done <- result{c, err}
	}()
	select {
	case r := <-done:
		if r.err != nil {
			return nil, r.err
		}
		return r.conn, nil
	case <-ctx.Done():
		go func() { // closes a connection that is established too late
			if r := <-done; r.err == nil {
				_ = r.conn.Close() // nobody reads the error
			}
		}()
		return nil, ctx.Err()
	}
}

func open(dialer httpstream.Dialer, port uint16) (*conn, error) {
	connection, agreed, err := dialer.Dial(protocol)
	if err != nil {
		return nil, err
	}
	c := &conn{connection: connection, failed: make(chan error, 1)}
	if agreed != protocol {
		_ = connection.Close() // the first error is returned
		return nil, fmt.Errorf("the API server selected the protocol %q; want %q", agreed, protocol)
	}
	header := http.Header{}
	header.Set(corev1.PortHeader, strconv.Itoa(int(port)))
	header.Set(corev1.PortForwardRequestIDHeader, "0")
	header.Set(corev1.StreamType, corev1.StreamTypeError)
	problems, err := connection.CreateStream(header)
	if err != nil {
		_ = connection.Close() // the first error is returned
		return nil, err
	}
	problems.Close() // we send nothing on the error stream
	go func() {
		text, err := io.ReadAll(io.LimitReader(problems, 4096))
		if len(text) > 0 {
			err = errors.New(string(text))
		}
		c.failed <- err
	}()
	header.Set(corev1.StreamType, corev1.StreamTypeData)
	if c.Stream, err = connection.CreateStream(header); err != nil {
		_ = connection.Close() // the first error is returned
		return nil, err
	}
	return c, nil
}

// conn is one connection to a port of a Pod.
type conn struct {
	httpstream.Stream
	connection httpstream.Connection
	failed     chan error // the kubelet's error, sent when the connection ends
}

// Read returns the kubelet's error, if there is one, instead of the end of the stream.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Stream.Read(b)
	if n == 0 && errors.Is(err, io.EOF) {
		select {
		case failed := <-c.failed:
			c.failed <- failed
			if failed != nil {
				err = failed
			}
		case <-time.After(100 * time.Millisecond): // the error comes on another stream, usually before the end of this one
		}
	}
	return n, err
}

func (c *conn) Close() error {
	_ = c.Stream.Reset()
	return c.connection.Close()
}

// Deadlines are not supported: a caller that has waited too long closes the connection.
func (c *conn) SetDeadline(time.Time) error      { return nil }
func (c *conn) SetReadDeadline(time.Time) error  { return nil }
func (c *conn) SetWriteDeadline(time.Time) error { return nil }
func (c *conn) LocalAddr() net.Addr              { return addr{} }
func (c *conn) RemoteAddr() net.Addr             { return addr{} }

type addr struct{}

func (addr) Network() string { return protocol }
func (addr) String() string  { return protocol }
