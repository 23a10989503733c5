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
// listens at an abstract socket of Linux (unix(7)), which lies in the network namespace, not in the
// file system, and needs no writable directory. It closes the connections of other users. DialOwner
// is the client's side.
func (s *Servers) ListenOwner(what, name string, handler http.Handler) error {
	l, err := net.Listen("unix", "@"+name)
	if err != nil {
		return err
	}
	s.serve(what, &ownerListener{Listener: l, log: s.log, uids: owners()}, handler)
	return nil
}

// errStranger is returned by DialOwner when neither root nor the user of this process listens.
var errStranger = errors.New("the listener is neither root nor this user")

// DialOwner connects to the socket that ListenOwner has opened in this network namespace. Any
// process of the namespace can take the name first: DialOwner sends nothing to a process of another
// user, and returns errStranger.
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
	log  *slog.Logger
	uids []uint32
	said time.Time // when a refusal was last logged; only Accept uses it
}

// refusalInterval bounds how often refused connections are logged.
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
		if now := time.Now(); l.said.IsZero() || now.Sub(l.said) >= refusalInterval {
			l.said = now
			l.log.Warn("refused a connection of another user", "socket", l.Addr().String(), "uid", uid, "error", err)
		}
		_ = c.Close()
	}
}

// userOf returns the user at the other end of a connection, or of the listener, from the kernel
// (SO_PEERCRED).
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
