package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/coredns/caddy"
	"github.com/coredns/caddy/caddyfile"
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/plugin"
	"github.com/coredns/coredns/plugin/kubernetes"
	"github.com/coredns/coredns/plugin/test"
	"github.com/miekg/dns"
)

// CoreDNS must accept the Corefile that internal/corefile writes.
func TestCoreDNSServesTheAddedZone(t *testing.T) {
	files, err := filepath.Glob("../../internal/corefile/testdata/*.want")
	if err != nil || len(files) < 5 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			f, err := os.Open(file)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			t.Setenv("DOMAIN", "example.net")
			blocks, err := caddyfile.Parse(file, f, nil)
			if err != nil {
				t.Fatal(err)
			}
			served := 0
			for _, b := range blocks {
				tokens := b.Tokens["kubernetes"]
				if tokens == nil {
					continue
				}
				c := caddy.Controller{Dispenser: caddyfile.NewDispenserTokens(file, tokens), ServerBlockKeys: b.Keys}
				c.Next()
				k, err := kubernetes.ParseStanza(&c)
				if err != nil {
					t.Fatal(err)
				}
				if tokens := b.Tokens["cache"]; tokens != nil {
					checkCache(t, file, b.Keys, tokens)
				}
				options := slices.ContainsFunc(tokens, func(t caddyfile.Token) bool { return t.Text == "multicluster" })
				if options && slices.Contains(k.Zones, "clusterset.local.") {
					served++
				}
			}
			if served != 1 {
				t.Errorf("served by %d servers", served)
			}
		})
	}
}

// checkCache checks the cache for names that do not exist: it must not store those of our zone, but
// must store those of other zones.
func checkCache(t *testing.T, file string, keys []string, tokens []caddyfile.Token) {
	t.Helper()
	c := caddy.NewTestController("dns", "")
	c.Dispenser, c.ServerBlockKeys = caddyfile.NewDispenserTokens(file, tokens), keys
	setup, err := caddy.DirectiveAction("dns", "cache")
	if err != nil {
		t.Fatal(err)
	}
	if err := setup(c); err != nil {
		t.Fatal(err)
	}
	asked := make(map[string]int)
	nobody := plugin.HandlerFunc(func(_ context.Context, w dns.ResponseWriter, r *dns.Msg) (int, error) {
		asked[r.Question[0].Name]++
		m := new(dns.Msg).SetRcode(r, dns.RcodeNameError)
		m.Ns = []dns.RR{test.SOA(". 300 IN SOA ns. hostmaster. 1 300 300 300 300")}
		return dns.RcodeNameError, w.WriteMsg(m)
	})
	config := dnsserver.GetConfig(c)
	handler := config.Plugin[len(config.Plugin)-1](nobody)
	const ours, other = "shop.prod.svc.clusterset.local.", "nobody.example.net."
	for range 2 {
		for _, name := range []string{ours, other} {
			if _, err := handler.ServeDNS(t.Context(), &test.ResponseWriter{}, new(dns.Msg).SetQuestion(name, dns.TypeA)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if asked[ours] != 2 || asked[other] != 1 {
		t.Errorf("of two queries each, %d and %d were not answered by the cache; want 2 and 1", asked[ours], asked[other])
	}
}
