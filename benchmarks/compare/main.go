// Command compare measures Isthmus and other software that joins two pod networks. All measurements
// run on this machine, between the same two pods and interleaved in one run.
//
//	go run ./benchmarks/compare -rounds 5 -out benchmarks
//
// It builds one lab of two clusters with a node and a pod each. In each round it runs one program
// after the other (in the code: peers, peer_*.go) and applies the same load to each. Figures are
// medians with minimum and maximum. The machine's speed drifts, so quote ratios instead of figures.
// The report divides each figure by that of wireguard-go with kernel NETMAP in the same run.
//
// It needs root and, for the NETMAP peer, nft.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/benchmarks/internal/load"
)

const wgPort = 5871

// A starter connects the two nodes of the bench with one peer's software. Even after an error, it
// returns all that it has started, for the cleanup.
type starter func(context.Context, *bench) (*running, error)

type running struct {
	target   netip.Addr    // address at which pod A reaches pod B
	back     netip.Addr    // address at which pod B reaches pod A
	gateways []*os.Process // processes whose CPU time and memory are measured
	cleanup  []func() error
}

// A peer is one of the compared programs or configurations.
type peer struct {
	name  string
	needs string // a required program; the peer is skipped without it
	start starter
}

// peers are the rows of the table.
var peers = []peer{
	{"veth", "", veth},
	{"vxlan", "", vxlan},
	{"nebula", "nebula", nebula},
	{"wireguard-go", "", wireguardGo(wgOptions{})},
	{"wireguard-go + NETMAP", "nft", wireguardGo(wgOptions{netmap: true})},
	{"the same, GOMAXPROCS=1", "nft", wireguardGo(wgOptions{netmap: true, env: []string{"GOMAXPROCS=1"}})},
	{"tailscale fork", tailscale, wireguardGo(wgOptions{fork: true})},
	{"tailscale fork + NETMAP", tailscale, wireguardGo(wgOptions{netmap: true, fork: true})},
	{"isthmus without USO", "", isthmus(crowd{}, "--udp-offload=off")},
	{"isthmus 4 tunnels", "", isthmusTunnels(4, "--udp-offload=off")},
	{"isthmus crowded", "", isthmus(crowd{peers: 999, flows: 1_000_000}, "--udp-offload=off")},
	{"isthmus", "", isthmus(crowd{})}, // default settings: with UDP offload on kernels where it is known to work
}

// tailscale stands for the program of ../tailscale in peer.needs; an option has the program's path.
const tailscale = "tailscale"

const baseline = "wireguard-go + NETMAP"

// checked is the default selection of peers for -check and -record.
const checked = reference + ",isthmus without USO,isthmus"

// inPod runs a load process: one of package load, or one of this program's own.
func inPod(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "soak-server":
		return soakServer()
	case len(args) == 3 && args[0] == "soak": // ADDR SECONDS: traffic in which every octet is compared
		seconds, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		res, err := soakClient(args[1], time.Duration(seconds)*time.Second)
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(res)
	case len(args) == 3 && args[0] == "flows": // NETWORK N: one datagram for each of N flows to addresses of a network
		network, err := netip.ParsePrefix(args[1])
		if err != nil {
			return err
		}
		n, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		return openFlows(network, n)
	}
	return load.Main(args)
}

func main() {
	log.SetFlags(0)
	if len(os.Args) > 1 && os.Args[1] == "load" {
		if err := inPod(os.Args[2:]); err != nil {
			log.Fatal(err)
		}
		return
	}
	if len(os.Args) == 4 && os.Args[1] == "wireguard-go" {
		mtu, _ := strconv.Atoi(os.Args[3])
		if err := runWireGuardGo(os.Args[2], mtu); err != nil {
			log.Fatal(err)
		}
		return
	}
	maxRounds := flag.Int("rounds", 5, "rounds; each measures every peer once")
	d := flag.Duration("duration", 2*time.Second, "duration of one load")
	mtu := flag.Int("mtu", 1500, "MTU of the underlay")
	binary := flag.String("isthmus", "bin/isthmus", "path of isthmus")
	fork := flag.String("tailscale", "", "path of the program of benchmarks/tailscale; empty: leave out the peers that need it")
	selection := flag.String("peers", "", "only these peers, separated by commas; a word that is not the name of a peer selects all peers whose names contain the word")
	flag.Func("also", "another build of isthmus to measure in the same rounds: NAME=PATH[,ARGUMENT...]; may be repeated", func(text string) error {
		p, err := otherBuild(text)
		peers = append(peers, p)
		return err
	})
	out := flag.String("out", "", "write compare.md, compare.svg and compare.json into this folder")
	recordIn := flag.String("record", "", "add the samples to this file, for -check; record runs at different hours")
	recorded := flag.String("check", "", "compare the ratios of Isthmus with those in this file, and fail if one is worse; -rounds is the maximum number of rounds")
	soak := flag.Duration("soak", 0, "do not measure, but send traffic through each peer for this time and compare every octet")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *soak > 0 {
		if err := runSoaks(ctx, *mtu, *binary, *fork, *selection, *soak); err != nil {
			log.Fatal(err)
		}
		return
	}
	if (*recorded != "" || *recordIn != "") && *selection == "" {
		*selection = checked
	}
	if *out != "" { // fail before the measurements, not after them
		if err := os.MkdirAll(*out, 0o755); err != nil {
			log.Fatal(err)
		}
	}
	var was recording
	enough := func([]sample) bool { return false }
	if *recorded != "" {
		var err error
		if was, err = readRecording(*recorded); err != nil {
			log.Fatal(err)
		}
		enough = func(all []sample) bool { return rounds(all) >= minRounds && inLimits(compare(all, was)) }
	}
	all, err := run(ctx, *maxRounds, *d, *mtu, *binary, *fork, *selection, enough)
	where := describe(*mtu, rounds(all), *d)
	if err == nil {
		err = report(all, where, *mtu, *out)
	}
	if err == nil && *recordIn != "" {
		err = record(*recordIn, measured{where, all})
	}
	if err == nil && *recorded != "" {
		err = checkFindings(os.Stdout, compare(all, was))
	}
	if err != nil {
		log.Fatal(err)
	}
}

// run measures the peers of the selection, round by round. It stops when the function enough
// returns true, or after maxRounds.
func run(ctx context.Context, maxRounds int, d time.Duration, mtu int, binary, fork, selection string, enough func([]sample) bool) (all []sample, err error) {
	b, err := newBench(ctx, mtu, binary, fork)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.lab.Down()) }()

	stopLoad, err := b.startListeners(ctx)
	if err != nil {
		return nil, err
	}
	defer stopLoad()

	for round := range maxRounds {
		if enough(all) {
			break
		}
		for _, p := range peers {
			if !selected(p.name, selection) {
				continue
			}
			if missing := b.missing(p.needs); missing != "" {
				if round == 0 {
					log.Printf("without %s: %s", p.name, missing)
				}
				continue
			}
			s, err := b.measure(ctx, p.start, d)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.name, err)
			}
			s.Peer, s.Round = p.name, round
			all = append(all, s)
			log.Printf("round %d/%d  %-24s %s", round+1, maxRounds, p.name, s)
		}
	}
	return all, nil
}

func runSoaks(ctx context.Context, mtu int, binary, fork, selection string, d time.Duration) (err error) {
	b, err := newBench(ctx, mtu, binary, fork)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.lab.Down()) }()
	return b.soak(ctx, selection, d)
}

// selected reports whether the selection includes a peer. A selection is a list of words, separated
// by commas. A word that is a peer's full name selects that peer; any other word selects the peers
// whose names contain the word. An empty selection includes all peers.
func selected(name, selection string) bool {
	return selection == "" || slices.ContainsFunc(strings.Split(selection, ","), func(w string) bool {
		exact := slices.ContainsFunc(peers, func(p peer) bool { return p.name == w })
		return name == w || !exact && strings.Contains(name, w)
	})
}

// A sample holds the figures of one peer in one round.
type sample struct {
	Peer   string
	Round  int
	TCP1   float64 // Gbit/s
	TCP4   float64
	TCP2   float64 // one stream in each direction; sum
	CPU    float64 // CPU seconds of both gateways per Gbit, over all TCP loads
	Rate   float64 // highest rate at which 99.5 % of the datagrams of 64 octets arrive, thousands a second
	Flood  float64 // received 64 octet datagrams, thousands a second
	FloodC float64 // CPU microseconds of both gateways per received datagram
	Paced  float64 // CPU microseconds per datagram, at 20 000 datagrams a second
	P50    float64 // round trip, microseconds
	P90    float64
	P99    float64
	P999   float64
	RSS    float64 // largest peak memory of one gateway, MiB
}

func (s sample) String() string {
	return fmt.Sprintf("TCP %.2f / %.2f / %.2f Gbit/s, %.3f CPU s/Gbit, UDP %.0f / %.0f kpps, %.1f us/pkt paced, RTT %.0f / %.0f us, %.0f MiB",
		s.TCP1, s.TCP4, s.TCP2, s.CPU, s.Rate, s.Flood, s.Paced, s.P50, s.P99, s.RSS)
}

func (b *bench) measure(ctx context.Context, up starter, d time.Duration) (s sample, err error) {
	r, err := up(ctx, b)
	if r != nil && !r.back.IsValid() {
		r.back = b.nodes[0].pod.Addr
		if r.target != b.nodes[1].pod.Addr {
			r.back = b.nodes[0].seenPod()
		}
	}
	defer func() { err = errors.Join(err, b.stop(r)) }()
	if err != nil {
		return s, err
	}
	if err := b.waitReady(ctx, r); err != nil {
		return s, err
	}
	ms := strconv.Itoa(int(d.Milliseconds()))
	to := r.target.String()
	if _, _, err := b.measureLoad(ctx, r, "tcp", to, "1", "300"); err != nil { // warm-up
		return s, err
	}
	var bits, cpu float64
	for _, l := range []struct {
		into *float64
		run  func() (load.Result, float64, error)
	}{
		{&s.TCP1, func() (load.Result, float64, error) { return b.measureLoad(ctx, r, "tcp", to, "1", ms) }},
		{&s.TCP4, func() (load.Result, float64, error) { return b.measureLoad(ctx, r, "tcp", to, "4", ms) }},
		{&s.TCP2, func() (load.Result, float64, error) { return b.bothDirections(ctx, r, ms) }},
	} {
		res, used, err := l.run()
		if err != nil {
			return s, err
		}
		*l.into = float64(res.Bytes) * 8 / res.Seconds / 1e9
		bits += float64(res.Bytes) * 8 / 1e9
		cpu += used
	}
	s.CPU = cpu / bits
	res, _, err := b.measureLoad(ctx, r, "rtt", to, ms)
	if err != nil {
		return s, err
	}
	s.P50, s.P90, s.P99, s.P999 = res.P50, res.P90, res.P99, res.P999
	if res, cpu, err = b.measureLoad(ctx, r, "udp", to, "64", ms, "20000"); err != nil {
		return s, err
	}
	s.Paced = cpu / float64(max(1, res.Packets)) * 1e6
	if res, _, err = b.measureLoad(ctx, r, "rate", to, "64", "300"); err != nil {
		return s, err
	}
	s.Rate = res.Rate / 1e3
	if res, cpu, err = b.measureLoad(ctx, r, "udp", to, "64", ms, "0"); err != nil {
		return s, err
	}
	s.Flood = float64(res.Packets) / res.Seconds / 1e3
	s.FloodC = cpu / float64(max(1, res.Packets)) * 1e6
	for _, g := range r.gateways {
		s.RSS = max(s.RSS, peakMiB(g.Pid))
	}
	return s, nil
}

// cpuSeconds returns the user and system time of the processes, from /proc/PID/stat.
func cpuSeconds(procs []*os.Process) float64 {
	var ticks float64
	for _, p := range procs {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid))
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		f := strings.Fields(rest)
		for _, i := range []int{11, 12} {
			n, _ := strconv.ParseFloat(f[i], 64)
			ticks += n
		}
	}
	return ticks / 100 // USER_HZ is 100 on every Linux architecture that Go supports
}

func peakMiB(pid int) float64 {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	defer func() { _ = f.Close() }()
	all, _ := io.ReadAll(f)
	_, rest, _ := strings.Cut(string(all), "VmHWM:")
	var kib float64
	_, _ = fmt.Sscan(rest, &kib)
	return kib / 1024
}
