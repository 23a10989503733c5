// Package rtnl applies a kernel.State by rtnetlink(7) and nftables, in the network namespace of the
// process. For a gateway on the host network, it also creates a second namespace, and manages
// objects there. It owns the objects that package kernel lists for an Owner, and holds a lock so
// that only one process manages them. The kernel holds the state: after a crash, the next process
// finds everything in place and changes nothing. The route agent and the gateway open one Kernel
// each.
package rtnl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	nfnl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// ErrOther means that another process with the same Owner runs in the network namespace.
var ErrOther = errors.New("another isthmus")

// Kernel manages the objects of one owner. Only one goroutine may use it, except that any goroutine
// may call Path.
type Kernel struct {
	owner   kernel.Owner
	log     *slog.Logger
	lock    io.Closer
	inner   *os.File // the Inner namespace; nil: the owner has none
	handles [2]*netlink.Handle
	wg      sync.WaitGroup // goroutines that read events

	nft     *nfnl.Conn           // socket for frequent nftables requests; nil: not open
	index   map[kernel.Place]int // indices of devices
	tables  tablesRead
	forward []forwarding   // foreign chains for forwarded packets
	legacy  time.Time      // when the chain of iptables-legacy was read; no event reports its changes
	unmade  []kernel.Limit // optional objects that could not be made
	theirs  []kernel.Limit // limits caused by foreign rules, as last read
	failed  struct{ nat, bridge error }
	busy    bool // during the last Apply, another program had the lock of iptables-legacy, or changed nftables
	bridged bool // a Bridge existed after the last Apply that could read the kernel's state
	applied bool // an earlier Apply could read the kernel's state
	memory  memory
}

// Open acquires the owner's lock in the network namespace. If the owner needs an Inner namespace,
// it makes an empty one. The caller must close the Kernel.
func Open(owner kernel.Owner, log *slog.Logger) (*Kernel, error) {
	l, err := lock(owner, log, true)
	if err != nil {
		return nil, err
	}
	return withLock(owner, l, log)
}

// followInterval is the time between two attempts of Follow to get the lock. Each attempt costs a
// socket and an nftables transaction.
const followInterval = 100 * time.Millisecond

// Follow is Open for a process that takes over from another process. It waits until the other
// process has ended, or until ctx ends.
func Follow(ctx context.Context, owner kernel.Owner, log *slog.Logger) (*Kernel, error) {
	for warn := true; ; warn = false {
		l, err := lock(owner, log, warn)
		if err == nil {
			return withLock(owner, l, log)
		}
		if !errors.Is(err, ErrOther) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(followInterval):
		}
	}
}

// Look reads what Apply would read, and subscribes to events, without holding the lock. It changes
// nothing. An error shows that this process could not take over.
func Look(owner kernel.Owner, want kernel.State, log *slog.Logger) error {
	k, err := withLock(owner, nil, log)
	if err != nil {
		return err
	}
	defer k.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel() // before Close
	if err := k.Events(ctx, func() {}); err != nil {
		return err
	}
	for range 5 { // repeat interrupted dumps, as in apply
		if _, err = k.readObjects(want); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return err
}

// withLock is Open with a lock that has been acquired already. If withLock fails, it closes the
// lock.
func withLock(owner kernel.Owner, lock io.Closer, log *slog.Logger) (_ *Kernel, err error) {
	k := &Kernel{owner: owner, log: log, lock: lock}
	defer func() {
		if err != nil {
			k.Close()
		}
	}()
	if err = k.newHandle(kernel.Host); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	if len(owner.Tables[kernel.Inner]) == 0 {
		return k, nil
	}
	if k.inner, err = NewNamespace(); err != nil {
		return nil, fmt.Errorf("network namespace: %w", explain(err, "CAP_SYS_ADMIN"))
	}
	err = k.Inside(func() error { return k.newHandle(kernel.Inner) })
	if err != nil {
		return nil, fmt.Errorf("netlink in the namespace of the %s: %w", owner.Name, explain(err, "CAP_SYS_ADMIN"))
	}
	return k, nil
}

// Busy reports whether the last Apply may be incomplete because another program changed
// iptables-legacy or an nftables table at the same time. The caller should apply again soon.
func (k *Kernel) Busy() bool { return k.busy }

// Bridged reports whether a Bridge existed after the last Apply that could read the kernel's state.
// Before such an Apply, it reports whether a Bridge exists now: a restarted agent must not remove
// objects that depend on the Bridge.
func (k *Kernel) Bridged() bool {
	if !k.applied {
		b := readBridge()
		return len(b) == 1 && b[0] != changedBridge
	}
	return k.bridged
}

// errUnread means that the kernel's state could not be read. Nothing was changed.
var errUnread = errors.New("reading the kernel's state")

// Close waits for the goroutines that read events; their contexts must have ended. Objects stay,
// but the Inner namespace disappears unless a file or process keeps it.
func (k *Kernel) Close() {
	k.wg.Wait()
	for _, h := range k.handles {
		if h != nil {
			h.Close()
		}
	}
	k.closeNFT()
	if k.inner != nil {
		k.inner.Close()
	}
	if k.lock != nil {
		k.lock.Close()
	}
}

// Inside is Do for the Inner namespace. Without an Inner namespace, it runs fn in the present one.
func (k *Kernel) Inside(fn func() error) error {
	if k.inner == nil {
		return fn()
	}
	return Do(k.inner, fn)
}

// do runs fn in one of the namespaces.
func (k *Kernel) do(in kernel.Namespace, fn func() error) error {
	if in == kernel.Inner {
		return k.Inside(fn)
	}
	return fn()
}

// Path returns a path of the Inner namespace for `nsenter --net=`, or "" if there is none.
func (k *Kernel) Path() string {
	if k.inner == nil {
		return ""
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), k.inner.Fd())
}

// Apply brings the kernel to the state want, and returns the changes that succeeded. It continues
// after a failure and joins all errors, but stops at ErrFilter.
func (k *Kernel) Apply(want kernel.State) (kernel.Plan, error) {
	done, err := k.apply(want, kernel.PlanFor, func(_ kernel.State, _ kernel.Plan) *kernel.State { return &want })
	if !errors.Is(err, errUnread) {
		k.applied = true
		k.bridged = len(want.Bridges) > 0 && k.failed.bridge == nil && !errors.Is(err, ErrFilter)
	}
	return done, err
}

// Add adds the wanted objects, and changes nothing else.
func (k *Kernel) Add(want kernel.State) (kernel.Plan, error) {
	return k.apply(want, kernel.AdditionsFor, func(have kernel.State, did kernel.Plan) *kernel.State {
		if now, ok := have.With(did); ok {
			return &now
		}
		return nil
	})
}

// Refused returns the networks for which kernel.RefuseTable in the host's namespace has refusing
// routes, made by any process with the same Owner.
func (k *Kernel) Refused() (all []netip.Prefix, err error) {
	var s kernel.State
	for range 5 { // repeat interrupted dumps, as in apply
		s = kernel.State{}
		if err = k.haveRoutes(&s, kernel.Host); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	for _, r := range s.Routes {
		if r.Table == kernel.RefuseTable && r.Type == kernel.Unreachable && r.Prefix.Bits() > 0 {
			all = append(all, r.Prefix)
		}
	}
	return all, err
}

// apply executes the plan. The function after returns the state that results if all changes
// succeed, or nil if that state is unknown.
func (k *Kernel) apply(want kernel.State, plan func(have, want kernel.State) kernel.Plan, after func(kernel.State, kernel.Plan) *kernel.State) (kernel.Plan, error) {
	have, err := k.remembered(want)
	for range 5 { // a change during a dump interrupts it, which is common on a busy node
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
		have, err = k.readObjects(want)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnread, err)
	}
	if k.owner.NAT && time.Since(k.legacy) > legacyInterval {
		k.lookLegacy()
	}
	have.Accepts, want.Accepts = k.acceptsIn(want.Accepts)
	k.memory.state = nil // the state is unknown until all changes have succeeded
	var done kernel.Plan
	var errs []error
	k.unmade, k.busy = nil, false
	k.failed.nat, k.failed.bridge = nil, nil
	for _, o := range plan(have, want) {
		err := k.change(o)
		if _, isFilter := o.Object.(kernel.Filter); isFilter && err != nil && !o.Remove {
			return done, fmt.Errorf("%w: %w (want a kernel with nftables, conntrack and fib, and CAP_NET_ADMIN)", ErrFilter, err)
		}
		if limit, ok := limitOf(o, err); ok {
			switch o.Object.(type) {
			case kernel.SourceNAT:
				k.failed.nat = err
			case kernel.Bridge:
				k.failed.bridge = err
			}
			if limit.Reason != kernel.LimitBridge || !bridgesFiltered() {
				k.unmade = append(k.unmade, limit)
			}
			continue
		}
		k.busy = k.busy || errors.Is(err, errBusy)
		if errors.Is(err, errUnwritable) || errors.Is(err, errBusy) {
			continue // not an error: the setting is optional, and Busy reports the lock
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", o.Command(k.Path()), explain(err, "CAP_NET_ADMIN")))
			continue
		}
		done = append(done, o)
	}
	if len(errs) == 0 {
		k.memory.state = after(have, done)
	}
	if now := k.memory.state; now != nil && (k.failed.nat != nil || k.failed.bridge != nil) {
		without := *now // without the failed objects, so that the next Apply adds these objects
		if k.failed.nat != nil {
			without.SourceNAT = nil
		}
		if k.failed.bridge != nil {
			without.Bridges = nil
		}
		k.memory.state = &without
	}
	return done, errors.Join(errs...)
}

// bridgesFiltered reports whether br_netfilter passes bridged packets to a Filter.
func bridgesFiltered() bool {
	b, err := os.ReadFile("/proc/sys/net/bridge/bridge-nf-call-iptables")
	return err == nil && strings.TrimSpace(string(b)) == "1"
}

// limitOf returns the Limit that results from the failure to make an optional object. It returns
// false for other objects.
func limitOf(o kernel.Op, err error) (l kernel.Limit, ok bool) {
	if err == nil || o.Remove {
		return l, false
	}
	switch v := o.Object.(type) {
	case kernel.SourceNAT:
		return kernel.Limit{Reason: kernel.LimitMasqueraded, Message: fmt.Sprintf(
			"cannot exempt packets of pods from the CNI's masquerading (nftables: %v); %s; want a kernel with NAT in nftables (nf_tables, nft_chain_nat)", explain(err, "CAP_NET_ADMIN"), masqueradeCost)}, true
	case kernel.Bridge:
		return kernel.Limit{Reason: kernel.LimitBridge, Message: fmt.Sprintf(
			"cannot filter on bridges (nftables: %v): if the gateway's Pod is on a bridge of this node, a pod on that bridge can send to the gateway as if it were a node; want a kernel with nftables for bridges (nf_tables_bridge), or br_netfilter with net.bridge.bridge-nf-call-iptables=1",
			explain(err, "CAP_NET_ADMIN"))}, true
	case kernel.Accept:
		return refusal(v, explain(err, "CAP_NET_ADMIN")), !errors.Is(err, errBusy)
	}
	return l, false
}

// explain adds the name of the missing capability to a permission error.
func explain(err error, capability string) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w (the process needs %s)", err, capability)
	}
	return err
}
