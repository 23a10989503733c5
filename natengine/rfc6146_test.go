package natengine_test

import (
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// The minimum of two seconds also applies if a shorter time is configured. The maximum is
// thirty seconds.
func TestRFC6146_3_4_FragmentsAreHeldForTwoSecondsAtLeast(t *testing.T) {
	for configured, held := range map[time.Duration]time.Duration{
		0: 5 * time.Second, time.Millisecond: 2 * time.Second, 7 * time.Second: 7 * time.Second, time.Hour: 30 * time.Second,
	} {
		fragments := packettest.Fragments(datagram(node1+":4000", theirPod+":53", make([]byte, 100)...), 64, 9)
		first, later := fragments[0], fragments[1]
		for _, late := range []bool{false, true} {
			b := newBox(t, natengine.Config{Timeouts: natengine.Timeouts{Fragment: configured}})
			if _, v := b.judge(natengine.Outbound, later); v.Action != natengine.Hold {
				t.Fatalf("%v, %v", v.Action, v.Drop)
			}
			b.wait(held)
			released := 1
			if late {
				b.wait(time.Second)
				released = 0
			}
			if _, v := b.judge(natengine.Outbound, first); v.Action != natengine.Forward || len(v.Released()) != released {
				t.Errorf("%v configured, after %v: %v, %v, %d released", configured, b.now, v.Action, v.Drop, len(v.Released()))
			}
			if n := b.dropped(natengine.Outbound, natengine.DropFragmentTimeout); n != uint64(1-released) {
				t.Errorf("%v configured, after %v: %d dropped", configured, b.now, n)
			}
		}
	}
}
