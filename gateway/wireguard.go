package gateway

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	wgtun "golang.zx2c4.com/wireguard/tun"

	"github.com/isthmus-net/isthmus/internal/diff"
)

// wgPeer is one WireGuard peer as it should be.
type wgPeer struct {
	key        [32]byte
	endpoint   netip.AddrPort // zero: leave alone what is there (name not resolved yet)
	allowedIPs [2]netip.Prefix
}

// wgConfig is the device as it should be.
type wgConfig struct {
	privateKey [32]byte
	listenPort uint16
	peers      []wgPeer
}

// tunnel is wireguard-go, embedded and configured in process. Its UDP socket is
// in the namespace of the process, its packets go to the tun.Device that it was
// made with. Methods may be called concurrently.
type tunnel struct {
	dev *device.Device

	mu sync.Mutex
	// What was last set. The rest is read back from the device each time;
	// endpoints cannot be, because the device follows a peer that roams, which
	// must not look like a difference.
	privateKey [32]byte
	endpoints  map[[32]byte]netip.AddrPort
}

// newTunnel makes the device; it neither listens nor knows anybody yet. It owns
// link from now on.
func newTunnel(link wgtun.Device, bind conn.Bind, log *slog.Logger) *tunnel {
	return &tunnel{dev: device.NewDevice(link, bind, wgLogger(log)), endpoints: make(map[[32]byte]netip.AddrPort)}
}

// start gives the device its key and opens its socket.
func (t *tunnel) start(privateKey [32]byte, listenPort uint16) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	want := wgConfig{privateKey: privateKey, listenPort: listenPort}
	if err := t.dev.IpcSet(wgDiff(wgConfig{}, want)); err != nil {
		return portError(err, listenPort)
	}
	if err := t.dev.Up(); err != nil {
		return portError(err, listenPort)
	}
	t.privateKey = privateKey
	return nil
}

// apply makes want true by setting only what differs, so that the sessions of
// other peers do not notice. A listen port that cannot be had leaves the old one.
func (t *tunnel) apply(want wgConfig) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	have, err := t.have()
	if err != nil {
		return err
	}
	var errs []error
	if want.listenPort != have.listenPort {
		// The device closes its socket before it opens the next: ask first.
		if err := portFree(want.listenPort); err != nil {
			errs = append(errs, portError(err, want.listenPort))
			want.listenPort = have.listenPort
		}
	}
	if text := wgDiff(have, want); text != "" {
		if err := t.dev.IpcSet(text); err != nil {
			return errors.Join(append(errs, fmt.Errorf("wireguard: %w", err))...)
		}
	}
	t.privateKey = want.privateKey
	clear(t.endpoints)
	for _, p := range want.peers {
		t.endpoints[p.key] = p.endpoint
	}
	return errors.Join(errs...)
}

// have is the device's own view, with endpoints as they were last set.
func (t *tunnel) have() (wgConfig, error) {
	text, err := t.dev.IpcGet()
	if err != nil {
		return wgConfig{}, fmt.Errorf("wireguard: %w", err)
	}
	stats, err := parseStats(text)
	if err != nil {
		return wgConfig{}, err
	}
	have := wgConfig{privateKey: t.privateKey}
	if _, after, ok := strings.Cut(text, "\nlisten_port="); ok { // absent when there is no socket
		line, _, _ := strings.Cut(after, "\n")
		port, err := strconv.ParseUint(line, 10, 16)
		if err != nil {
			return wgConfig{}, fmt.Errorf("wireguard: listen port: %w", err)
		}
		have.listenPort = uint16(port)
	}
	for key, s := range stats {
		have.peers = append(have.peers, wgPeer{key: key, endpoint: t.endpoints[key], allowedIPs: s.allowedIPs})
	}
	slices.SortFunc(have.peers, func(a, b wgPeer) int { return slices.Compare(a.key[:], b.key[:]) })
	return have, nil
}

// forget makes the next apply set the peer's endpoint again, wherever the peer
// roamed to meanwhile.
func (t *tunnel) forget(key [32]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.endpoints, key)
}

// close closes the device, its socket and its tun.Device, and waits for all of
// their goroutines.
func (t *tunnel) close() { t.dev.Close() }

// wgDiff is the text for IpcSet that turns have into want, "" when they are the
// same. It follows the cross-platform interface
// (https://www.wireguard.com/xplatform/): allowed IPs are added before others
// are removed, and a new peer takes over its allowed IPs from the old one before
// that goes.
func wgDiff(have, want wgConfig) string {
	var b strings.Builder
	if have.privateKey != want.privateKey {
		fmt.Fprintf(&b, "private_key=%s\n", hex.EncodeToString(want.privateKey[:]))
	}
	if have.listenPort != want.listenPort {
		fmt.Fprintf(&b, "listen_port=%d\n", want.listenPort)
	}
	for i := range want.peers {
		if !want.peers[i].endpoint.IsValid() { // nothing wanted: nothing different
			for _, p := range have.peers {
				if p.key == want.peers[i].key {
					want.peers = slices.Clone(want.peers)
					want.peers[i].endpoint = p.endpoint
				}
			}
		}
	}
	added, replaced, removed := diff.Of(have.peers, want.peers, func(p wgPeer) [32]byte { return p.key })
	for _, p := range added {
		fmt.Fprintf(&b, "public_key=%s\n", hex.EncodeToString(p.key[:]))
		if p.endpoint.IsValid() {
			fmt.Fprintf(&b, "endpoint=%s\n", p.endpoint)
		}
		for _, prefix := range p.prefixes() {
			fmt.Fprintf(&b, "allowed_ip=%s\n", prefix)
		}
	}
	for _, p := range replaced {
		old := have.peers[slices.IndexFunc(have.peers, func(o wgPeer) bool { return o.key == p.key })]
		fmt.Fprintf(&b, "public_key=%s\nupdate_only=true\n", hex.EncodeToString(p.key[:]))
		if p.endpoint != old.endpoint {
			fmt.Fprintf(&b, "endpoint=%s\n", p.endpoint)
		}
		more, _, less := diff.Of(old.prefixes(), p.prefixes(), func(p netip.Prefix) netip.Prefix { return p })
		for _, prefix := range more {
			fmt.Fprintf(&b, "allowed_ip=%s\n", prefix)
		}
		for _, prefix := range less {
			fmt.Fprintf(&b, "allowed_ip=-%s\n", prefix)
		}
	}
	for _, p := range removed {
		fmt.Fprintf(&b, "public_key=%s\nremove=true\n", hex.EncodeToString(p.key[:]))
	}
	return b.String()
}

// prefixes are the valid allowed IPs.
func (p wgPeer) prefixes() []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(p.allowedIPs[:]), func(p netip.Prefix) bool { return !p.IsValid() })
}

// wgStats is what the device knows about one peer.
type wgStats struct {
	endpoint   netip.AddrPort // where its last packet came from, else as configured
	handshake  time.Time      // of the present session; zero: never
	rx, tx     uint64         // octets of WireGuard messages
	allowedIPs [2]netip.Prefix
}

// stats asks the device about all peers.
func (t *tunnel) stats() (map[[32]byte]wgStats, error) {
	text, err := t.dev.IpcGet()
	if err != nil {
		return nil, fmt.Errorf("wireguard: %w", err)
	}
	return parseStats(text)
}

// parseStats reads the answer of IpcGet. More than two allowed IPs, which we
// never set, are cut.
func parseStats(text string) (map[[32]byte]wgStats, error) {
	all := make(map[[32]byte]wgStats, strings.Count(text, "public_key=")) // once a second, for up to a thousand peers
	var (
		key     [32]byte
		digits  [2 * len(key)]byte
		s       wgStats
		in      bool
		sec, ns int64
		n       int
	)
	flush := func() {
		if !in {
			return
		}
		if sec != 0 || ns != 0 {
			s.handshake = time.Unix(sec, ns)
		}
		slices.SortFunc(s.allowedIPs[:n], comparePrefix)
		all[key] = s
	}
	for line := range strings.SplitSeq(text, "\n") {
		name, value, _ := strings.Cut(line, "=")
		var err error
		switch name {
		case "public_key":
			flush()
			s, in, sec, ns, n = wgStats{}, true, 0, 0, 0
			if len(value) != hex.EncodedLen(len(key)) {
				err = errors.New("wrong length")
				break
			}
			copy(digits[:], value)
			_, err = hex.Decode(key[:], digits[:])
		case "endpoint":
			s.endpoint, err = netip.ParseAddrPort(value)
			s.endpoint = netip.AddrPortFrom(s.endpoint.Addr().Unmap(), s.endpoint.Port())
		case "last_handshake_time_sec":
			sec, err = strconv.ParseInt(value, 10, 64)
		case "last_handshake_time_nsec":
			ns, err = strconv.ParseInt(value, 10, 64)
		case "rx_bytes":
			s.rx, err = strconv.ParseUint(value, 10, 64)
		case "tx_bytes":
			s.tx, err = strconv.ParseUint(value, 10, 64)
		case "allowed_ip":
			if n < len(s.allowedIPs) {
				s.allowedIPs[n], err = netip.ParsePrefix(value)
				n++
			}
		}
		if err != nil {
			return nil, fmt.Errorf("wireguard: %s: %w", name, err) // not the value: it may be a key
		}
	}
	flush()
	return all, nil
}

// wgPeerFor sorts the allowed IPs as stats does, so that the two compare.
func wgPeerFor(key [32]byte, endpoint netip.AddrPort, allowedIPs [2]netip.Prefix) wgPeer {
	slices.SortFunc(allowedIPs[:], comparePrefix)
	return wgPeer{key, endpoint, allowedIPs}
}

// portFree tries a UDP port of both families, as the device will.
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

// portError makes an error about the UDP socket readable.
func portError(err error, port uint16) error {
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Errorf("listen port %d/udp is in use by another process: %w", port, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("listen port %d/udp: %w", port, err)
	}
	return fmt.Errorf("wireguard: %w", err)
}

// wgLogger hands the device's messages to log: chatter as debug, errors as
// warnings, of which each kind at most every half minute, because one peer that
// is away makes the device complain with every handshake it tries.
func wgLogger(log *slog.Logger) *device.Logger {
	var (
		mu   sync.Mutex
		last = make(map[string]time.Time) // by format: a constant of wireguard-go
	)
	return &device.Logger{
		Verbosef: func(format string, args ...any) {
			if log.Enabled(context.Background(), slog.LevelDebug) {
				log.Debug("wireguard", "text", fmt.Sprintf(format, args...))
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
				log.Warn("wireguard", "text", fmt.Sprintf(format, args...))
			}
		},
	}
}
