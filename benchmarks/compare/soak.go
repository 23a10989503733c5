package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"os/exec"
	"strconv"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/benchmarks/internal/load"
)

// A soak sends traffic through one peer for a long time, in both directions, and verifies it. The
// traffic consists of TCP streams from a seeded generator, each soakStream long, and of soakPace
// numbered UDP datagrams per second. The receiver compares every octet with the expected one.

const (
	soakTCPPort  = 5204
	soakUDPPort  = 5205
	soakStream   = 200 << 20 // octets of one connection in each direction
	soakStreams  = 2         // concurrent streams
	soakRate     = 20 << 20  // octets per second of each stream and direction; so low that no queue drops packets
	soakPace     = 1000      // datagrams a second
	soakLate     = 100 * time.Millisecond
	soakDatagram = 1000 // octets
)

// pattern generates the octets of a stream.
type pattern struct {
	src *rand.ChaCha8
	buf []byte
}

func newPattern(seed uint64) *pattern {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	return &pattern{src: rand.NewChaCha8(key), buf: make([]byte, 64<<10)}
}

// next returns the next n octets, at most len(buf). They are valid until the next call.
func (p *pattern) next(n int) []byte {
	_, _ = p.src.Read(p.buf[:n]) // never fails
	return p.buf[:n]
}

// soakResult holds the observations of one side.
type soakResult struct {
	Bytes      uint64 `json:"bytes"`      // TCP payload received and compared
	Streams    int    `json:"streams"`    // completed streams
	Sent       uint64 `json:"sent"`       // datagrams sent
	Received   uint64 `json:"received"`   // datagrams that came back
	Reordered  uint64 `json:"reordered"`  // arrived after a later datagram
	Duplicates uint64 `json:"duplicates"` // arrived twice

	Losses []loss `json:"losses,omitempty"` // the first ones, at most maxLosses
}

// loss is a series of consecutive datagrams that did not come back.
type loss struct {
	At      float64 `json:"at"` // seconds since the start
	Packets uint64  `json:"packets"`
}

// maxLosses is the largest number of losses that a result lists.
const maxLosses = 20

// losses returns the series of consecutive numbers below sent that are missing in seen.
func losses(seen map[uint64]bool, sent uint64) (all []loss) {
	for n := uint64(0); n < sent && len(all) < maxLosses; n++ {
		from := n
		for n < sent && !seen[n] {
			n++
		}
		if n > from {
			all = append(all, loss{float64(from) / soakPace, n - from})
		}
	}
	return all
}

// soakServer compares each received stream with the client's generator and sends its own
// generator's stream. It echoes datagrams.
func soakServer() error {
	l, err := net.Listen("tcp4", fmt.Sprintf(":%d", soakTCPPort))
	if err != nil {
		return err
	}
	pc, err := net.ListenUDP("udp4", &net.UDPAddr{Port: soakUDPPort})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := pc.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = pc.WriteToUDPAddrPort(buf[:n], from)
		}
	}()
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			var seed [8]byte
			if _, err := io.ReadFull(c, seed[:]); err != nil {
				return
			}
			if err := exchange(c, binary.LittleEndian.Uint64(seed[:]), 1); err != nil {
				log.Printf("soak: %v", err)
			}
		}()
	}
}

// exchange sends one stream and receives another at the same time. side is 0 on the connecting
// side and 1 on the accepting side.
func exchange(c net.Conn, seed uint64, side int) error {
	sent := make(chan error, 1)
	go func() {
		p := newPattern(2*seed + uint64(side))
		start := time.Now()
		for left := soakStream; left > 0; {
			due := start.Add(time.Duration(soakStream-left) * time.Second / soakRate)
			time.Sleep(time.Until(due))
			n, err := c.Write(p.next(min(left, len(p.buf))))
			if left -= n; err != nil {
				sent <- fmt.Errorf("sending, %d octets before the end: %w", left, err)
				return
			}
		}
		sent <- nil
	}()
	p, buf := newPattern(2*seed+uint64(1-side)), make([]byte, 64<<10)
	for pos := 0; pos < soakStream; {
		n, err := io.ReadFull(c, buf[:min(len(buf), soakStream-pos)])
		if err != nil {
			return fmt.Errorf("receiving, at octet %d: %w", pos+n, err)
		}
		if !bytes.Equal(buf[:n], p.next(n)) {
			return fmt.Errorf("receiving: octets %d to %d are not those that were sent", pos, pos+n)
		}
		pos += n
	}
	return <-sent
}

// soakClient runs for d. It returns an error at the first octet that differs.
func soakClient(addr string, d time.Duration) (res soakResult, err error) {
	end := time.Now().Add(d)
	var mu sync.Mutex
	var wg sync.WaitGroup
	errs := make([]error, soakStreams+1)
	for i := range soakStreams {
		wg.Go(func() {
			for n := uint64(0); time.Now().Before(end) && errs[i] == nil; n++ {
				errs[i] = soakOne(addr, n*soakStreams+uint64(i))
				mu.Lock()
				res.Bytes += 2 * soakStream
				res.Streams++
				mu.Unlock()
			}
		})
	}
	wg.Go(func() {
		u, err := soakDatagrams(addr, end)
		mu.Lock()
		defer mu.Unlock()
		errs[soakStreams] = err
		res.Sent, res.Received, res.Reordered, res.Duplicates, res.Losses = u.Sent, u.Received, u.Reordered, u.Duplicates, u.Losses
	})
	wg.Wait()
	return res, errors.Join(errs...)
}

func soakOne(addr string, seed uint64) error {
	c, err := net.DialTimeout("tcp4", net.JoinHostPort(addr, strconv.Itoa(soakTCPPort)), 10*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Write(binary.LittleEndian.AppendUint64(nil, seed)); err != nil {
		return err
	}
	if err := exchange(c, seed, 0); err != nil {
		return fmt.Errorf("stream %d: %w", seed, err)
	}
	return nil
}

func soakDatagrams(addr string, end time.Time) (res soakResult, err error) {
	c, err := net.Dial("udp4", net.JoinHostPort(addr, strconv.Itoa(soakUDPPort)))
	if err != nil {
		return res, err
	}
	defer c.Close()
	_ = c.(*net.UDPConn).SetReadBuffer(4 << 20)
	datagram := func(n uint64) []byte {
		b := bytes.Repeat(binary.LittleEndian.AppendUint64(nil, n*0x9e3779b97f4a7c15), soakDatagram/8)
		binary.LittleEndian.PutUint64(b, n)
		return b
	}
	done := make(chan error, 1)
	seen := map[uint64]bool{}
	go func() {
		buf, newest := make([]byte, 2048), uint64(0)
		for {
			_ = c.SetReadDeadline(end.Add(2 * time.Second))
			n, err := c.Read(buf)
			if err != nil {
				done <- nil
				return
			}
			number := binary.LittleEndian.Uint64(buf)
			switch {
			case n != soakDatagram || !bytes.Equal(buf[:n], datagram(number)):
				done <- fmt.Errorf("datagram %d arrived altered", number)
				return
			case seen[number]:
				res.Duplicates++
				continue
			case number < newest:
				res.Reordered++
			}
			seen[number], newest = true, max(newest, number)
			res.Received++
		}
	}()
	start := time.Now()
	for sent := uint64(0); time.Now().Before(end); {
		due := start.Add(time.Duration(sent) * time.Second / soakPace)
		time.Sleep(time.Until(due))
		if late := time.Since(due); late > soakLate { // the machine stalled; skip the backlog, because it would overflow a queue
			start = start.Add(late)
		}
		if _, err := c.Write(datagram(sent)); err == nil {
			sent++
			res.Sent = sent
		}
	}
	err = <-done
	res.Losses = losses(seen, res.Sent)
	return res, err
}

// soak runs a soak through every selected peer and prints the results.
func (b *bench) soak(ctx context.Context, selection string, d time.Duration) error {
	server, err := load.Start(ctx, b.nodes[1].pod.Host, nil, b.self, "load", "soak-server")
	if err != nil {
		return err
	}
	defer func() {
		_ = server.Kill()
		_, _ = server.Wait()
	}()
	for _, p := range peers {
		if !selected(p.name, selection) || b.missing(p.needs) != "" {
			continue
		}
		r, err := p.start(ctx, b)
		if err == nil {
			err = b.waitReady(ctx, r)
		}
		if err == nil {
			err = b.runSoak(ctx, p.name, r, d)
		}
		if err := errors.Join(err, b.stop(r)); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

func (b *bench) runSoak(ctx context.Context, name string, r *running, d time.Duration) error {
	out, err := b.nodes[0].pod.Command(ctx, b.self, "load", "soak", r.target.String(), strconv.Itoa(int(d.Seconds()))).Output()
	if err != nil {
		return fmt.Errorf("%w: %s", err, stderrOf(err))
	}
	var res soakResult
	if err := json.Unmarshal(out, &res); err != nil {
		return err
	}
	fmt.Printf("%s, %v: %d TCP streams, %.1f GB compared and equal; %d datagrams sent and returned, %d lost, %d reordered, %d twice; peak memory %.0f MiB\n",
		name, d, res.Streams, float64(res.Bytes)/1e9, res.Sent, res.Sent-res.Received, res.Reordered, res.Duplicates, peakMiB(r.gateways[0].Pid))
	for _, l := range res.Losses {
		fmt.Printf("  lost after %.1f s: %d in a row\n", l.At, l.Packets)
	}
	return nil
}

// stderrOf returns the standard error output of a program that failed.
func stderrOf(err error) string {
	if e := (*exec.ExitError)(nil); errors.As(err, &e) {
		return string(e.Stderr)
	}
	return ""
}
