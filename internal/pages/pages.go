// Package pages finds the commands that the documents show, for the tests that run them.
package pages

import (
	"os"
	"regexp"
	"strings"
)

// A Command is a line of a shell that a page tells a reader to run. Lines that end with a backslash,
// and here-documents, are one.
type Command struct {
	Chapter string // the heading above it, without its #
	Text    string // without the comment at its end
}

// programs begin a command; other lines of code are output, configuration or a part of one.
var programs = regexp.MustCompile(`^(?:sudo |\$ )*(?:isthmus|isthmus-lab|kubectl|helm|make|go|nft|skopeo|curl|openssl|envsubst|export|for|ip) `)

// comment is one at the end of a line, as the pages write it.
var comment = regexp.MustCompile(`\s+# .*$`)

// Of returns the commands of a page, in their order: lines in fences, and lines indented by four.
func Of(file string) (all []Command, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	chapter, fenced, open := "", false, ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced, open = !fenced, ""
			continue
		}
		if heading, ok := strings.CutPrefix(line, "#"); ok && !fenced {
			chapter = strings.TrimSpace(strings.TrimLeft(heading, "#"))
			continue
		}
		code, indented := strings.CutPrefix(line, "    ")
		if !indented && !fenced {
			open = ""
			continue
		}
		if !indented {
			code = line
		}
		switch {
		case open == `\`: // the line before goes on here
			last := &all[len(all)-1]
			last.Text = strings.TrimSuffix(last.Text, `\`) + comment.ReplaceAllString(strings.TrimSpace(code), "")
		case open != "": // it is input of the command before
			if strings.TrimSpace(code) == open {
				open = ""
			}
			continue
		case !programs.MatchString(code):
			continue
		default:
			all = append(all, Command{chapter, strings.TrimPrefix(comment.ReplaceAllString(code, ""), "$ ")})
		}
		open = ""
		if strings.HasSuffix(code, `\`) {
			open = `\`
		} else if _, word, ok := strings.Cut(code, "<<"); ok {
			open = strings.TrimSpace(word)
		}
	}
	return all, nil
}
