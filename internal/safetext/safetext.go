// Package safetext makes texts from other systems safe to show on a person's terminal.
package safetext

import (
	"fmt"
	"strings"
	"unicode"
)

const (
	// maxLength is the maximum number of octets that are shown of a foreign text.
	maxLength = 400
	// Message is the limit for the message of a condition. Our manager never writes a longer
	// message.
	Message = 1024
)

// Of escapes unprintable characters (control and bidirectional characters, line ends) and
// shortens a long text.
func Of(s string) string { return Cut(s, maxLength) }

// Cut is like Of, with another maximum length.
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

// OrDash is like Of, for a cell of a table: an empty text becomes a dash.
func OrDash(s string) string {
	if s == "" {
		return "-"
	}
	return Of(s)
}

// FirstFew joins the first five elements of a list, and states how many more there are.
func FirstFew(all []string, between string) string {
	const few = 5
	text := strings.Join(all[:min(len(all), few)], between)
	if len(all) > few {
		text += fmt.Sprintf("%sand %d more", between, len(all)-few)
	}
	return text
}
