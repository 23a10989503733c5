package lab

import "net/netip"

type View struct{ Pod, External netip.Prefix }
