package peering

import "github.com/isthmus-net/isthmus/internal/safetext"

// Printable makes a text of unknown origin fit for a terminal.
func Printable(s string) string { return safetext.Of(s) }

// message is Printable for the message of a condition.
func message(s string) string { return safetext.Cut(s, safetext.Message) }

func orDash(s string) string { return safetext.OrDash(s) }
