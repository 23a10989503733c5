// Package parse holds package packet against gopacket: what both say about a packet has to be the
// same, and where one refuses what the other reads, the difference has a name and a reason.
package parse
