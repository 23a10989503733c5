package packet

import (
	"bytes"
	"math/bits"
	"slices"
)

// Coalescer joins the packets of one batch into runs, as the kernel's GRO does
// (net/ipv4/tcp_offload.c, tcp_gro_receive; udp_offload.c; include/net/gro.h). A run is one
// superpacket. Its packets belong to one flow and differ only in fields that segmentation changes.
// The packets of a flow keep their order: a packet that cannot join the open run of its flow closes
// that run. A Coalescer does not copy payload. The zero value is ready to use. Reset keeps the
// internal buffers for the next batch, so that it need not allocate them again. A Coalescer must
// not be used concurrently.
type Coalescer struct {
	// UDP also joins UDP datagrams (GSOUDPL4). Set it before the first Add of a batch, and only
	// for a TUN that accepts UDP superpackets.
	UDP bool

	runs   []Run
	joined []joined // second and later packets of all runs, in order of arrival
	tails  [][]byte
	sealed int // number of elements at the start of runs that Runs has finished

	tags  [maxOpen]uint64 // tags of the runs in open, in a separate array because each packet is compared with all tags
	open  [maxOpen]openRun
	opens int
	evict int // index in open of the run to close next when maxOpen runs are open
}

// Run is one superpacket or, with Segments == 1, one packet. To write it to the TUN, pass Header,
// View.Bytes() and Tail to one writev.
type Run struct {
	// View is the first packet, with the headers of the superpacket. Its Len is the length of
	// the superpacket, Bytes returns only the first packet, and the checksum is partial. A
	// rewrite updates the partial checksum. If the run has one packet, View is that packet with
	// its complete checksum.
	View View
	// Header is zero for a single packet.
	Header VirtioHeader
	// Tail is the transport data of the second and later packets.
	Tail [][]byte
	// Segments is the number of packets in the run.
	Segments int
}

type joined struct {
	data []byte
	run  int
}

// openRun is a run to which packets may still be added. Its other fields are in the View of the
// Run.
type openRun struct {
	run      int
	seq      uint32 // TCP sequence number of the next packet
	fixedID  bool   // the IPv4 identification stays the same instead of counting up
	verified bool   // the checksums of the first packet have been verified
}

// maxOpen is the maximum number of open runs. When a further run begins, an older run is closed.
const maxOpen = 64

// Limits on the segments of a run: writev accepts 1024 buffers, and the kernel refuses a UDP
// superpacket of more than UDP_MAX_SEGMENTS datagrams, which is 64 in older versions and 128
// in newer ones (checked 2026-11).
const (
	maxTCPSegments = 512
	maxUDPSegments = 64
)

// Reset removes all runs and releases the bytes that they borrowed.
func (c *Coalescer) Reset() {
	clear(c.runs)
	clear(c.joined)
	clear(c.tails)
	c.runs, c.joined, c.tails = c.runs[:0], c.joined[:0], c.tails[:0]
	c.sealed, c.opens, c.evict = 0, 0, 0
}

// Add adds one decrypted packet, whole and with complete checksums. It borrows b until Reset, and
// changes the headers of the first packet of a run in place. A packet that cannot join another
// becomes a run by itself. Add verifies the checksums of packets before it joins them, because the
// superpacket gets a new checksum. A packet with a wrong checksum stays alone and unchanged, so
// that its receiver drops it. If View.Parse fails, Add returns its error and does not add the
// packet.
func (c *Coalescer) Add(b []byte) error {
	n := len(c.runs)
	c.runs = append(c.runs, Run{})
	r := &c.runs[n]
	v := &r.View
	if err := v.Parse(b, ChecksumComplete); err != nil {
		v.b = nil
		c.runs = c.runs[:n]
		return err
	}
	r.Segments = 1
	if !v.ports {
		if v.fragOff != 0 {
			c.closeHosts(v)
		}
		return nil
	}
	if v.proto == UDP && !c.UDP {
		return nil
	}
	tag := flowTag(v)
	fits := joinable(v)
	if i := c.find(tag, v); i >= 0 {
		if fits && c.join(i, v) {
			v.b = nil // Reset clears only the slots in use, which no longer include this one
			c.runs = c.runs[:n]
			return nil
		}
		c.close(i)
	}
	if fits && !endsRun(v) {
		c.begin(tag, n, v)
	}
	return nil
}

// joinable reports whether a packet may be part of a run. The packet must have data. It must not be
// a fragment, and must not have IP options or extension headers. TCP must have ACK and no other
// flags than PSH and ECE. UDP must have a checksum and no surplus area (RFC 9868).
func joinable(v *View) bool {
	plain := v.transport == ipv6Len
	if v.is4 {
		plain = v.transport == ipv4Len
	}
	if !plain || v.more || int(v.payload) == len(v.b) || v.csum != ChecksumComplete {
		return false
	}
	t := v.b[v.transport:]
	if v.proto == UDP {
		return int(be.Uint16(t[4:6])) == len(t)
	}
	return t[13]&^(TCPPsh|TCPEce) == TCPAck
}

// endsRun reports whether v must be the last packet of its run, because it is TCP with PSH.
func endsRun(v *View) bool { return v.proto == TCP && v.b[v.transport+13]&TCPPsh != 0 }

// flowTag combines addresses, ports and protocol into one word. Tags may collide, so find also
// compares the fields.
func flowTag(v *View) uint64 {
	ports := uint64(be.Uint32(v.b[v.transport:]))<<8 | uint64(v.proto)
	if v.is4 {
		return le.Uint64(v.b[12:20]) ^ bits.RotateLeft64(ports, 20)
	}
	a := v.b[8:40]
	return le.Uint64(a) ^ bits.RotateLeft64(le.Uint64(a[8:]), 13) ^ bits.RotateLeft64(le.Uint64(a[16:]), 29) ^
		bits.RotateLeft64(le.Uint64(a[24:]), 43) ^ bits.RotateLeft64(ports, 20)
}

// find returns the index of the open run for the flow of v, or -1.
func (c *Coalescer) find(tag uint64, v *View) int {
	for i, t := range c.tags[:c.opens] {
		if t == tag && sameFlow(&c.runs[c.open[i].run].View, v) {
			return i
		}
	}
	return -1
}

func sameHosts(a, b *View) bool {
	if a.is4 != b.is4 {
		return false
	}
	if a.is4 {
		return le.Uint64(a.b[12:20]) == le.Uint64(b.b[12:20])
	}
	return [32]byte(a.b[8:40]) == [32]byte(b.b[8:40])
}

func sameFlow(a, b *View) bool {
	return a.proto == b.proto && sameHosts(a, b) && le.Uint32(a.b[a.transport:]) == le.Uint32(b.b[b.transport:])
}

// join appends v to open run i if v continues that run, and reports whether it did.
func (c *Coalescer) join(i int, v *View) bool {
	o := &c.open[i]
	r := &c.runs[o.run]
	first := &r.View
	data := len(v.b) - int(v.payload)
	size := len(first.b) - int(first.payload)
	if v.payload != first.payload || data > size || int(first.length)+data > maxPacket {
		return false
	}
	fixedID, ok := o.sameHeader(first, v, r.Segments)
	if !ok {
		return false
	}
	if v.proto == TCP {
		ok = r.Segments < maxTCPSegments && sameTCP(first.b[first.transport:first.payload], v.b[v.transport:v.payload], o.seq)
	} else {
		ok = r.Segments < maxUDPSegments
	}
	if !ok || !o.verify(first) || !v.ValidChecksums() {
		return false
	}

	o.fixedID = fixedID
	o.seq += uint32(data)
	r.Segments++
	first.length += uint32(data)
	c.joined = append(c.joined, joined{data: v.b[v.payload:], run: o.run})
	last := endsRun(v)
	if last {
		first.b[first.transport+13] |= TCPPsh // seal will compute the checksum
	}
	if last || data < size {
		c.close(i)
	}
	return true
}

func (o *openRun) verify(first *View) bool {
	o.verified = o.verified || first.ValidChecksums()
	return o.verified
}

// sameHeader compares the IP headers of the first packet and v. In IPv4 the type of service,
// TTL and flags must be equal. The identification must count up with the segments or, with DF,
// stay the same (inet_gro_flush). In IPv6 the traffic class, flow label and hop limit must be
// equal.
func (o *openRun) sameHeader(first, v *View, segments int) (fixedID, ok bool) {
	a, b := first.b[:ipv4Len], v.b[:ipv4Len]
	if !v.is4 {
		return false, le.Uint32(a) == le.Uint32(b) && a[7] == b[7]
	}
	if a[1] != b[1] || a[8] != b[8] || le.Uint16(a[6:]) != le.Uint16(b[6:]) {
		return false, false
	}
	fixedID = o.fixedID
	step := be.Uint16(b[4:]) - be.Uint16(a[4:])
	if segments == 1 && step == 0 && b[6]&0x40 != 0 {
		fixedID = true
	}
	if fixedID {
		return true, step == 0
	}
	return false, step == uint16(segments)
}

// sameTCP compares two TCP headers. The sequence number must be seq. Acknowledgement, flags
// except PSH, window, urgent pointer and options must be equal.
func sameTCP(first, t []byte, seq uint32) bool {
	const psh = uint32(TCPPsh) << 16
	return be.Uint32(t[4:8]) == seq &&
		le.Uint32(t[8:12]) == le.Uint32(first[8:12]) &&
		(be.Uint32(t[12:16])^be.Uint32(first[12:16]))&^psh == 0 &&
		bytes.Equal(t[18:], first[18:])
}

// begin opens the run with index n in runs.
func (c *Coalescer) begin(tag uint64, n int, v *View) {
	i := c.opens
	if i == maxOpen {
		i = c.evict
		c.evict = (c.evict + 1) % maxOpen
	} else {
		c.opens++
	}
	c.tags[i] = tag
	c.open[i] = openRun{run: n}
	if v.proto == TCP {
		c.open[i].seq = be.Uint32(v.b[v.transport+4:]) + uint32(len(v.b)-int(v.payload))
	}
}

// close closes open run i: no more packets are added to it.
func (c *Coalescer) close(i int) {
	c.opens--
	c.tags[i], c.open[i] = c.tags[c.opens], c.open[c.opens]
}

// v is a fragment without ports. closeHosts closes every run of a flow to which v may belong.
func (c *Coalescer) closeHosts(v *View) {
	for i := c.opens - 1; i >= 0; i-- {
		if sameHosts(&c.runs[c.open[i].run].View, v) {
			c.close(i)
		}
	}
}

// Runs finishes all runs and returns them in the order of their first packets. The slice and
// everything that it points to are valid until Reset. Packets that are added later form new
// runs.
func (c *Coalescer) Runs() []Run {
	c.opens = 0
	c.tails = slices.Grow(c.tails, len(c.joined))
	n := len(c.tails)
	for i := c.sealed; i < len(c.runs); i++ {
		if r := &c.runs[i]; r.Segments > 1 {
			r.seal()
			r.Tail = c.tails[n : n : n+r.Segments-1]
			n += r.Segments - 1
		}
	}
	c.tails = c.tails[:n]
	for _, j := range c.joined {
		r := &c.runs[j.run]
		r.Tail = append(r.Tail, j.data)
	}
	clear(c.joined)
	c.joined = c.joined[:0]
	c.sealed = len(c.runs)
	return c.runs
}

// seal turns the headers of the first packet into those of the superpacket.
func (r *Run) seal() {
	v := &r.View
	kind := GSOUDPL4
	if v.is4 {
		ip := v.b[:ipv4Len]
		delta := delta16(be.Uint16(ip[2:4]), uint16(v.length))
		be.PutUint16(ip[2:4], uint16(v.length))
		be.PutUint16(ip[10:12], updated(be.Uint16(ip[10:12]), delta))
	} else {
		be.PutUint16(v.b[4:6], uint16(v.length-ipv6Len))
	}
	length := int(v.length) - int(v.transport)
	switch {
	case v.proto == UDP:
		be.PutUint16(v.b[v.transport+4:], uint16(length))
	case v.is4:
		kind = GSOTCPv4
	default:
		kind = GSOTCPv6
	}
	be.PutUint16(v.b[v.sum:], fold(v.pseudoSum(length)))
	v.csum = ChecksumPartial
	r.Header = VirtioHeader{
		Flags: VirtioNeedsCsum, GSOType: kind, HdrLen: v.payload, GSOSize: uint16(len(v.b) - int(v.payload)),
		CsumStart: v.transport, CsumOffset: v.sum - v.transport,
	}
}
