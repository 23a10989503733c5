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

// FlowLog says where and how flows are logged, as lines of JSON. The zero value logs none.
type FlowLog struct {
	File      string // name of the file to append to, or "-" for standard output; empty: no log
	Sample    int    // log one flow in Sample; 0 means 1
	PerSecond int    // largest number of lines a second; 0 means DefaultFlowLogRate
}

// DefaultFlowLogRate is how many lines a second a flow log has at most.
const DefaultFlowLogRate = 1000

// flowQueue bounds the events that wait for the writer. Further ones are left out and counted.
const flowQueue = 4096

// flowLog writes the engine's events of flows. The engine never waits for it.
type flowLog struct {
	queue   chan natengine.FlowEvent
	omitted atomic.Uint64
	limit   *rate.Limiter
	file    *reopened
	names   atomic.Pointer[map[string]string] // of peers, by ID; never modified
	// returns the owner of an address of this cluster; nil: owners are not known
	owner func(netip.Addr) fabric.Owner
	log   *slog.Logger
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
	Local     string    `json:"local,omitempty"` // our end
	// namespace/name of the pod that has the address when the line is written, if any
	LocalPod string `json:"localPod,omitempty"`
	// node of that pod, or the node that has the address itself
	LocalNode string   `json:"localNode,omitempty"`
	Mapped    string   `json:"mapped,omitempty"`  // our end as the peer knows it
	Remote    string   `json:"remote,omitempty"`  // the peer's end
	Reason    string   `json:"reason,omitempty"`  // of "closed" and "refused"
	Seconds   *float64 `json:"seconds,omitempty"` // of "closed": from the first packet to the last
	Count     uint64   `json:"count,omitempty"`   // of "omitted": lines left out since the last such line
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

// name sets the names of peers. It may be called while run works.
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
		_ = lines.Encode(r) // Flush returns the error again
	}
	flush := func() {
		err := w.Flush()
		if err != nil {
			w.Reset(l.file) // otherwise all later writes would fail
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
			_ = l.limit.Wait(ctx) // the loop above notices its end
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
	// A refused inbound packet has our end as the peer calls it. The same address may mean another
	// pod here.
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

// reopened is a file to append to. It is made again after another program has moved it away.
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

// follow opens the file again when its name no longer leads to it.
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

// standard output is not closed.
type standard struct{ io.Writer }

func (standard) Close() error { return nil }
