// Package parse compares package packet with gopacket. Both must decode the same values from a
// packet. If only one of the two accepts a packet, the difference must have a name and a
// reason.
package parse
