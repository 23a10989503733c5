package gateway

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"golang.zx2c4.com/wireguard/conn"

	"github.com/isthmus-net/isthmus/gateway/inline"
)

// A build of wireguard-go that the inline transport does not know costs throughput and nothing else.
func TestAnInlineTransportThatCannotBeLeavesAllToTheDevice(t *testing.T) {
	for _, want := range []Transport{"", TransportInline, TransportDevice} {
		var text bytes.Buffer
		asked := false
		makeInline := func() (*inline.Transport, error) {
			asked = true
			return nil, errors.New("field sendNonce of Keypair is gone")
		}
		path, socket := newIdle(), conn.NewDefaultBind()
		tun, udp, used := openTransport(want, path, socket, makeInline, slog.New(slog.NewTextHandler(&text, nil)))
		if used != nil || tun.(countingTUN).Device != path || udp.(countingBind).Bind != socket {
			t.Errorf("%q: inline %v, TUN %T, socket %T; want both as they are, with a bound", want, used, tun, udp)
		}
		if warned := strings.Contains(text.String(), "sendNonce"); asked != (want != TransportDevice) || warned != asked {
			t.Errorf("%q: asked for it: %v, log %q", want, asked, &text)
		}
	}
}
