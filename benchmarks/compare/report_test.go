package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// rounds are samples of the baseline and of Isthmus with the given throughput and
// memory, for one or more rounds.
func rounds(tcp, memory float64) (all []sample) {
	for i := range 3 {
		wobble := 1 + float64(i)/20
		all = append(all,
			sample{Peer: baseline, Round: i, TCP1: 2 * wobble, RSS: 300},
			sample{Peer: "isthmus", Round: i, TCP1: tcp * wobble, RSS: memory * wobble})
	}
	return all
}

func TestCheckNamesWhatBecameWorse(t *testing.T) {
	file := filepath.Join(t.TempDir(), "compare.json")
	text, err := json.Marshal(recording{"somewhere", rounds(3, 60)})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		now  []sample
		want []string // parts of the error; none: no error
	}{
		"the same":               {rounds(3, 60), nil},
		"better":                 {rounds(5, 30), nil},
		"within the tolerance":   {rounds(2.7, 66), nil},
		"less throughput":        {rounds(2.2, 60), []string{"isthmus, TCP 1 stream, Gbit/s: 1.10x of " + baseline + "; recorded were 1.50x to 1.50x"}},
		"more memory":            {rounds(3, 90), []string{"isthmus, peak memory, MiB: 0.32x", "recorded were 0.20x to 0.22x"}},
		"nothing to compare for": {rounds(3, 60)[:1], []string{"nothing to compare with"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := check(c.now, file)
			if (err == nil) != (c.want == nil) {
				t.Fatalf("error %v", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %v: want %q in it", err, w)
				}
			}
		})
	}
}

func TestThePlotIsXMLWithEveryPeer(t *testing.T) {
	svg := plot(rounds(3, 60), []string{baseline, "isthmus"}, `a "machine" <with> signs`)
	d := xml.NewDecoder(strings.NewReader(string(svg)))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []string{">isthmus<", ">1.50x<", ">TCP 1 stream, Gbit/s<"} {
		if !strings.Contains(string(svg), want) {
			t.Errorf("no %s in the plot", want)
		}
	}
}
