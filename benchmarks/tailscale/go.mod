module github.com/isthmus-net/isthmus/benchmarks/tailscale

go 1.26.0

require github.com/tailscale/wireguard-go v0.0.0-20260928213032-417aef361226

require (
	golang.org/x/crypto v0.52.0 // indirect
	golang.org/x/net v0.54.0 // indirect
	golang.org/x/sys v0.45.0 // indirect
	golang.zx2c4.com/wintun v0.0.0-20230126152724-0fa3db229ce2 // indirect
)
