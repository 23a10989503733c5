package kernel

// IPDrops are the reasons for which the kernel's IP drops packets, each with a sentence and the kernel's counters
// of it (/proc/net/snmp and snmp6).
var IPDrops = []struct {
	Reason, Explain string
	Counters        []string
}{
	{"header", "its IP header has a wrong checksum, a bad option or no hop left, or it is shorter than its header says", []string{"InHdrErrors", "InTruncatedPkts"}},
	{"address", "its destination is no address that packets may be sent or forwarded to", []string{"InAddrErrors"}},
	{"no_route", "no route leads to its destination", []string{"InNoRoutes", "OutNoRoutes"}},
	{"protocol", "nothing there speaks the protocol", []string{"InUnknownProtos"}},
	{"reassembly", "a fragment whose datagram was not complete in time, or had no room", []string{"ReasmFails"}},
	{"too_big", "it is larger than the MTU of its way and not to be fragmented", []string{"FragFails", "InTooBigErrors"}},
	{"discarded", "a policy or a lack of memory", []string{"InDiscards", "OutDiscards"}},
}
