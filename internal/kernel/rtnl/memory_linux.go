package rtnl

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// rereadInterval is the maximum time between two complete reads of the kernel's objects, which
// repair the effect of lost events. Each interval is random and at least half of the maximum, so
// that nodes do not read at the same time. Only tests change it.
var rereadInterval = 10 * time.Minute

// memory is a copy of the kernel's objects: the result of the last read, and our changes since. A
// foreign change marks the copy as stale. With thousands of routes, keeping a copy costs less than
// reading the routes at every event.
type memory struct {
	state *kernel.State // nil: unknown; only Apply uses it
	until time.Time     // time of the next complete read

	following atomic.Bool // Events is reading events
	stale     atomic.Bool // another program has changed our objects
	filter    atomic.Bool // another program has changed our nftables tables, or a chain for forwarded packets
	// chains has the names of the nftables chains for forwarded packets, each with a trailing zero.
	chains atomic.Pointer[[][]byte]

	mu      sync.Mutex
	written [2]map[neighbor]neighborValue // values of neighbours that we have written, by namespace
	commits []commit                      // our last nftables transactions
	ports   [2][]uint32                   // ports of our netlink sockets, by namespace
	devices [2]map[int]bool               // indices of relevant devices, by namespace; true: routes and addresses on the device are ours
}

// newHandle opens the socket for changes in a namespace, and records its port. Events of our own
// changes carry that port (rtnl_notify, net/core/rtnetlink.c).
func (k *Kernel) newHandle(in kernel.Namespace) (err error) {
	before := netlinkPorts()
	k.handles[in], err = netlink.NewHandle(unix.NETLINK_ROUTE)
	for fd, port := range netlinkPorts() {
		if was, open := before[fd]; !open || was != port {
			k.memory.ports[in] = append(k.memory.ports[in], port)
		}
	}
	return err
}

// netlinkPorts returns the ports of all netlink sockets of this process, by file descriptor. Ports
// are unique per network namespace only.
func netlinkPorts() map[int]uint32 {
	all := make(map[int]uint32)
	files, _ := os.ReadDir("/proc/self/fd")
	for _, f := range files {
		if fd, err := strconv.Atoi(f.Name()); err == nil {
			if a, err := unix.Getsockname(fd); err == nil {
				if n, ok := a.(*unix.SockaddrNetlink); ok {
					all[fd] = n.Pid
				}
			}
		}
	}
	return all
}

// remembered returns the objects of the owner. It uses the copy in memory if that is recent, and no
// other program has changed the objects since.
func (k *Kernel) remembered(want kernel.State) (kernel.State, error) {
	m := &k.memory
	if m.state == nil || !m.following.Load() || m.stale.Load() || time.Now().After(m.until) || !k.hasLinks(want) {
		m.stale.Store(false) // before the read, so that a concurrent change causes another read
		m.filter.Store(false)
		m.until = time.Now().Add(rereadInterval/2 + rand.N(rereadInterval/2))
		m.state = nil // an error leaves the state unknown
		return k.readObjects(want)
	}
	have := *m.state
	have.Settings = nil
	if k.owner.Filter && m.filter.Swap(false) {
		tables := k.haveTables()
		have.Filters, have.SourceNAT, have.Bridges = tables.filters, tables.sourceNAT, tables.bridges
		now := have
		m.state = &now // set before the reads below, which may fail
	}
	for in, h := range k.handles {
		if h != nil {
			if err := k.haveSettings(&have, kernel.Namespace(in), want.Settings); err != nil {
				return have, err
			}
		}
	}
	return have, nil
}

// hasLinks reports whether all wanted links exist in memory.
func (k *Kernel) hasLinks(want kernel.State) bool {
	return !slices.ContainsFunc(want.Links, func(l kernel.Link) bool {
		return !slices.ContainsFunc(k.memory.state.Links, func(have kernel.Link) bool { return have.In == l.In && have.Name == l.Name })
	})
}

// addRelevant records devices whose events are relevant. ours is true if the objects on the devices
// are the owner's.
func (m *memory) addRelevant(in kernel.Namespace, ours bool, indices ...int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.devices[in] == nil {
		m.devices[in] = make(map[int]bool)
	}
	for _, i := range indices {
		m.devices[in][i] = m.devices[in][i] || ours
	}
}

// device reports whether events of a device are relevant, and whether the objects on the device are
// the owner's.
func (m *memory) device(in kernel.Namespace, index int) (concerns, ours bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	ours, concerns = m.devices[in][index]
	return concerns, ours
}

// A neighbor identifies a neighbour entry or, without addr, an entry of a forwarding database.
type neighbor struct {
	index int
	addr  netip.Addr
	mac   kernel.MAC
}

// neighborValue is the value of an entry, or zero if the entry does not exist.
type neighborValue struct {
	present bool
	mac     kernel.MAC
	dst     netip.Addr
}

// write records the value that we are about to give to a neighbour. Events about removals, and all
// events of forwarding databases, do not carry our port (neigh_cleanup_and_release,
// vxlan_fdb_notify). We recognise events of our own changes by the value instead. A later foreign
// change has another value.
func (m *memory) write(in kernel.Namespace, n neighbor, value neighborValue) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.written[in] == nil || len(m.written[in]) > 1<<16 { // forget all: for a forgotten object, our own event only causes another read
		m.written[in] = make(map[neighbor]neighborValue)
	}
	m.written[in][n] = value
}

// wrote reports whether we gave a neighbour its present value.
func (m *memory) wrote(in kernel.Namespace, n neighbor, value neighborValue) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	was, known := m.written[in][n]
	return known && was == value
}

// A commit is an nftables transaction of ours, identified by the generation that it creates.
type commit struct {
	generation uint32
	at         time.Time
}

// commit records that we are about to create the generation after present. present is the current
// generation, or 0 if that is unknown. The caller has to check afterwards whether the created
// generation is really ours.
func (m *memory) commit(present uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.commits = slices.DeleteFunc(m.commits, func(c commit) bool { return time.Since(c.at) > commitAge })
	if present != 0 {
		m.commits = append(m.commits, commit{present + 1, time.Now()})
	}
}

// commitAge is the time for which a transaction counts as ours. Messages contain only 16 bits of
// the generation, so this works if fewer than 65,536 transactions happen in that time.
const commitAge = 10 * time.Second

// committed reports whether a message is about a transaction that we made.
func (m *memory) committed(generation uint16) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.commits, func(c commit) bool { return uint16(c.generation) == generation && time.Since(c.at) <= commitAge })
}

// isOurs reports whether one of our sockets has the port.
func (m *memory) isOurs(in kernel.Namespace, port uint32) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Contains(m.ports[in], port)
}
