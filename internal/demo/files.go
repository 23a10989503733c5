package demo

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/internal/lab"
)

const (
	joinTimeout  = 30 * time.Second
	faultTimeout = time.Minute // until a gateway reports the fault; it detects a lost peer within ten seconds
	wrongKey     = "WrongKey"
)

// A pair is the part of the demo without API servers: two clusters of one node each, joined by
// files.
type pair struct {
	*narrator
	lab  *lab.Lab
	a, b *lab.Cluster
}

// runFiles runs the part of the demo without API servers, and removes its lab.
func runFiles(n *narrator) (err error) {
	p := &pair{narrator: n}
	defer func() {
		if p.lab == nil {
			return
		}
		if err != nil && n.ctx.Err() == nil {
			for _, c := range p.lab.Clusters {
				n.heading(fmt.Sprintf("Log of the gateway of cluster %s, its end", c))
				n.printf("%s", p.lab.GatewayTail(c, logLines))
			}
		}
		if down := p.lab.Down(); down != nil {
			err = errors.Join(err, fmt.Errorf("tidy up: %w", down))
		}
	}()
	return n.play([]step{
		{"Two clusters with the same PodCIDR, and plain routing", p.routing},
		{"Joined by two files, without an API server", p.join},
		{"Neither WireGuard nor NAT of the kernel is used", p.kernel},
		{"Trace a packet at both gateways", p.trace},
		{"A wrong key, set on purpose", p.fault},
	})
}

// routing shows that a pod cannot reach an address in the other cluster if its own cluster has the
// same address.
func (p *pair) routing() error {
	spec := lab.Spec{Name: p.Name, Clusters: lab.Clusters(2)}
	for i := range spec.Clusters {
		spec.Clusters[i].Nodes = 1
	}
	l, err := lab.Up(p.ctx, spec)
	if err != nil {
		return err
	}
	p.lab, p.a, p.b = l, l.Clusters[0], l.Clusters[1]
	if err := l.ServeHosts(); err != nil {
		return err
	}
	from, to := p.a.Pods[0], p.b.Pods[1]
	got, err := from.Get(p.ctx, fmt.Sprintf("http://%v/", to.Addr))
	if err != nil {
		return err
	}
	got = strings.TrimSpace(got)
	if !strings.HasPrefix(got, p.a.Pods[1].String()) {
		return fmt.Errorf("http://%v from %s: %q; want an answer of cluster a's own %s", to.Addr, from, got, p.a.Pods[1])
	}
	p.printf("  %s is at %v. A pod of cluster a that requests http://%[2]v gets: %q.", to, to.Addr, got)
	p.printf("  Cluster a has a pod with the same address, so no route can reach the one in b.")
	return nil
}

// join starts gateways that read the clusters' files, and makes pods talk.
func (p *pair) join() error {
	if err := p.lab.JoinAll(); err != nil {
		return err
	}
	if err := p.lab.StartGateways(p.ctx, p.Binary); err != nil {
		return err
	}
	p.printf("  $ isthmus gateway --config DIR      # for each: gateway.yaml, private.key, and a file that describes the other cluster")
	from, to := p.a.Pods[0], p.b.Pods[1]
	seen, err := p.lab.Seen(p.a, p.b, to.Addr)
	if err != nil {
		return err
	}
	if err := p.waitForAnswer(from, seen); err != nil {
		return err
	}
	for _, direction := range []struct {
		local, peer *lab.Cluster
		from, to    *lab.Pod
	}{{p.a, p.b, from, to}, {p.b, p.a, to, from}} {
		seen, err := p.lab.Seen(direction.local, direction.peer, direction.to.Addr)
		if err != nil {
			return err
		}
		caller, err := p.lab.Seen(direction.peer, direction.local, direction.from.Addr)
		if err != nil {
			return err
		}
		if err := p.talk(direction.from.Host, direction.to.Host, seen, caller); err != nil {
			return err
		}
	}
	return nil
}

// waitForAnswer waits until addr replies to a ping.
func (p *pair) waitForAnswer(from *lab.Pod, addr netip.Addr) error {
	ctx, cancel := context.WithTimeout(p.ctx, joinTimeout)
	defer cancel()
	pings := p.count(ctx, from, addr)
	defer pings.stop()
	return pings.waitUntil(ctx, func() bool { return pings.answered > 0 })
}

// kernel shows that the gateways do not use the kernel's WireGuard and NAT. They have carried
// packets, but their network namespaces contain no WireGuard device and no nftables chain for NAT.
func (p *pair) kernel() error {
	module := "is not loaded"
	if _, err := os.Stat("/sys/module/wireguard"); err == nil {
		module = "is loaded, and not used"
	}
	p.printf("  The kernel's module wireguard %s.", module)
	for _, c := range p.lab.Clusters {
		use, err := p.lab.GatewayKernel(c)
		if err != nil {
			return err
		}
		if use.WireGuard+use.NATChains > 0 {
			return fmt.Errorf("gateway of cluster %s: %d WireGuard devices and %d chains that translate addresses; want none", c, use.WireGuard, use.NATChains)
		}
		p.ok("gateway of %s, in %d network namespaces: WireGuard devices 0, nftables chains that translate addresses 0", c, use.Namespaces)
	}
	return nil
}

// trace shows the path of one packet through both gateways. It runs `isthmus trace` on each.
func (p *pair) trace() error {
	src, dst := p.a.Pods[0].Addr, p.b.Pods[1].Addr
	seenDst, err := p.lab.Seen(p.a, p.b, dst)
	if err != nil {
		return err
	}
	seenSrc, err := p.lab.Seen(p.b, p.a, src)
	if err != nil {
		return err
	}
	if _, err := p.run(p.a, "trace", "--direction", "out", src.String()+":40000", seenDst.String()+":80", "tcp"); err != nil {
		return err
	}
	_, err = p.run(p.b, "trace", "--direction", "in", seenSrc.String()+":40000", seenDst.String()+":80", "tcp")
	return err
}

var publicKey = regexp.MustCompile(`(publicKey: ).*`)

// fault writes a wrong key of cluster b into the files of cluster a, as a careless user might. It
// waits until a gateway reports the error, and restores the right key.
func (p *pair) fault() error {
	path := lab.PeerFile(p.a, p.b)
	good, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	key := make([]byte, 32)
	rand.Read(key)
	key[31] &= 127 // a public key is below 2^255
	bad := publicKey.ReplaceAll(good, fmt.Appendf(nil, "${1}%s", base64.StdEncoding.EncodeToString(key)))
	if err := rewrite(path, bad); err != nil {
		return err
	}
	p.printf("  %s gets a wrong publicKey of b.", filepath.Base(path))
	begin := time.Now()
	ctx, cancel := context.WithTimeout(p.ctx, faultTimeout)
	defer cancel()
	for {
		output, err := p.b.Gateway().Command(ctx, p.Binary, "status", "--gateway").CombinedOutput()
		if strings.Contains(string(output), wrongKey) {
			break
		}
		if ctx.Err() != nil {
			return fmt.Errorf("after %v, the gateway of b does not report %s: %w\n%s", faultTimeout, wrongKey, err, output)
		}
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
	output, err := p.run(p.b, "status", "--gateway")
	if err == nil {
		return fmt.Errorf("isthmus status --gateway has the exit code 0 while a peer is not connected:\n%s", output)
	}
	p.ok("after %.0f s, isthmus status at b's gateway reports that a has a wrong key of b, and its exit code is not 0", time.Since(begin).Seconds())
	if err := rewrite(path, good); err != nil {
		return err
	}
	begin = time.Now()
	seen, err := p.lab.Seen(p.a, p.b, p.b.Pods[1].Addr)
	if err != nil {
		return err
	}
	if err := p.waitForAnswer(p.a.Pods[0], seen); err != nil {
		return err
	}
	p.ok("with the right key in the file, the first ping is answered after %.1f s; nothing was restarted", time.Since(begin).Seconds())
	return nil
}

// run runs the isthmus program on the host of a cluster's gateway and shows its output.
func (p *pair) run(c *lab.Cluster, args ...string) (string, error) {
	p.printf("  %s$ isthmus %s", c.Gateway(), strings.Join(args, " "))
	output, err := c.Gateway().Command(p.ctx, p.Binary, args...).CombinedOutput()
	fmt.Fprint(indent(p.Out), string(output))
	return string(output), err
}

// rewrite replaces a file atomically, because a gateway may read it at any time.
func rewrite(path string, text []byte) error {
	next := filepath.Join(filepath.Dir(path), "."+filepath.Base(path))
	if err := os.WriteFile(next, text, 0o644); err != nil {
		return err
	}
	return os.Rename(next, path)
}
