package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/coredns/caddy"
	"github.com/coredns/caddy/caddyfile"
	"github.com/coredns/coredns/plugin/kubernetes"
)

// CoreDNS reads what internal/corefile writes.
func TestCoreDNSServesTheZoneThatWasAdded(t *testing.T) {
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
