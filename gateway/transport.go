package gateway

import (
	"fmt"
	"log/slog"
	"sync"

	"golang.zx2c4.com/wireguard/conn"
	wgtun "golang.zx2c4.com/wireguard/tun"

	"github.com/isthmus-net/isthmus/gateway/inline"
	"github.com/isthmus-net/isthmus/natengine"
)

// Transport says how the packets of established sessions travel between TUN and socket. Handshakes, keys and timers are
// wireguard-go's in any case. See docs/decisions/0009.
type Transport string

const (
	// TransportDevice leaves all of them to wireguard-go's device.
	TransportDevice Transport = "device"
	// TransportInline seals and opens them where they are read. It is left for TransportDevice, with a warning, when this
	// build of wireguard-go is not one with which that is known to work.
	TransportInline Transport = "inline"
)

// ParseTransport reads the name of a Transport.
func ParseTransport(s string) (Transport, error) {
	switch t := Transport(s); t {
	case TransportDevice, TransportInline:
		return t, nil
	}
	return "", fmt.Errorf("%q; want %s or %s", s, TransportDevice, TransportInline)
}

// openTransport returns the two sides that wireguard-go's device is made with and, when it is to be used and can be made,
// the inline transport between them.
func openTransport(want Transport, path wgtun.Device, socket conn.Bind, makeInline func() (*inline.Transport, error), log *slog.Logger,
) (wgtun.Device, conn.Bind, *inline.Transport) {
	if want != TransportDevice {
		t, err := makeInline()
		if err == nil {
			return t.TUN(), t.Bind(), t
		}
		log.Warn("all packets go through wireguard-go's device", "reason", err)
	}
	tunSide, socketSide := new(backlog).wrap(path, socket)
	return tunSide, socketSide, nil
}

// tryInline is the trial, which says the same for every tunnel of the process.
var tryInline = sync.OnceValue(inline.Try)

// newInline makes the inline transport, if a trial of it works with this build of wireguard-go.
func newInline(path inline.Path, socket conn.Bind, engine *natengine.Engine) (*inline.Transport, error) {
	t, err := inline.New(path, socket, engine.Count)
	if err == nil {
		err = tryInline()
	}
	return t, err
}

// transport is what is in use.
func (g *gateway) transport() Transport {
	if g.ends[0].inline == nil {
		return TransportDevice
	}
	return TransportInline
}
