package control

import (
	"bufio"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// TestRepeatedPeeringLeaksNothing repeatedly peers and un-peers the same two clusters, by their
// Peerings and by the command line. It checks that nothing accumulates.
func TestRepeatedPeeringLeaksNothing(t *testing.T) {
	t.Parallel()
	byPeerings, byCommand := 10, 1
	if *long {
		byPeerings, byCommand = 200, 20
	}
	sites := newSites(t, "10.244.0.0/16", "10.128.0.0/14")
	a, b := sites[0], sites[1]
	a.startManager()
	b.startManager()
	peer(t, a, b)
	disjoin(a, b)
	for _, s := range sites {
		s.waitClean()
	}
	start := map[*site]v1alpha1.IpamStorageSpec{a: a.ipamStorage(), b: b.ipamStorage()}
	rejoin(a, b)
	networks := a.tunnelEndpoint(b).Spec
	disjoin(a, b)

	repeat := func(t *testing.T, times int, once func() (joined, parted time.Duration)) {
		before := map[*site]usage{a: a.atRest(), b: b.atRest()}
		var join, part, slowest time.Duration
		for i := range times {
			joined, parted := once()
			join, part, slowest = join+joined, part+parted, max(slowest, joined, parted)
			if *long && (i+1)%50 == 0 {
				t.Logf("%d: a %v, b %v", i+1, a.usage(), b.usage())
			}
		}
		for _, s := range sites {
			s.waitClean()
			if got := s.ipamStorage(); !equality.Semantic.DeepEqual(got, start[s]) {
				t.Errorf("IpamStorage of %s:\n%+v\nat the start:\n%+v", s.name, got, start[s])
			}
			s.eventually(fmt.Sprintf("as few goroutines and as little memory of %s after %d peerings as before, %v", s.name, times, before[s]), func() (string, bool) {
				now := s.atRest()
				return now.String(), now.goroutines <= before[s].goroutines+3 && now.memory <= before[s].memory+before[s].memory/2+16<<20
			})
		}
		t.Logf("%d times: joined after %v, parted after %v, slowest %v", times, (join / time.Duration(times)).Round(time.Millisecond),
			(part / time.Duration(times)).Round(time.Millisecond), slowest.Round(time.Millisecond))
	}
	t.Run("by Peerings", func(t *testing.T) {
		reportTo(t, sites...)
		repeat(t, byPeerings, func() (joined, parted time.Duration) {
			began := time.Now()
			rejoin(a, b)
			joined = time.Since(began)
			if got := a.tunnelEndpoint(b).Spec; !equality.Semantic.DeepEqual(got, networks) {
				t.Fatalf("TunnelEndpoint:\n%+v\nwas:\n%+v", got, networks)
			}
			began = time.Now()
			disjoin(a, b)
			return joined, time.Since(began)
		})
	})
	t.Run("by the command line", func(t *testing.T) {
		reportTo(t, sites...)
		if out, err := a.isthmus("unpeer", "--kubeconfig", a.kubeconfig, "--remote-kubeconfig", b.kubeconfig); err != nil { // deletes the previous tenant namespaces
			t.Fatalf("%v\n%s", err, out)
		}
		repeat(t, byCommand, func() (joined, parted time.Duration) {
			began := time.Now()
			peer(t, a, b)
			joined = time.Since(began)
			began = time.Now()
			unpeer(t, a, b)
			return joined, time.Since(began)
		})
	})
}

// usage holds the amounts of resources that a manager uses.
type usage struct {
	goroutines int
	memory     int // resident
	heap       int
}

func (u usage) String() string {
	return fmt.Sprintf("%d goroutines, %d MiB resident, %d MiB heap", u.goroutines, u.memory>>20, u.heap>>20)
}

// atRest returns the lowest usage during two seconds. Short-lived usage, such as that of this
// request, is not a leak.
func (s *site) atRest() usage {
	s.t.Helper()
	least := s.usage()
	for range 10 {
		time.Sleep(200 * time.Millisecond)
		now := s.usage()
		least.goroutines, least.memory, least.heap = min(least.goroutines, now.goroutines), min(least.memory, now.memory), min(least.heap, now.heap)
	}
	return least
}

// usage reads the metrics of the manager.
func (s *site) usage() (u usage) {
	s.t.Helper()
	response, err := http.Get("http://" + s.metrics + "/metrics")
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), " ")
		n, _ := strconv.ParseFloat(value, 64)
		switch name {
		case "go_goroutines":
			u.goroutines = int(n)
		case "go_memstats_heap_inuse_bytes":
			u.heap = int(n)
		}
	}
	statm, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", s.manager.Process.Pid))
	if err != nil {
		s.t.Fatal(err)
	}
	var size, resident int
	if _, err := fmt.Sscan(string(statm), &size, &resident); err != nil || u.goroutines == 0 {
		s.t.Fatalf("metrics of %s: %+v, %v", s.name, u, err)
	}
	u.memory = resident * os.Getpagesize()
	return u
}
