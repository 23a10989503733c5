package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// referenceCommand returns the hidden command that prints a chapter of docs/cli.md for `make
// generate`.
func referenceCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "reference",
		Short:  "Print what all commands and flags do, as Markdown",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var text strings.Builder
			root := cmd.Root()
			fmt.Fprintf(&text, "\n## %s\n\n%s\n", root.Name(), root.Long)
			for _, c := range root.Commands() {
				if c.IsAvailableCommand() && c.Name() != "completion" && c.Name() != "help" {
					describe(&text, c)
				}
			}
			_, err := io.WriteString(cmd.OutOrStdout(), text.String())
			return err
		},
	}
}

func describe(w io.Writer, cmd *cobra.Command) {
	fmt.Fprintf(w, "\n### %s\n\n```\n%s\n```\n\n", cmd.CommandPath(), cmd.UseLine())
	if cmd.Long == "" {
		fmt.Fprintf(w, "%s.\n", cmd.Short)
	} else {
		fmt.Fprintln(w, cmd.Long)
	}
	if cmd.Example != "" {
		fmt.Fprintf(w, "\n```\n%s\n```\n", unindent(cmd.Example))
	}
	if !cmd.HasAvailableLocalFlags() {
		return
	}
	fmt.Fprint(w, "\n| flag | value | default | |\n| --- | --- | --- | --- |\n")
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		name := "`--" + f.Name + "`"
		if f.Shorthand != "" {
			name += ", `-" + f.Shorthand + "`"
		}
		kind := f.Value.Type()
		if kind == "bool" {
			kind = ""
		}
		fallback := f.DefValue
		switch fallback {
		case "", "0", "[]", "false":
			fallback = ""
		default:
			fallback = "`" + fallback + "`"
		}
		fmt.Fprint(w, "|")
		for _, text := range []string{name, cell(kind), fallback, cell(f.Usage)} {
			if text != "" {
				text = " " + text
			}
			fmt.Fprintf(w, "%s |", text)
		}
		fmt.Fprintln(w)
	})
}

// cell escapes text for a cell of a Markdown table.
func cell(text string) string { return strings.ReplaceAll(text, "|", `\|`) }

func unindent(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = strings.TrimPrefix(lines[i], "  ")
	}
	return strings.Join(lines, "\n")
}
