// Package safetext makes texts that others wrote safe for a person's terminal.
package safetext

import (
	"fmt"
	"strings"
	"unicode"
)

const (
	// most is how many octets of a text of unknown origin are shown.
	most = 400
	// Message is the limit for the message of a condition: all that our manager writes.
	Message = 1024
)

// Of escapes unprintable characters (control and bidirectional characters, line ends) and cuts a
// long text.
func Of(s string) string { return Cut(s, most) }

// Cut is Of with another limit.
func Cut(s string, limit int) string {
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

// OrDash is Of for a cell of a table: an empty text becomes a dash.
func OrDash(s string) string {
	if s == "" {
		return "-"
	}
	return Of(s)
}

// FirstFew joins the first few of a list that may be long.
func FirstFew(all []string, between string) string {
	const few = 5
	text := strings.Join(all[:min(len(all), few)], between)
	if len(all) > few {
		text += fmt.Sprintf("%sand %d more", between, len(all)-few)
	}
	return text
}
