// Package pages extracts the commands from the documents, for the tests that run them.
package pages

import (
	"os"
	"regexp"
	"strings"
)

// A Command is a shell command that a page asks the reader to run. Lines that continue after a
// backslash belong to one Command, and so does a here-document.
type Command struct {
	Chapter string // the heading above the command, without its #
	Text    string // without a comment at the end of the line
}

// programs matches the beginnings of commands. Other lines in a code block are output,
// configuration or further lines of a command.
var programs = regexp.MustCompile(`^(?:sudo |\$ )*(?:isthmus|isthmus-lab|kubectl|helm|make|go|nft|skopeo|curl|openssl|envsubst|export|for|ip) `)

// comment matches a comment at the end of a line, in the style of the pages.
var comment = regexp.MustCompile(`\s+# .*$`)

// Of returns the commands of a page in order. It reads fenced code blocks, and lines indented by
// four.
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
		case open == `\`: // this line continues the previous one
			last := &all[len(all)-1]
			last.Text = strings.TrimSuffix(last.Text, `\`) + comment.ReplaceAllString(strings.TrimSpace(code), "")
		case open != "": // this line is input of the previous command
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
