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

// FlowLog configures the flow log, which has one JSON object per line. The zero value disables
// it.
type FlowLog struct {
	File      string // name of the file to append to, or "-" for standard output; empty: no log
	Sample    int    // log one flow in Sample; 0 means 1
	PerSecond int    // maximum number of lines a second; 0 means DefaultFlowLogRate
}

// DefaultFlowLogRate is the default of FlowLog.PerSecond.
const DefaultFlowLogRate = 1000

// flowQueue is the maximum number of events that wait for the writer. Further events are dropped
// and counted.
const flowQueue = 4096

// flowLog writes the engine's flow events to a file. The engine never blocks on it.
type flowLog struct {
	queue   chan natengine.FlowEvent
	omitted atomic.Uint64
	limit   *rate.Limiter
	file    *logFile
	names   atomic.Pointer[map[string]string] // names of the peers by cluster ID; the map is never modified
	// owner returns the pod or node that has an address of this cluster. If it is nil, the log
	// contains no pods and nodes.
	owner func(netip.Addr) fabric.Owner
	log   *slog.Logger
}

// FlowRecord is one line of the flow log.
type FlowRecord struct {
	Time      time.Time `json:"time"`
	Event     string    `json:"event"` // "opened", "closed", "refused", or "omitted"
	Peer      string    `json:"peer,omitempty"`
	PeerName  string    `json:"peerName,omitempty"`
	Kind      string    `json:"kind,omitempty"`      // "napt", "endpoint" or "pod"
	Direction string    `json:"direction,omitempty"` // "outbound" or "inbound": of the flow's first packet, or of the refused packet
	Protocol  string    `json:"protocol,omitempty"`
	Local     string    `json:"local,omitempty"` // our end of the flow
	// LocalPod is the namespace/name of the pod that has the address Local when the line is
	// written. It is empty if no pod has it.
	LocalPod string `json:"localPod,omitempty"`
	// LocalNode is the node of that pod, or the node that has the address Local itself.
	LocalNode string   `json:"localNode,omitempty"`
	Mapped    string   `json:"mapped,omitempty"`  // our end, as the peer sees it
	Remote    string   `json:"remote,omitempty"`  // the peer's end of the flow
	Reason    string   `json:"reason,omitempty"`  // for "closed" and "refused"
	Seconds   *float64 `json:"seconds,omitempty"` // for "closed": seconds from the first packet to the last
	Count     uint64   `json:"count,omitempty"`   // for "omitted": number of lines left out since the previous "omitted" line
}

// openFlowLog opens the file at once, so that a wrong file name makes the gateway fail at its
// start.
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

// setNames sets the names of the peers. It may be called while run runs.
func (l *flowLog) setNames(peers []*fabric.GatewayPeer) {
	names := make(map[string]string, len(peers))
	for _, p := range peers {
		names[p.ID] = p.Name
	}
	l.names.Store(&names)
}

// observe queues an event for the writer. It never blocks.
func (l *flowLog) observe(ev natengine.FlowEvent) {
	select {
	case l.queue <- ev:
	default:
		l.omitted.Add(1)
	}
}

// run writes queued events until done is closed. It flushes when the queue is empty, and at least
// once a second.
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
		_ = lines.Encode(r) // a bufio.Writer keeps its error, so Flush returns it as well
	}
	flush := func() {
		err := w.Flush()
		if err != nil {
			w.Reset(l.file) // clears the error, which would fail all later writes
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
			_ = l.limit.Wait(ctx) // an error means that ctx has ended, which the loop above detects
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
	// In a refused inbound packet, Local is our end as the peer sees it. In this cluster the same
	// address may belong to another pod, so the record gets no owner.
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

// logFile is a file opened for appending. follow opens it again after log rotation.
type logFile struct {
	name string
	io.WriteCloser
}

func reopen(name string) (*logFile, error) {
	r := &logFile{name: name}
	if name == "-" {
		r.WriteCloser = standard{os.Stdout}
		return r, nil
	}
	return r, r.open()
}

func (r *logFile) open() (err error) {
	r.WriteCloser, err = os.OpenFile(r.name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	return err
}

// follow opens the file again if its name now refers to another file or to none, as after log
// rotation.
func (r *logFile) follow() error {
	f, ok := r.WriteCloser.(*os.File)
	if !ok {
		return nil
	}
	ours, err := f.Stat()
	if err != nil {
		return err
	}
	onDisk, err := os.Stat(r.name)
	if err == nil && os.SameFile(ours, onDisk) || err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := r.open(); err != nil {
		r.WriteCloser = f
		return err
	}
	return f.Close()
}

// standard is standard output; closing it does nothing.
type standard struct{ io.Writer }

func (standard) Close() error { return nil }
