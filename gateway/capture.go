package gateway

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/gateway/capture"
)

// CaptureSocket is the name of the abstract Unix socket on which Running.CaptureHandler is served.
// It is in the network namespace of the gateway's Pod or host. Only root and the gateway's own user
// may connect, because a capture shows the addresses of all traffic and, on request, its content.
const CaptureSocket = "isthmus-gateway-capture"

// CaptureSummary is the name of a trailer of the response, which holds the capture.Summary as
// JSON.
const CaptureSummary = "Isthmus-Capture"

// captureWrite is the maximum time for which a write to the client may block. After that the
// capture ends.
const captureWrite = 10 * time.Second

// captureHandler answers GET /capture with a pcapng file that grows until the capture ends.
func (g *gateway) captureHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /capture", func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		options, err := capture.Parse(r.Form)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		names, known := make(map[string]string), []string(nil)
		for _, p := range g.current().peers {
			if names[p.ID] = p.Name; options.Peer == p.Name && p.Name != "" {
				options.Peer = p.ID
			}
			known = append(known, strings.TrimSpace(p.Name+" "+p.ID))
		}
		if _, ok := names[options.Peer]; options.Peer != "" && !ok {
			http.Error(w, "peer "+options.Peer+" is unknown; want one of "+strings.Join(known, ", "), http.StatusNotFound)
			return
		}
		c := capture.New(options, "isthmus "+g.version, names)
		if !g.capturing.CompareAndSwap(nil, c) {
			http.Error(w, "another capture is running; there can be one at a time", http.StatusConflict)
			return
		}
		g.log.Info("capture started", "options", options.Query().Encode())
		g.setCapture(c)
		defer func() {
			g.setCapture(nil)
			g.capturing.Store(nil)
			s := c.Summary()
			g.log.Info("capture ended", "packets", s.Packets, "missed", s.Missed, "reason", s.Ended)
		}()
		control := http.NewResponseController(w)
		_ = control.SetReadDeadline(time.Time{}) // the capture limits its own duration
		w.Header().Set("Content-Type", "application/x-pcapng")
		w.Header().Set("Trailer", CaptureSummary)
		_ = c.WriteTo(r.Context(), writerFunc(func(b []byte) (int, error) {
			_ = control.SetWriteDeadline(time.Now().Add(captureWrite))
			return w.Write(b)
		}), control.Flush) // an error here means that the client has left
		summary, _ := json.Marshal(c.Summary()) // marshalling three plain fields cannot fail
		w.Header().Set(CaptureSummary, string(summary))
	})
	return mux
}

// setCapture makes all tunnels copy their packets to c. If c is nil, they stop copying.
func (g *gateway) setCapture(c *capture.Capture) {
	for _, e := range g.tunnels {
		e.SetCapture(c)
	}
}

// endCapture ends a running capture, so that its HTTP handler returns and does not delay the
// shutdown.
func (g *gateway) endCapture() {
	if c := g.capturing.Load(); c != nil {
		c.End("the gateway ends")
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }
