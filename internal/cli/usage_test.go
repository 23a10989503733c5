package cli

import "testing"

func TestNearestIsWhatSomebodyMayHaveMeant(t *testing.T) {
	words := []string{"context", "namespace", "remote-context", "o", "timeout"}
	for said, want := range map[string]string{
		"contxt": "context", "cotnext": "context", "name": "namespace", "remote-contex": "remote-context", "timeuot": "timeout",
		"x": "", "completely-else": "", "": "", "con": "context", "tim": "timeout",
	} {
		if got := Nearest(said, words); got != want {
			t.Errorf("%q: %q, want %q", said, got, want)
		}
	}
}
