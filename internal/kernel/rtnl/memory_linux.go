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

// rereadInterval is the longest time between two complete reads of the kernel's objects. They repair
// what a lost event has hidden. Each interval is a random one between half of it and all of it, so that
// nodes do not read at the same time. Only tests change it.
var rereadInterval = 10 * time.Minute

// memory is a copy of the kernel's objects: the last read, and our changes since. Each change is an event
// that names its sender, so a foreign change makes the copy stale. A copy of thousands of routes costs a
// node less than to read them at every event.
type memory struct {
	state *kernel.State // nil: nothing is known. Apply's alone
	until time.Time     // of the next complete read

	following atomic.Bool // events are read
	stale     atomic.Bool // a foreign change of our objects
	filter    atomic.Bool // a foreign change of our nftables tables, or of a chain for forwarded packets
	// chains are the names of the nftables chains for forwarded packets, each with a zero at its end.
	chains atomic.Pointer[[][]byte]

	mu      sync.Mutex
	written [2]map[neighbor]neighborValue // the neighbours that we have written, by namespace
	commits []commit                      // the last transactions of nftables that we began
	ports   [2][]uint32                   // of our netlink sockets, by namespace
	devices [2]map[int]bool               // indices of the devices that concern us; true: routes and addresses on them are ours
}

// newHandle opens the socket for changes of a namespace, and notes its port, which the events of our
// own changes carry (rtnl_notify, net/core/rtnetlink.c).
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

// netlinkPorts are the ports of all netlink sockets of this process, by descriptor: a port is one's
// own in each network namespace.
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

// remembered returns the objects of the owner, from memory if nobody has changed them since.
func (k *Kernel) remembered(want kernel.State) (kernel.State, error) {
	m := &k.memory
	if m.state == nil || !m.following.Load() || m.stale.Load() || time.Now().After(m.until) || !k.hasLinks(want) {
		m.stale.Store(false) // before it is read: what changes meanwhile is read again
		m.filter.Store(false)
		m.until = time.Now().Add(rereadInterval/2 + rand.N(rereadInterval/2))
		m.state = nil // an error leaves nothing to go by
		return k.have(want)
	}
	have := *m.state
	have.Settings = nil
	if k.owner.Filter && m.filter.Swap(false) {
		tables := k.haveTables()
		have.Filters, have.SourceNAT, have.Bridges = tables.filters, tables.sourceNAT, tables.bridges
		now := have
		m.state = &now // also where an error follows
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

// hasLinks reports whether all links that are wanted were there.
func (k *Kernel) hasLinks(want kernel.State) bool {
	return !slices.ContainsFunc(want.Links, func(l kernel.Link) bool {
		return !slices.ContainsFunc(k.memory.state.Links, func(have kernel.Link) bool { return have.In == l.In && have.Name == l.Name })
	})
}

// concerned notes devices of a namespace whose events concern us. ours says that what hangs on them
// is the owner's.
func (m *memory) concerned(in kernel.Namespace, ours bool, indices ...int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.devices[in] == nil {
		m.devices[in] = make(map[int]bool)
	}
	for _, i := range indices {
		m.devices[in][i] = m.devices[in][i] || ours
	}
}

// device says whether events of a device concern us, and whether what hangs on it is the owner's.
func (m *memory) device(in kernel.Namespace, index int) (concerns, ours bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	ours, concerns = m.devices[in][index]
	return concerns, ours
}

// A neighbor is an entry for an address or, where it has none, an entry of a forwarding database.
type neighbor struct {
	index int
	addr  netip.Addr
	mac   kernel.MAC
}

// neighborValue is what an entry says; zero: there is none.
type neighborValue struct {
	there bool
	mac   kernel.MAC
	dst   netip.Addr
}

// write notes what we are about to make of a neighbour. Events of what we remove, and all of those of
// forwarding databases, do not carry our port (neigh_cleanup_and_release, vxlan_fdb_notify): ours are
// known by what they say. Whoever changes an entry later says something else.
func (m *memory) write(in kernel.Namespace, n neighbor, value neighborValue) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.written[in] == nil || len(m.written[in]) > 1<<16 { // one that is forgotten is read again
		m.written[in] = make(map[neighbor]neighborValue)
	}
	m.written[in][n] = value
}

// wrote reports whether it was us who made a neighbour what it is.
func (m *memory) wrote(in kernel.Namespace, n neighbor, value neighborValue) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	was, known := m.written[in][n]
	return known && was == value
}

// A commit is a transaction of nftables, by the generation that it makes.
type commit struct {
	generation uint32
	at         time.Time
}

// commit notes that we are about to make the generation after one; 0: it is not known. Whoever does
// that has to look afterwards whether it was him.
func (m *memory) commit(before uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.commits = slices.DeleteFunc(m.commits, func(c commit) bool { return time.Since(c.at) > commitAge })
	if before != 0 {
		m.commits = append(m.commits, commit{before + 1, time.Now()})
	}
}

// commitAge is how long a transaction is known as ours. Messages have 16 bits of its generation: there
// must not be that many transactions meanwhile.
const commitAge = 10 * time.Second

// committed reports whether a message is about a transaction that we made.
func (m *memory) committed(generation uint16) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.commits, func(c commit) bool { return uint16(c.generation) == generation && time.Since(c.at) <= commitAge })
}

// isOurs reports whether a port is that of one of our sockets.
func (m *memory) isOurs(in kernel.Namespace, port uint32) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Contains(m.ports[in], port)
}
