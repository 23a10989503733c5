package interop

import (
	"encoding/json"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/test/internal/hosts"
)

// checkPort is the UDP port on which Liqo's gateways ping each other (docs/liqo-v0.md, section
// 8).
const checkPort = 12345

// A message of the connection check. In a PING, ClusterID is that of the pinged peer.
type message struct {
	ClusterID string    `json:"clusterID"`
	MsgType   string    `json:"msgType"`
	TimeStamp time.Time `json:"timeStamp"`
}

// A responder answers PINGs as Liqo's gateway does: it returns the same object, with another
// msgType, to the sender.
type responder struct {
	conn *net.UDPConn

	mu       sync.Mutex
	mute     bool
	answered time.Time // just before the last answer
	pings    []ping
	broken   []string
}

type ping struct {
	raw  string
	from netip.AddrPort
	at   time.Time
}

func respond(h *hosts.Host, at netip.Addr) *responder {
	r := &responder{conn: h.ListenUDP(netip.AddrPortFrom(at, checkPort))}
	go r.serve()
	return r
}

func (r *responder) serve() {
	buf := make([]byte, 1024)
	for {
		n, from, err := r.conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		r.mu.Lock()
		var m message
		if err := json.Unmarshal(buf[:n], &m); err != nil || m.MsgType != "PING" {
			r.broken = append(r.broken, string(buf[:n]))
		} else {
			r.pings = append(r.pings, ping{string(buf[:n]), from, time.Now()})
		}
		if !r.mute {
			m.MsgType = "PONG"
			answer, _ := json.Marshal(m)
			r.answered = time.Now()
			r.conn.WriteToUDPAddrPort(answer, from)
		}
		r.mu.Unlock()
	}
}

// silence makes the peer ignore PINGs, or answer again. It returns a time just before the peer's
// last answer.
func (r *responder) silence(on bool) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mute = on
	return r.answered
}

// receivedPings returns the PINGs received so far, and the messages that were no PINGs.
func (r *responder) receivedPings() (pings []ping, broken []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append(pings, r.pings...), append(broken, r.broken...)
}

// askPong sends one PING and returns the answer and its source.
func askPong(t *testing.T, c *net.UDPConn, to netip.AddrPort, m message) (answer string, from netip.AddrPort) {
	t.Helper()
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.WriteToUDPAddrPort(b, to); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1024)
	n, from, err := c.ReadFromUDPAddrPort(buf)
	if err != nil {
		t.Fatalf("no PONG for %s: %v", b, err)
	}
	return string(buf[:n]), from
}
