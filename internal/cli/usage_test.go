package cli

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func TestNearestSuggestsTheLikelyWord(t *testing.T) {
	words := []string{"context", "namespace", "remote-context", "o", "timeout"}
	for typed, want := range map[string]string{
		"contxt": "context", "cotnext": "context", "name": "namespace", "remote-contex": "remote-context", "timeuot": "timeout",
		"x": "", "completely-else": "", "": "", "con": "context", "tim": "timeout",
	} {
		if got := nearest(typed, words); got != want {
			t.Errorf("%q: %q, want %q", typed, got, want)
		}
	}
}

func TestFlagErrorsAvoidGoTerms(t *testing.T) {
	for kind, add := range map[string]func(*pflag.FlagSet){
		"int":      func(f *pflag.FlagSet) { f.Int("x", 0, "") },
		"uint16":   func(f *pflag.FlagSet) { f.Uint16("x", 0, "") },
		"bool":     func(f *pflag.FlagSet) { f.Bool("x", false, "") },
		"duration": func(f *pflag.FlagSet) { f.Duration("x", 0, "") },
		"intSlice": func(f *pflag.FlagSet) { f.IntSlice("x", nil, "") },
	} {
		cmd := &cobra.Command{Use: "x"}
		add(cmd.Flags())
		err := flagError(cmd, cmd.ParseFlags([]string{"--x=1,nonsense"}))
		if want := `--x "1,nonsense": want ` + kinds[kind]; err == nil || kinds[kind] == "" || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v; want %s", kind, err, want)
		}
	}
}
