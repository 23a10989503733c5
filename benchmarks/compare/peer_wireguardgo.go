package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"golang.org/x/crypto/curve25519"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/isthmus-net/isthmus/benchmarks/internal/load"
)

// wgOptions select the variant of wireguard-go.
type wgOptions struct {
	netmap bool     // the node's kernel translates the prefixes by nftables and conntrack, as with Liqo; otherwise no NAT
	fork   bool     // use Tailscale's fork, of ../tailscale
	env    []string // added to the process's environment
}

// wireguardGo is the unmodified wireguard-go of our go.mod, or Tailscale's fork, with its own TUN
// and sockets. It runs as a process in each node's host namespace.
func wireguardGo(o wgOptions) starter {
	return func(ctx context.Context, b *bench) (*running, error) {
		program := []string{b.self, "wireguard-go"}
		if o.fork {
			program = []string{b.tailscale}
		}
		keys := [2][32]byte{newKey(), newKey()}
		var r running
		for i := range b.nodes {
			own, other := b.nodes[i], b.nodes[1-i]
			remote, ownSeen := other.cidr, own.cidr
			if o.netmap {
				remote, ownSeen = other.seen, own.seen
			}
			pub, err := curve25519.X25519(keys[1-i][:], curve25519.Basepoint)
			if err != nil {
				return &r, err
			}
			uapi := fmt.Sprintf("private_key=%s\nlisten_port=%d\npublic_key=%s\nendpoint=%s\nallowed_ip=%s\npersistent_keepalive_interval=1\n",
				hex.EncodeToString(keys[i][:]), wgPort, hex.EncodeToString(pub), netip.AddrPortFrom(other.underlay, wgPort), remote)
			gw, err := load.Start(ctx, own.host, o.env, append(program, uapi, fmt.Sprint(b.tunnelMTU()))...)
			if err != nil {
				return &r, err
			}
			r.gateways = append(r.gateways, gw)
			if err := own.route(remote, "wg0"); err != nil {
				return &r, err
			}
			if o.netmap {
				rules := prefixNAT("wg0", own.cidr, ownSeen, remote)
				if err := b.run(ctx, own.host, rules, "nft", "-f", "-"); err != nil {
					return &r, err
				}
				r.cleanup = append(r.cleanup, func() error {
					return b.run(context.WithoutCancel(ctx), own.host, "", "nft", "delete", "table", "ip", "bench")
				})
			}
		}
		r.target = b.nodes[1].pod.Addr
		if o.netmap {
			r.target = b.nodes[1].seenPod()
		}
		return &r, nil
	}
}

// prefixNAT returns kernel NETMAP as nftables rules (docs/liqo-v0.md, section 7.3). Sources in
// podCIDR become addresses in podCIDRAtPeer, the prefix under which the peer sees us. For replies,
// the rules undo this.
func prefixNAT(dev string, podCIDR, podCIDRAtPeer, remote netip.Prefix) string {
	return strings.NewReplacer("DEV", dev, "OWN", podCIDR.String(), "SEEN", podCIDRAtPeer.String(), "REMOTE", remote.String()).Replace(`
table ip bench {
	chain post {
		type nat hook postrouting priority srcnat;
		oifname "DEV" ip saddr OWN ip daddr REMOTE snat ip prefix to ip saddr map { OWN : SEEN }
	}
	chain pre {
		type nat hook prerouting priority dstnat;
		iifname "DEV" ip saddr REMOTE ip daddr SEEN dnat ip prefix to ip daddr map { SEEN : OWN }
	}
}
`)
}

func newKey() (k [32]byte) {
	_, _ = rand.Read(k[:]) // never fails, see crypto/rand
	return k
}

// runWireGuardGo runs the gateway process, which is only a WireGuard device.
func runWireGuardGo(uapi string, mtu int) error {
	t, err := tun.CreateTUN("wg0", mtu)
	if err != nil {
		return err
	}
	d := device.NewDevice(t, conn.NewDefaultBind(), device.NewLogger(device.LogLevelError, ""))
	defer d.Close()
	if err := d.IpcSet(uapi); err != nil {
		return err
	}
	if err := d.Up(); err != nil {
		return err
	}
	fmt.Println("ready")
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, os.Interrupt)
	select {
	case <-stop:
	case <-d.Wait():
	}
	return nil
}
