// Command tailscale runs Tailscale's fork of wireguard-go as a peer of the comparison in
// ../compare. It is a separate module, so that its dependencies stay out of ours. Its arguments are
// the device's configuration in WireGuard's UAPI format, and the MTU. It creates the TUN wg0 and
// prints "ready".
package main

import (
	"fmt"
	"log"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/tailscale/wireguard-go/conn"
	"github.com/tailscale/wireguard-go/device"
	"github.com/tailscale/wireguard-go/tun"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("want the text for IpcSet and the MTU")
	}
	mtu, err := strconv.Atoi(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	if err := run(os.Args[1], mtu); err != nil {
		log.Fatal(err)
	}
}

func run(uapi string, mtu int) error {
	t, err := tun.CreateTUN("wg0", mtu)
	if err != nil {
		return err
	}
	d := device.NewDevice(t, conn.NewDefaultBind(), device.NewLogger(device.LogLevelError, ""))
	defer d.Close()
	if err := d.IpcSet(uapi); err != nil {
		return err
	}
	if err := d.Up(); err != nil {
		return err
	}
	fmt.Println("ready")
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, os.Interrupt)
	select {
	case <-stop:
	case <-d.Wait():
	}
	return nil
}
