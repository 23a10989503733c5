package rtnl

import (
	"os"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// DroppedByIP returns how many packets IPv4, IPv6 and the devices of Isthmus have dropped in the
// network namespace of the calling thread, by the reasons of kernel.IPDrops.
func DroppedByIP() (map[string]uint64, error) {
	counters := make(map[string]uint64)
	v4, err := os.ReadFile("/proc/thread-self/net/snmp")
	if err != nil {
		return nil, err
	}
	addSNMP(counters, string(v4))
	if v6, err := os.ReadFile("/proc/thread-self/net/snmp6"); err == nil { // the file is missing without IPv6
		addSNMP6(counters, string(v6))
	}
	devices, err := os.ReadFile("/proc/thread-self/net/dev")
	if err != nil {
		return nil, err
	}
	addDevices(counters, string(devices))
	dropped := make(map[string]uint64, len(kernel.IPDrops))
	for _, d := range kernel.IPDrops {
		for _, name := range d.Counters {
			dropped[d.Reason] += counters[name]
		}
	}
	return dropped, nil
}

// addSNMP adds the IPv4 counters: each line of names is followed by a line of values.
func addSNMP(to map[string]uint64, text string) {
	var names []string
	for line := range strings.Lines(text) {
		values, ok := strings.CutPrefix(line, "Ip: ")
		if !ok {
			continue
		}
		if names == nil {
			names = strings.Fields(values)
			continue
		}
		for i, value := range strings.Fields(values) {
			if n, err := strconv.ParseUint(value, 10, 64); err == nil && i < len(names) {
				to[names[i]] += n
			}
		}
	}
}

// addSNMP6 adds the IPv6 counters: each line has a name and a value.
func addSNMP6(to map[string]uint64, text string) {
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) == 2 {
			if name, ok := strings.CutPrefix(f[0], "Ip6"); ok {
				n, _ := strconv.ParseUint(f[1], 10, 64)
				to[name] += n
			}
		}
	}
}

// addDevices adds the drops of devices of Isthmus: each device has a line with eight receive
// counters and eight transmit counters.
func addDevices(to map[string]uint64, text string) {
	const transmitDrop = 8 + 3
	for line := range strings.Lines(text) {
		name, values, _ := strings.Cut(strings.TrimSpace(line), ":")
		if f := strings.Fields(values); strings.HasPrefix(name, "isthmus") && len(f) > transmitDrop {
			n, _ := strconv.ParseUint(f[transmitDrop], 10, 64)
			to[kernel.DeviceDrops] += n
		}
	}
}
