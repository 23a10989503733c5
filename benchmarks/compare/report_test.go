package main

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestPlotIsValidXMLAndNamesEveryPeer(t *testing.T) {
	svg := plot([]sample{{Peer: baseline, TCP1: 2}, {Peer: "isthmus without USO", TCP1: 3}}, []string{baseline, "isthmus without USO"}, `a "machine" <with> signs`)
	d := xml.NewDecoder(strings.NewReader(string(svg)))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []string{">isthmus without USO<", ">1.50x<", ">TCP 1 stream, Gbit/s<"} {
		if !strings.Contains(string(svg), want) {
			t.Errorf("no %s in the plot", want)
		}
	}
}
