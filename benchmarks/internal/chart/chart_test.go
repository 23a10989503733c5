package chart

import (
	"math"
	"strings"
	"testing"
)

const table = `A machine.

| | 10 peers | 1,000 peers |
|---|---|---|
| at rest | 0.37 % | **8** |
| memory | 31 | 122 |
`

func TestAFigureStaysWithItsNumberOfPeers(t *testing.T) {
	got := parse(table)
	if len(got.Peers) != 2 || got.Peers[1] != 1000 {
		t.Fatalf("peers %v", got.Peers)
	}
	if rest := got.Rows["at rest"]; len(rest) != 2 || rest[0] != 0.37 || !math.IsNaN(rest[1]) {
		t.Errorf("at rest: %v; want 0.37 and no number", rest)
	}
	if memory := got.Rows["memory"]; len(memory) != 2 || memory[1] != 122 {
		t.Errorf("memory: %v", memory)
	}
	svg := Draw("peers", []Panel{{Title: "memory", Lines: []Line{{got, Now}}}, {Title: "rest & more", Row: "at rest", Lines: []Line{{got, Before}}}})
	if strings.Contains(svg, "NaN") || strings.Count(svg, "<circle") != 3 || !strings.Contains(svg, "rest &amp; more") {
		t.Errorf("want three points and no NaN:\n%s", svg)
	}
}
