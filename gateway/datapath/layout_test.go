package datapath_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/datapath"
)

func TestReviewedWireGuardVersionMatchesGoMod(t *testing.T) {
	mod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if want := "golang.zx2c4.com/wireguard " + datapath.WireguardVersion + "\n"; !strings.Contains(string(mod), want) {
		t.Errorf("go.mod does not require %s: read what changed, then change the constant in layout.go", want)
	}
	for line := range strings.Lines(string(mod)) {
		if strings.Contains(line, "=>") && strings.Contains(line, "golang.zx2c4.com/wireguard") {
			t.Errorf("go.mod replaces it: %s", line)
		}
	}
}

type laidOut struct {
	First  uint32
	Second struct{ Inner time.Time }
	embedded
}

type embedded struct{ Promoted bool }

func TestAnUnexpectedStructLayoutIsRefused(t *testing.T) {
	if offset := datapath.FieldOf[laidOut, time.Time]("Second", "Inner"); offset != 8 {
		t.Errorf("the field is at %d: want 8", offset)
	}
	for _, tc := range []struct {
		name, want string
		f          func()
	}{
		{"missing", "datapath_test.laidOut has no field Third", func() { datapath.FieldOf[laidOut, uint32]("Third") }},
		{"another type", "datapath_test.laidOut.First is of type uint32, want uint64", func() { datapath.FieldOf[laidOut, uint64]("First") }},
		{"moved to another struct", "datapath_test.laidOut has no field First", func() { datapath.FieldOf[laidOut, uint32]("Second", "First") }},
		{"moved into an embedded struct", "datapath_test.laidOut has no field Promoted", func() { datapath.FieldOf[laidOut, bool]("Promoted") }},
		{"inside a field that is no struct", "datapath_test.laidOut has no field Inner", func() { datapath.FieldOf[laidOut, time.Time]("First", "Inner") }},
		{"of the device", "device.Keypair has no field nonce", func() { datapath.FieldOf[device.Keypair, uint64]("nonce") }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			defer func() {
				if message, _ := recover().(string); message != "wireguard-go: "+tc.want {
					t.Errorf("%q: want %q", message, "wireguard-go: "+tc.want)
				}
			}()
			tc.f()
		})
	}
}
