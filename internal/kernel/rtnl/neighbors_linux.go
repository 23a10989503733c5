package rtnl

import (
	"errors"
	"os"
	"strconv"
	"strings"
)

// NeighborStats are counters of the kernel's ARP table, which all network namespaces of the machine
// share.
type NeighborStats struct {
	Unanswered uint64 // addresses that did not answer ARP; packets that waited for them were dropped
	NoRoom     uint64 // packets that were dropped because too many waited for the same address
	TableFull  uint64 // packets that were dropped because the table was full
}

// Neighbors reads the counters.
func Neighbors() (NeighborStats, error) {
	b, err := os.ReadFile("/proc/net/stat/arp_cache")
	if err != nil {
		return NeighborStats{}, err
	}
	return neighborsFrom(string(b))
}

// neighborsFrom adds up the lines of all CPUs, which follow a line of names.
func neighborsFrom(text string) (s NeighborStats, err error) {
	names, cpus, _ := strings.Cut(text, "\n")
	counters := map[string]*uint64{"res_failed": &s.Unanswered, "unresolved_discards": &s.NoRoom, "table_fulls": &s.TableFull}
	for line := range strings.Lines(cpus) {
		values := strings.Fields(line)
		for i, name := range strings.Fields(names) {
			to := counters[name]
			if to == nil {
				continue
			}
			if i >= len(values) {
				return s, errors.New("/proc/net/stat/arp_cache: a line has fewer counters than names")
			}
			n, err := strconv.ParseUint(values[i], 16, 64)
			if err != nil {
				return s, errors.New("/proc/net/stat/arp_cache: " + name + " is " + values[i] + "; want a hexadecimal number")
			}
			*to += n
		}
	}
	return s, nil
}
