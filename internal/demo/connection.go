package demo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// connect opens a TCP connection to an echo server. echo sends a line and waits until the same line
// comes back. The caller must call end.
func connect(ctx context.Context, from, to *lab.Host, seen netip.Addr) (echo func(line string) error, end func(), err error) {
	const port = "7"
	server, err := to.Listen("tcp", ":"+port)
	if err != nil {
		return nil, nil, err
	}
	go func() { // the goroutine ends when the server and the connection are closed
		if conn, err := server.Accept(); err == nil {
			_, _ = io.Copy(conn, conn)
			conn.Close()
		}
	}()
	conn, err := from.Dial(ctx, "tcp", net.JoinHostPort(seen.String(), port))
	if err != nil {
		server.Close()
		return nil, nil, err
	}
	lines := bufio.NewReader(conn)
	echo = func(line string) error {
		_ = conn.SetDeadline(time.Now().Add(failoverTimeout))
		if _, err := io.WriteString(conn, line+"\n"); err != nil {
			return err
		}
		if got, err := lines.ReadString('\n'); err != nil || got != line+"\n" {
			return errors.Join(err, fmt.Errorf("sent %q, got %q back", line, got))
		}
		return nil
	}
	return echo, func() { conn.Close(); server.Close() }, nil
}
