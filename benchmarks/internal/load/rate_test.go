package load

import (
	"encoding/binary"
	"errors"
	"math"
	"net"
	"testing"
	"time"
)

func TestHighestRateIsAccurateToTheLastBisection(t *testing.T) {
	for _, limit := range []float64{700, 3_000, 9_999, 10_000, 10_001, 39_000, 123_456, 1_900_000} {
		trials := 0
		got, err := highestRate(func(pps float64) (bool, error) { trials++; return pps <= limit, nil })
		if err != nil || got > limit || got < limit/math.Pow(2, 1./(1<<halvings))*0.999 && limit >= firstPPS || trials > 14 {
			t.Errorf("%v after %d trials, error %v: want %v", got, trials, err, limit)
		}
	}
	if got, _ := highestRate(func(float64) (bool, error) { return false, nil }); got != 0 {
		t.Errorf("%v where nothing passes", got)
	}
	if _, err := highestRate(func(float64) (bool, error) { return true, errors.New("gone") }); err == nil {
		t.Error("no error")
	}
}

// A trial passes if at least 99.5 % of the datagrams arrive, and the count arrives without delay.
func TestTrialFailsOnLossOrQueueing(t *testing.T) {
	for name, c := range map[string]struct {
		lose  int           // number of datagrams of which one is lost; 0: none is lost
		delay time.Duration // of the answer
		want  bool
	}{
		"all arrive":         {want: true},
		"one in 500 is lost": {lose: 500, want: true},
		"one in 100 is lost": {lose: 100},
		"a queue has grown":  {delay: 200 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pc, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan struct{})
			defer func() { pc.Close(); <-ended }()
			go func() {
				defer close(ended)
				buf := make([]byte, 100)
				for seen, got := 0, uint64(0); ; seen++ {
					n, from, err := pc.ReadFromUDPAddrPort(buf)
					switch {
					case err != nil:
						return
					case n == 1:
						time.Sleep(c.delay)
						_, _ = pc.WriteToUDPAddrPort(binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, got), 0), from)
						got = 0
					case c.lose == 0 || seen%c.lose != 0:
						got++
					}
				}
			}()
			conn, err := net.Dial("udp4", pc.LocalAddr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			// The rate is low and the trial long, to tolerate a pause of a busy machine. A longer
			// pause can make a good trial fail, but never makes a bad trial pass.
			got, d, end := false, time.Second, time.Now()
			if c.want {
				d, end = 4*time.Second, time.Now().Add(2*time.Minute)
			}
			for again := true; again; again = !got && time.Now().Before(end) {
				got, err = trial(conn.(*net.UDPConn), newMessages(64, 64), 200, d)
			}
			if err != nil || got != c.want {
				t.Errorf("%v, error %v: want %v", got, err, c.want)
			}
		})
	}
}
