package cli

import (
	"encoding/json"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

// Output is the value of --output. The empty value selects text for people, and "wide" adds columns
// to that text. "json" and "yaml" are for programs.
type Output string

// AddOutputFlag adds --output and -o. usage describes the printed data. formats are the accepted
// values in addition to json and yaml.
func AddOutputFlag(cmd *cobra.Command, o *Output, usage string, formats ...string) {
	addChoice(cmd, (*string)(o), "output", "o", "", usage, append(formats, "json", "yaml"))
}

// ForPrograms reports whether the output is JSON or YAML.
func (o Output) ForPrograms() bool { return o == "json" || o == "yaml" }

// Print writes v as JSON or YAML.
func (o Output) Print(w io.Writer, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return o.PrintJSON(w, append(text, '\n'))
}

// PrintJSON writes JSON text in the format of o.
func (o Output) PrintJSON(w io.Writer, text []byte) (err error) {
	if o == "yaml" {
		if text, err = yaml.JSONToYAML(text); err != nil {
			return err
		}
	}
	_, err = w.Write(text)
	return err
}

// A choice is a pflag.Value that accepts only given words.
type choice struct {
	value *string
	words []string
}

func (c choice) String() string {
	if c.value == nil {
		return ""
	}
	return *c.value
}

func (c choice) Type() string { return strings.Join(c.words, "|") }

func (c choice) Set(text string) error {
	if !slices.Contains(c.words, text) {
		last := len(c.words) - 1
		return wanted(strings.Join(c.words[:last], ", ") + " or " + c.words[last])
	}
	*c.value = text
	return nil
}

type wanted string

func (w wanted) Error() string { return "want " + string(w) }

// AddChoiceFlag adds a flag that accepts the given words, which the shell completes.
func AddChoiceFlag(cmd *cobra.Command, value *string, name, otherwise, usage string, words ...string) {
	addChoice(cmd, value, name, "", otherwise, usage, words)
}

func addChoice(cmd *cobra.Command, value *string, name, short, otherwise, usage string, words []string) {
	*value = otherwise
	cmd.Flags().VarP(choice{value, words}, name, short, usage)
	_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)) // fails only for an unknown flag
}
