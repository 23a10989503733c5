// Package load is the load generator of the benchmark programs. Each load runs as a separate
// process inside a pod, so that its CPU time is not counted as the tunnel's:
//
//	sink               discards TCP streams and UDP datagrams and reports their size
//	echo               answers each UDP datagram
//	tcp ADDR N MS      sends on N streams for MS milliseconds
//	udp ADDR SIZE MS PPS  sends datagrams of SIZE octets, PPS a second (0: as fast as possible)
//	rate ADDR SIZE MS  finds the highest rate of such datagrams without loss, by trials of MS milliseconds
//	rtt ADDR MS        measures round trips, one datagram at a time
//
// Each prints one JSON object on standard output. Start and Run call a benchmark program as
// "PROGRAM load WORD..." inside a host of a lab, and that program passes the words to Main.
package load

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/lab"
)

const (
	tcpPort  = 5201 // sink, TCP; it returns a byte count when the sender has closed its half
	udpPort  = 5202 // sink, UDP; a datagram of one octet requests the count
	echoPort = 5203
)

// A Result holds the measurements of a load process.
type Result struct {
	Bytes   uint64  `json:"bytes,omitempty"`   // payload that arrived at the other pod
	Sent    uint64  `json:"sent,omitempty"`    // datagrams sent
	Packets uint64  `json:"packets,omitempty"` // datagrams that arrived
	Rate    float64 `json:"rate,omitempty"`    // datagrams a second without loss
	Seconds float64 `json:"seconds"`           // duration of the sending
	P50     float64 `json:"p50,omitempty"`     // round trip, microseconds
	P90     float64 `json:"p90,omitempty"`
	P99     float64 `json:"p99,omitempty"`
	P999    float64 `json:"p999,omitempty"`
}

// Start starts a program inside h, with env added to the caller's environment, and waits until
// the program prints that it is ready.
func Start(ctx context.Context, h *lab.Host, env []string, args ...string) (*os.Process, error) {
	cmd := h.Command(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		_ = cmd.Process.Kill()
		return nil, errors.Join(fmt.Errorf("%s in %s did not start: %q: %w", args[0], h.Name, line, err), cmd.Wait())
	}
	return cmd.Process, nil
}

// Run runs "program load ARGS..." inside h until it exits.
func Run(ctx context.Context, h *lab.Host, program string, args ...string) (res Result, err error) {
	out, err := h.Command(ctx, program, append([]string{"load"}, args...)...).Output()
	if err != nil {
		return res, err
	}
	return res, json.Unmarshal(out, &res)
}

// Main runs a load process. args are the words after "load".
func Main(args []string) error {
	if len(args) == 0 {
		return errors.New("load: want sink, echo, tcp, udp, rate or rtt")
	}
	number := func(i int) int {
		if i >= len(args) {
			return 0
		}
		n, _ := strconv.Atoi(args[i])
		return n
	}
	milliseconds := func(i int) time.Duration { return time.Duration(number(i)) * time.Millisecond }
	var res Result
	var err error
	switch {
	case args[0] == "sink":
		return sink()
	case args[0] == "echo":
		return echo()
	case args[0] == "tcp" && len(args) == 4:
		res, err = sendTCP(args[1], number(2), milliseconds(3))
	case args[0] == "udp" && len(args) == 5:
		res, err = sendUDP(args[1], number(2), milliseconds(3), number(4))
	case args[0] == "rate" && len(args) == 4:
		res, err = losslessRate(args[1], number(2), milliseconds(3))
	case args[0] == "rtt" && len(args) == 3:
		res, err = roundTrips(args[1], milliseconds(2))
	default:
		return fmt.Errorf("load %q: unknown or incomplete", args)
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(res)
}

func sink() error {
	lis, err := net.Listen("tcp4", fmt.Sprintf(":%d", tcpPort))
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				buf := make([]byte, 256<<10)
				var total uint64
				for {
					n, err := c.Read(buf)
					total += uint64(n)
					if err != nil {
						break
					}
				}
				_ = binary.Write(c, binary.BigEndian, total)
			}()
		}
	}()
	pc, err := net.ListenUDP("udp4", &net.UDPAddr{Port: udpPort})
	if err != nil {
		return err
	}
	_ = pc.SetReadBuffer(8 << 20)
	fmt.Println("ready")
	in := newMessages(64, 2048)
	raw, err := pc.SyscallConn()
	if err != nil {
		return err
	}
	var packets, bytes uint64
	for {
		n, err := in.transfer(raw.Read, unix.SYS_RECVMMSG)
		if err != nil {
			return err
		}
		for i, m := range in.headers[:n] {
			if m.n != 1 {
				packets++
				bytes += uint64(m.n)
				continue
			}
			answer := binary.BigEndian.AppendUint64(nil, packets)
			answer = binary.BigEndian.AppendUint64(answer, bytes)
			packets, bytes = 0, 0
			from := netip.AddrPortFrom(netip.AddrFrom4(in.names[i].Addr), bits.ReverseBytes16(in.names[i].Port))
			_, _ = pc.WriteToUDPAddrPort(answer, from)
		}
	}
}

// messages is a batch of datagrams for one recvmmsg or sendmmsg call. With one call per datagram,
// the load generator would be the bottleneck, not the tunnel.
type messages struct {
	headers []mmsghdr
	names   []unix.RawSockaddrInet4
}

// mmsghdr is struct mmsghdr of sendmmsg(2).
type mmsghdr struct {
	unix.Msghdr
	n uint32
	_ [4]byte
}

func newMessages(n, size int) *messages {
	m := &messages{headers: make([]mmsghdr, n), names: make([]unix.RawSockaddrInet4, n)}
	for i := range m.headers {
		buf := make([]byte, size)
		v := &unix.Iovec{Base: &buf[0]}
		v.SetLen(size)
		m.headers[i].Iov = v
		m.headers[i].SetIovlen(1)
	}
	return m
}

// transfer receives or sends a batch. do is Read or Write of the RawConn. A receiver also gets
// the sender's address; a sender must be connected.
func (m *messages) transfer(do func(func(uintptr) bool) error, call uintptr) (n int, err error) {
	if call == unix.SYS_RECVMMSG {
		for i := range m.headers {
			m.headers[i].Name = (*byte)(unsafe.Pointer(&m.names[i]))
			m.headers[i].Namelen = unix.SizeofSockaddrInet4
		}
	}
	var errno unix.Errno
	err = do(func(fd uintptr) bool {
		var r uintptr
		r, _, errno = unix.Syscall6(call, fd, uintptr(unsafe.Pointer(&m.headers[0])), uintptr(len(m.headers)), 0, 0, 0)
		n = int(r)
		return errno != unix.EAGAIN
	})
	if err == nil && errno != 0 {
		return 0, errno
	}
	return n, err
}

func echo() error {
	pc, err := net.ListenUDP("udp4", &net.UDPAddr{Port: echoPort})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	buf := make([]byte, 2048)
	for {
		n, from, err := pc.ReadFromUDPAddrPort(buf)
		if err != nil {
			return err
		}
		_, _ = pc.WriteToUDPAddrPort(buf[:n], from)
	}
}

func sendTCP(addr string, streams int, d time.Duration) (Result, error) {
	var wg sync.WaitGroup
	var total atomic.Uint64
	errs := make([]error, streams)
	start := time.Now()
	for i := range streams {
		wg.Go(func() {
			c, err := net.DialTimeout("tcp4", net.JoinHostPort(addr, strconv.Itoa(tcpPort)), 5*time.Second)
			if err != nil {
				errs[i] = err
				return
			}
			defer func() { _ = c.Close() }()
			buf := make([]byte, 128<<10)
			_ = c.SetDeadline(start.Add(d))
			for time.Since(start) < d {
				if _, err := c.Write(buf); err != nil {
					break // the deadline has passed, which is the regular end
				}
			}
			_ = c.SetDeadline(time.Now().Add(10 * time.Second))
			if errs[i] = c.(*net.TCPConn).CloseWrite(); errs[i] != nil {
				return
			}
			var got uint64
			errs[i] = binary.Read(c, binary.BigEndian, &got)
			total.Add(got)
		})
	}
	wg.Wait()
	res := Result{Bytes: total.Load(), Seconds: time.Since(start).Seconds()}
	for _, err := range errs {
		if err != nil {
			return res, err
		}
	}
	return res, nil
}

func sendUDP(addr string, size int, d time.Duration, pps int) (Result, error) {
	c, err := net.Dial("udp4", net.JoinHostPort(addr, strconv.Itoa(udpPort)))
	if err != nil {
		return Result{}, err
	}
	defer func() { _ = c.Close() }()
	if _, _, err := readSink(c); err != nil { // also empties the counters
		return Result{}, err
	}
	out := newMessages(32, size)
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		return Result{}, err
	}
	one := make([]byte, size)
	var sent uint64
	start := time.Now()
	for time.Since(start) < d {
		if pps > 0 { // send single datagrams at even intervals
			if due := start.Add(time.Duration(sent) * time.Second / time.Duration(pps)); time.Until(due) > 0 {
				time.Sleep(time.Until(due))
			}
			if _, err := c.Write(one); err == nil {
				sent++
			}
			continue
		}
		if n, err := out.transfer(raw.Write, unix.SYS_SENDMMSG); err == nil {
			sent += uint64(n)
		}
	}
	res := Result{Sent: sent, Seconds: time.Since(start).Seconds()}
	time.Sleep(300 * time.Millisecond) // wait for queued datagrams to arrive
	res.Packets, res.Bytes, err = readSink(c)
	return res, err
}

func readSink(c net.Conn) (packets, bytes uint64, err error) {
	buf := make([]byte, 64)
	for err == nil { // skip late answers to earlier datagrams
		_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
		_, err = c.Read(buf)
	}
	for range 20 {
		if _, err = c.Write([]byte{0}); err != nil {
			continue
		}
		_ = c.SetReadDeadline(time.Now().Add(250 * time.Millisecond))
		var n int
		if n, err = c.Read(buf); err == nil && n == 16 {
			return binary.BigEndian.Uint64(buf), binary.BigEndian.Uint64(buf[8:]), nil
		}
	}
	return 0, 0, fmt.Errorf("sink does not answer: %w", err)
}

func roundTrips(addr string, d time.Duration) (Result, error) {
	c, err := net.Dial("udp4", net.JoinHostPort(addr, strconv.Itoa(echoPort)))
	if err != nil {
		return Result{}, err
	}
	defer func() { _ = c.Close() }()
	buf := make([]byte, 64)
	var times []time.Duration
	start := time.Now()
	for time.Since(start) < d {
		t := time.Now()
		if _, err := c.Write(buf); err != nil {
			return Result{}, err
		}
		_ = c.SetReadDeadline(t.Add(time.Second))
		if _, err := c.Read(buf); err != nil {
			continue // lost: excluded from the count and the percentiles
		}
		times = append(times, time.Since(t))
	}
	if len(times) < 100 {
		return Result{}, fmt.Errorf("rtt: only %d answers in %v", len(times), d)
	}
	slices.Sort(times)
	quantile := func(q float64) float64 {
		return float64(times[int(q*float64(len(times)-1))].Nanoseconds()) / 1000
	}
	return Result{Packets: uint64(len(times)), Seconds: time.Since(start).Seconds(), P50: quantile(0.5), P90: quantile(0.9), P99: quantile(0.99), P999: quantile(0.999)}, nil
}
