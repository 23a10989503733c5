package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// kinds describes the accepted values of pflag's types. Our own types describe themselves.
var kinds = map[string]string{
	"int": "a number", "int32": "a number", "int64": "a number", "uint16": "a number from 0 to 65535",
	"bool": "true or false", "duration": "a duration such as 90s or 5m", "intSlice": "numbers separated by commas",
}

// flagError replaces pflag's errors, which use programmers' terms, by errors for users.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		name := unknown.GetSpecifiedName()
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				names = append(names, f.Name)
			}
		})
		if near := nearest(name, names); near != "" {
			return fmt.Errorf("unknown flag: --%s; did you mean --%s?", name, near)
		}
	case errors.As(err, &invalid):
		value := invalid.GetFlag().Value
		if want := kinds[value.Type()]; want != "" && strings.HasPrefix(fmt.Sprintf("%T", value), "*pflag.") {
			return fmt.Errorf("--%s %q: want %s", invalid.GetFlag().Name, invalid.GetValue(), want)
		}
		return fmt.Errorf("--%s %q: %w", invalid.GetFlag().Name, invalid.GetValue(), invalid.Unwrap())
	}
	return err
}

// explainArgs makes all commands name their missing arguments. cobra would only count them.
func explainArgs(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			switch err := check(cmd, args); {
			case err == nil:
				return nil
			case len(args) == 0:
				return fmt.Errorf("want %s", cmd.UseLine())
			default:
				return fmt.Errorf("arguments %s: want %s", strings.Trim(fmt.Sprintf("%q", args), "[]"), cmd.UseLine())
			}
		}
	}
	for _, sub := range cmd.Commands() {
		explainArgs(sub)
	}
}

// nearest returns the word that the user probably meant by input. A word matches if it begins with
// input, or if the edit distance is at most two. nearest returns "" if no word matches.
func nearest(input string, words []string) string {
	best, least := "", 3
	for _, w := range words {
		d := distance(input, w)
		if len(input) > 1 && strings.HasPrefix(w, input) {
			d = min(d, 2)
		}
		if d < least && d < len(input) {
			best, least = w, d
		}
	}
	return best
}

// distance returns the Levenshtein distance: the number of letters to change, insert or delete.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
