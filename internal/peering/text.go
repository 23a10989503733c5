package peering

import (
	"fmt"
	"strings"
	"unicode"
)

const (
	// maxText is how much of a text that others wrote is shown.
	maxText = 400
	// maxMessage is how much of the message of a condition is: all that our manager writes.
	maxMessage = 1024
)

// Printable makes a text of unknown origin fit for a terminal: what is not printable (control and
// bidirectional characters, line ends) is escaped, and a long text cut.
func Printable(s string) string { return printable(s, maxText) }

func printable(s string, limit int) string {
	if s == "" {
		return `""`
	}
	var b strings.Builder
	for i, r := range s {
		if i >= limit {
			b.WriteString("...")
			break
		}
		if unicode.IsPrint(r) && r != unicode.ReplacementChar {
			b.WriteRune(r)
		} else {
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// orDash is Printable for a cell of a table.
func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return Printable(s)
}
