package gateway

import (
	"testing"
	"testing/synctest"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	wgtun "golang.zx2c4.com/wireguard/tun"
)

// endlessTUN and endlessBind always have a whole batch, and take everything.
type (
	endlessTUN  struct{ wgtun.Device }
	endlessBind struct{ conn.Bind }
)

func (endlessTUN) Read(bufs [][]byte, _ []int, _ int) (int, error) { return len(bufs), nil }
func (endlessTUN) Write(bufs [][]byte, _ int) (int, error)         { return len(bufs), nil }
func (endlessBind) Send([][]byte, conn.Endpoint) error             { return nil }
func (endlessBind) Open(uint16) ([]conn.ReceiveFunc, uint16, error) {
	return []conn.ReceiveFunc{func(bufs [][]byte, _ []int, _ []conn.Endpoint) (int, error) { return len(bufs), nil }}, 1, nil
}

func TestTheDeviceGetsNoMorePacketsThanItWorksOff(t *testing.T) {
	const batch = 128
	bufs := make([][]byte, batch)
	tun, bind := new(backlog).wrap(endlessTUN{}, endlessBind{})
	receive, _, err := bind.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	for name, way := range map[string]struct{ take, give func() error }{
		"outbound": {
			func() error { _, err := tun.Read(bufs, make([]int, batch), 0); return err },
			func() error { return bind.Send(bufs, nil) },
		},
		"inbound": {
			func() error { _, err := receive[0](bufs, make([]int, batch), make([]conn.Endpoint, batch)); return err },
			func() error { _, err := tun.Write(bufs, 0); return err },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				// taken is how many packets a reader gets within d.
				taken := func(d time.Duration) (n int) {
					for end := time.Now().Add(d); time.Now().Before(end); n += batch {
						if n > 100*maxBacklog {
							t.Fatal("no end")
						}
						if err := way.take(); err != nil {
							t.Fatal(err)
						}
					}
					return n
				}
				if n := taken(backlogPatience / 2); n > maxBacklog+batch {
					t.Errorf("a device that hands nothing on got %d packets", n)
				}
				if n := taken(10 * backlogPatience); n > 11*(maxBacklog+batch) || n < 5*maxBacklog {
					t.Errorf("while a device dropped everything it got %d packets in ten times backlogPatience", n)
				}
				for range 100 * maxBacklog / batch { // what is handed on makes room at once
					if err := way.take(); err != nil {
						t.Fatal(err)
					}
					if err := way.give(); err != nil {
						t.Fatal(err)
					}
				}
			})
		})
	}
}
