package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/device"
)

// portFree returns an error if the tunnel could not open a UDP port, in either address family.
func portFree(port uint16) error {
	for _, network := range []string{"udp4", "udp6"} {
		c, err := net.ListenPacket(network, hostPort("", port))
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue
		}
		if err != nil {
			return err
		}
		c.Close()
	}
	return nil
}

// portError adds a readable explanation to an error from opening the UDP socket.
func portError(err error, port uint16) error {
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Errorf("listen port %d/udp is in use by another process: %w", port, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("listen port %d/udp: %w", port, err)
	}
	return fmt.Errorf("wireguard: %w", err)
}

// wgLogger returns a logger for wireguard-go that passes messages to log: details at debug level,
// errors as warnings. It logs each kind of error at most every half minute, because an
// unreachable peer causes one with every handshake attempt.
func wgLogger(log *slog.Logger) *device.Logger {
	var (
		mu   sync.Mutex
		last = make(map[string]time.Time) // by format string, which identifies the kind of error
	)
	return &device.Logger{
		Verbosef: func(format string, args ...any) {
			if log.Enabled(context.Background(), slog.LevelDebug) {
				log.Debug("WireGuard", "text", fmt.Sprintf(format, args...))
			}
		},
		Errorf: func(format string, args ...any) {
			mu.Lock()
			again := time.Since(last[format]) < 30*time.Second
			if !again {
				last[format] = time.Now()
			}
			mu.Unlock()
			if !again {
				log.Warn("WireGuard reports a problem", "text", fmt.Sprintf(format, args...))
			}
		},
	}
}
