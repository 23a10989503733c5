package httpserve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// ListenOwner is Listen for a handler that only root and the user of this process may use. It
// listens on an abstract Unix socket (unix(7)). Such a socket belongs to the network namespace
// instead of the file system, so it needs no writable directory. The server closes connections of
// other users. DialOwner is the client.
func (s *Servers) ListenOwner(label, name string, handler http.Handler) error {
	l, err := net.Listen("unix", "@"+name)
	if err != nil {
		return err
	}
	s.serve(label, &ownerListener{Listener: l, log: s.log, uids: owners()}, handler)
	return nil
}

// errStranger is the error of DialOwner when another user, who is not root, owns the listener.
var errStranger = errors.New("the listening process belongs neither to root nor to this user")

// DialOwner connects to the socket of ListenOwner in this network namespace. Another process in the
// namespace may have taken the socket's name first. If that process belongs neither to root nor to
// this user, DialOwner returns errStranger and sends nothing.
func DialOwner(ctx context.Context, name string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, "unix", "@"+name)
	if err != nil {
		return nil, err
	}
	uid, err := userOf(c)
	if err == nil && !slices.Contains(owners(), uid) {
		err = fmt.Errorf("%w (user %d)", errStranger, uid)
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

func owners() []uint32 {
	return []uint32{0, uint32(os.Geteuid())}
}

type ownerListener struct {
	net.Listener
	log        *slog.Logger
	uids       []uint32
	lastLogged time.Time // time of the last logged refusal; only Accept uses it
}

// refusalInterval is the minimum time between two log lines about refused connections.
const refusalInterval = time.Minute

func (l *ownerListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		uid, err := userOf(c)
		if err == nil && slices.Contains(l.uids, uid) {
			return c, nil
		}
		if now := time.Now(); l.lastLogged.IsZero() || now.Sub(l.lastLogged) >= refusalInterval {
			l.lastLogged = now
			l.log.Warn("refused a connection of another user", "socket", l.Addr().String(), "uid", uid, "error", err)
		}
		_ = c.Close()
	}
}

// userOf returns the user at the other end of a connection, as the kernel reports it (SO_PEERCRED).
// On the client's side, this is the user that called listen(2).
func userOf(c net.Conn) (uid uint32, err error) {
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	if failed := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); failed != nil {
		return 0, failed
	}
	if err != nil {
		return 0, err
	}
	return cred.Uid, nil
}
