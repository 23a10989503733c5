package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
)

// nebula is Debian's package. Each node announces the PodCIDR of its cluster as an unsafe route,
// without translation. Its firewall accepts everything.
func nebula(ctx context.Context, b *bench) (*running, error) {
	r := &running{target: b.nodes[1].pod.Addr}
	dir, err := os.MkdirTemp("", "isthmus-bench-")
	if err != nil {
		return r, err
	}
	r.cleanup = append(r.cleanup, func() error { return os.RemoveAll(dir) })
	in := func(name string) string { return filepath.Join(dir, name) }
	addrs := [2]netip.Addr{netip.MustParseAddr("192.168.71.1"), netip.MustParseAddr("192.168.71.2")}
	host := b.nodes[0].host
	if err := b.run(ctx, host, "", "nebula-cert", "ca", "-name", "bench", "-out-crt", in("ca.crt"), "-out-key", in("ca.key")); err != nil {
		return r, err
	}
	for i, own := range b.nodes {
		other := b.nodes[1-i]
		name := fmt.Sprintf("node%d", i)
		if err := b.run(ctx, host, "", "nebula-cert", "sign", "-name", name, "-ip", netip.PrefixFrom(addrs[i], 24).String(), "-subnets", own.cidr.String(),
			"-ca-crt", in("ca.crt"), "-ca-key", in("ca.key"), "-out-crt", in(name+".crt"), "-out-key", in(name+".key")); err != nil {
			return r, err
		}
		config := fmt.Sprintf(nebulaConfig, in("ca.crt"), in(name+".crt"), in(name+".key"),
			addrs[1-i], netip.AddrPortFrom(other.underlay, wgPort), wgPort, b.tunnelMTU(), b.tunnelMTU(), other.cidr, addrs[1-i])
		if err := os.WriteFile(in(name+".yml"), []byte(config), 0o600); err != nil {
			return r, err
		}
		cmd := own.host.Command(ctx, "nebula", "-config", in(name+".yml"))
		if err := cmd.Start(); err != nil {
			return r, err
		}
		r.gateways = append(r.gateways, cmd.Process)
	}
	return r, nil
}

// nebulaConfig lists each node as the only host of the other, without a lighthouse.
const nebulaConfig = `
pki: {ca: %s, cert: %s, key: %s}
static_host_map: {"%s": ["%s"]}
lighthouse: {am_lighthouse: false, interval: 60, hosts: []}
listen: {host: 0.0.0.0, port: %d, read_buffer: 7340032, write_buffer: 7340032}
punchy: {punch: true}
tun: {dev: nebula0, drop_local_broadcast: false, drop_multicast: false, tx_queue: 500, mtu: %d, unsafe_routes: [{mtu: %d, route: %s, via: %s}]}
logging: {level: error, format: text}
firewall:
  conntrack: {tcp_timeout: 12m, udp_timeout: 3m, default_timeout: 10m}
  outbound: [{port: any, proto: any, host: any}]
  inbound: [{port: any, proto: any, host: any}]
`
