package kube

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"slices"
	"sync"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/statefile"
)

const (
	nodeMemoryName    = "node.json"
	nodeMemoryLimit   = 4 << 20 // octets; the agent's snapshot has the same limit
	nodeMemoryVersion = 1
)

// A nodeMemory is the last intent of an agent, saved on disk. An agent that starts while the
// API server is unavailable uses this intent, with the gateway that the nodes have elected
// since.
type nodeMemory struct {
	Version int               `json:"version"`
	Epoch   uint64            `json:"epoch"` // epoch of the gateway in the intent; 0: nodes do not vote
	Intent  fabric.NodeIntent `json:"intent"`
}

// memoryOf reads the file that remember wrote. It returns nil if the file is missing or
// unusable.
func memoryOf(directory string, log *slog.Logger) *nodeMemory {
	m := new(nodeMemory)
	switch err := statefile.Read(directory, nodeMemoryName, nodeMemoryLimit, m); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		log.Warn("cannot read the saved state of this node", "error", err)
		return nil
	case m.Version != nodeMemoryVersion || m.Epoch == 0:
		return nil
	}
	return m
}

// remember saves an intent if nodes vote.
func (w *nodeWatch) remember(in fabric.NodeIntent) {
	if w.directory == "" || w.epoch == 0 && w.remembers == 0 {
		return
	}
	if err := statefile.Write(w.directory, nodeMemoryName, nodeMemoryLimit, nodeMemory{nodeMemoryVersion, w.epoch, in}); err != nil {
		w.log.Warn("cannot save the state of this node: an agent that starts during an API server outage will not follow a new gateway", "error", err)
		return
	}
	w.remembers = w.epoch
}

// recall delivers the saved intent with the gateway that the nodes have elected since, and delivers
// it again after each signal from elected. stop ends recall and waits until it has ended.
func (w *nodeWatch) recall(ctx context.Context, elected signal, deliver func(fabric.NodeIntent, []fabric.Problem)) (stop func()) {
	m := memoryOf(w.directory, w.log)
	if m == nil {
		return func() {}
	}
	w.remembers = m.Epoch
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-elected:
			}
			h, in := w.voter.Holder(), m.Intent
			if h.Epoch <= m.Epoch || !slices.ContainsFunc(in.Gateways, func(g fabric.GatewayPod) bool { return g.Addr == h.Addr && !g.HostNetwork }) {
				continue
			}
			w.log.Info("using the elected gateway that the saved state names", "pod", h.Pod, "epoch", h.Epoch)
			m.Epoch, in.Gateway = h.Epoch, h.Addr
			deliver(in, nil)
		}
	})
	return sync.OnceFunc(func() { cancel(); group.Wait() })
}

// ForgetNode removes the saved state of an agent.
func ForgetNode(directory string) error { return statefile.Remove(directory, nodeMemoryName) }
