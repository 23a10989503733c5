package kernel

// IPDrops are the reasons for which the kernel's IP layer drops packets, each with an explanation
// and the kernel's counters for it (/proc/net/snmp and snmp6, and DeviceDrops).
var IPDrops = []struct {
	Reason, Explain string
	Counters        []string
}{
	{"header", "its IP header has a wrong checksum, a bad option or a TTL of zero, or the packet is truncated", []string{"InHdrErrors", "InTruncatedPkts"}},
	{"address", "its destination address is invalid", []string{"InAddrErrors"}},
	{"no_route", "no route leads to its destination", []string{"InNoRoutes", "OutNoRoutes"}},
	{"protocol", "no program uses the protocol", []string{"InUnknownProtos"}},
	{"reassembly", "a fragment whose datagram was not complete before the timeout, or for which there was no buffer space", []string{"ReasmFails"}},
	{"too_big", "it is larger than the path MTU and must not be fragmented", []string{"FragFails", "InTooBigErrors"}},
	{"discarded", "a policy or a lack of memory", []string{"InDiscards", "OutDiscards"}},
	{"device", "a device of Isthmus did not accept it: for example, the gateway reads too slowly, so the queue of the TUN is full", []string{DeviceDrops}},
}

// DeviceDrops counts the packets that devices of Isthmus, whose names begin with "isthmus", dropped
// instead of sending (/proc/net/dev). The counters of the IP layer do not include these.
const DeviceDrops = "isthmus*: transmit drop"
