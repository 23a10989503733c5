package gateway

import (
	"sync/atomic"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	wgtun "golang.zx2c4.com/wireguard/tun"
)

const (
	// maxBacklog is how many packets of one direction wireguard-go's device may have. It keeps each in a buffer of 64 KiB, of
	// which one or two pages become memory, and would take 1024 batches for every peer: 300 MiB under a flood of small
	// datagrams. What comes on top waits in the queue of the TUN or of the socket, and is dropped there.
	maxBacklog = 1024
	// backlogPatience is for packets that the device has dropped, which nobody tells us of.
	backlogPatience = 2 * time.Millisecond
)

// backlog bounds the memory of wireguard-go's device from outside: it counts what goes in on one side and comes out on
// the other, and holds reading up when the difference is too large.
type backlog struct{ out, in count }

// wrap returns the two sides for the device.
func (b *backlog) wrap(tun wgtun.Device, bind conn.Bind) (wgtun.Device, conn.Bind) {
	return countingTUN{tun, b}, countingBind{bind, b}
}

// count is the packets of one direction that the device has.
type count struct{ packets atomic.Int64 }

// wait returns when the device has worked off half of its backlog, or after backlogPatience, when the rest counts as
// dropped.
func (c *count) wait() {
	if c.packets.Load() < maxBacklog {
		return
	}
	for end := time.Now().Add(backlogPatience); time.Now().Before(end); {
		time.Sleep(50 * time.Microsecond)
		if c.packets.Load() < maxBacklog/2 {
			return
		}
	}
	c.packets.Store(0)
}

func (c *count) enter(n int) { c.packets.Add(int64(n)) }

func (c *count) leave(n int) {
	if c.packets.Add(int64(-n)) < 0 {
		c.packets.Store(0) // a message of the device's own, or what counted as dropped was only late
	}
}

type countingTUN struct {
	wgtun.Device
	*backlog
}

func (c countingTUN) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	c.out.wait()
	n, err := c.Device.Read(bufs, sizes, offset)
	c.out.enter(n)
	return n, err
}

func (c countingTUN) Write(bufs [][]byte, offset int) (int, error) {
	n, err := c.Device.Write(bufs, offset)
	c.in.leave(len(bufs))
	return n, err
}

type countingBind struct {
	conn.Bind
	*backlog
}

func (c countingBind) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	fns, actual, err := c.Bind.Open(port)
	for i, next := range fns {
		fns[i] = func(bufs [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
			c.in.wait()
			n, err := next(bufs, sizes, eps)
			c.in.enter(n)
			return n, err
		}
	}
	return fns, actual, err
}

func (c countingBind) Send(bufs [][]byte, ep conn.Endpoint) error {
	err := c.Bind.Send(bufs, ep)
	c.out.leave(len(bufs))
	return err
}
