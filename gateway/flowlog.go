package gateway

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/natengine"
)

// FlowLog says where flows are logged, as lines of JSON. The zero value logs none.
type FlowLog struct {
	File      string // name of a file, which is appended to, or "-" for standard output; empty: none
	Sample    int    // one flow in so many, from 1; 0 means 1
	PerSecond int    // at most so many lines; 0 means DefaultFlowLogRate
}

// DefaultFlowLogRate is how many lines a second a flow log has at most.
const DefaultFlowLogRate = 1000

// flowQueue bounds the events that wait to be written. What comes on top is left out and counted.
const flowQueue = 4096

// flowLog writes the engine's events of flows. The engine never waits for it.
type flowLog struct {
	queue   chan natengine.FlowEvent
	omitted atomic.Uint64
	limit   *rate.Limiter
	file    *reopened
	names   atomic.Pointer[map[string]string] // of peers, by ID; never modified
	owner   func(netip.Addr) fabric.Owner     // of an address of this cluster; nil: owners are not known
	log     *slog.Logger
}

// FlowRecord is a line of the flow log.
type FlowRecord struct {
	Time      time.Time `json:"time"`
	Event     string    `json:"event"` // "opened", "closed", "refused", or "omitted"
	Peer      string    `json:"peer,omitempty"`
	PeerName  string    `json:"peerName,omitempty"`
	Kind      string    `json:"kind,omitempty"`      // "napt", "endpoint" or "pod"
	Direction string    `json:"direction,omitempty"` // of the first packet, or the refused one: "outbound" or "inbound"
	Protocol  string    `json:"protocol,omitempty"`
	Local     string    `json:"local,omitempty"`     // our end
	LocalPod  string    `json:"localPod,omitempty"`  // namespace/name of the pod that has its address when the line is written, if one has
	LocalNode string    `json:"localNode,omitempty"` // the node on which that pod is, or that has the address itself
	Mapped    string    `json:"mapped,omitempty"`    // our end as the peer knows it
	Remote    string    `json:"remote,omitempty"`    // the peer's end
	Reason    string    `json:"reason,omitempty"`    // of "closed" and "refused"
	Seconds   *float64  `json:"seconds,omitempty"`   // of "closed": from the first packet to the last
	Count     uint64    `json:"count,omitempty"`     // of "omitted": lines left out since the last such line
}

// openFlowLog opens the file, so that a wrong name is an error at the start.
func openFlowLog(c FlowLog, owner func(netip.Addr) fabric.Owner, log *slog.Logger) (*flowLog, error) {
	f, err := reopen(c.File)
	if err != nil {
		return nil, fmt.Errorf("flow log: %w", err)
	}
	if c.PerSecond <= 0 {
		c.PerSecond = DefaultFlowLogRate
	}
	return &flowLog{
		queue: make(chan natengine.FlowEvent, flowQueue), limit: rate.NewLimiter(rate.Limit(c.PerSecond), c.PerSecond),
		file: f, owner: owner, log: log,
	}, nil
}

// name says what peers are called from now on. It may be called while run does its work.
func (l *flowLog) name(peers []*fabric.GatewayPeer) {
	names := make(map[string]string, len(peers))
	for _, p := range peers {
		names[p.ID] = p.Name
	}
	l.names.Store(&names)
}

// observe takes an event. It never waits.
func (l *flowLog) observe(ev natengine.FlowEvent) {
	select {
	case l.queue <- ev:
	default:
		l.omitted.Add(1)
	}
}

// run writes until done is closed. Lines are flushed when no event waits, and once a second.
func (l *flowLog) run(done <-chan struct{}) {
	defer l.file.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { // ends with run
		select {
		case <-done:
			cancel()
		case <-ctx.Done():
		}
	}()
	w := bufio.NewWriterSize(l.file, 64<<10)
	lines := json.NewEncoder(w)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var failed error
	write := func(r FlowRecord) {
		r.Time = time.Now().UTC()
		_ = lines.Encode(r) // Flush says it again
	}
	flush := func() {
		err := w.Flush()
		if err != nil {
			w.Reset(l.file) // or it would fail for ever
		}
		if err != nil && (failed == nil || failed.Error() != err.Error()) {
			l.log.Error("cannot write the flow log", "error", err)
		}
		failed = err
	}
	for {
		select {
		case <-ctx.Done():
			for len(l.queue) > 0 && l.limit.Allow() {
				write(l.record(<-l.queue))
			}
			if n := l.omitted.Swap(0) + uint64(len(l.queue)); n > 0 {
				write(FlowRecord{Event: "omitted", Count: n})
			}
			flush()
			return
		case ev := <-l.queue:
			write(l.record(ev))
			if len(l.queue) == 0 {
				flush()
			}
			_ = l.limit.Wait(ctx) // whose end is seen above
		case <-tick.C:
			if n := l.omitted.Swap(0); n > 0 {
				write(FlowRecord{Event: "omitted", Count: n})
			}
			flush()
			if err := l.file.follow(); err != nil {
				l.log.Error("cannot write the flow log", "error", err)
			}
		}
	}
}

func (l *flowLog) record(ev natengine.FlowEvent) FlowRecord {
	r := FlowRecord{Event: ev.Change.String(), Kind: ev.Kind, Protocol: protocolName(ev.Proto), Local: endOf(ev.Local), Mapped: endOf(ev.Mapped), Remote: endOf(ev.Remote)}
	if ev.Peer != nil {
		r.Peer = ev.Peer.ID()
		if names := l.names.Load(); names != nil {
			r.PeerName = (*names)[r.Peer]
		}
	}
	// Of what was refused inbound our end is as the peer calls it: here another may have that address.
	if l.owner != nil && (ev.Change != natengine.FlowRefused || ev.Direction == natengine.Outbound) {
		whose := l.owner(ev.Local.Addr())
		r.LocalPod, r.LocalNode = whose.Pod, whose.Node
	}
	switch ev.Change {
	case natengine.FlowClosed:
		seconds := ev.Lasted.Seconds()
		r.Reason, r.Seconds = ev.End.String(), &seconds
		return r
	case natengine.FlowRefused:
		r.Reason = ev.Drop.String()
	}
	r.Direction = ev.Direction.String()
	return r
}

func endOf(a netip.AddrPort) string {
	if !a.Addr().IsValid() {
		return ""
	}
	return end(a)
}

// reopened is a file that is appended to and, when another program has moved it away, made again.
type reopened struct {
	name string
	io.WriteCloser
}

func reopen(name string) (*reopened, error) {
	r := &reopened{name: name}
	if name == "-" {
		r.WriteCloser = standard{os.Stdout}
		return r, nil
	}
	return r, r.open()
}

func (r *reopened) open() (err error) {
	r.WriteCloser, err = os.OpenFile(r.name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	return err
}

// follow opens the file again when it is not the one of that name any more.
func (r *reopened) follow() error {
	f, ok := r.WriteCloser.(*os.File)
	if !ok {
		return nil
	}
	ours, err := f.Stat()
	if err != nil {
		return err
	}
	there, err := os.Stat(r.name)
	if err == nil && os.SameFile(ours, there) || err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := r.open(); err != nil {
		r.WriteCloser = f
		return err
	}
	return f.Close()
}

// standard is not closed.
type standard struct{ io.Writer }

func (standard) Close() error { return nil }
