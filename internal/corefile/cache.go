package corefile

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// denialLine excludes the zone from the negative cache. Without it, CoreDNS may deny a name for
// half a minute after the name was imported. CoreDNS uses only the last of several such lines, so
// the zone is added to the existing line:
//
//	cache 30 {
//	    disable success cluster.local
//	    disable denial cluster.local clusterset.local # added by isthmus install, with the zone
//	}
const denialLine = "disable denial " + Zone + " "

// cache has the tokens of the plugin "cache", in the server block that answers for Zone.
type cache struct {
	name   token
	args   []token
	open   *token // opening brace; nil: no block
	next   token  // the token after open
	denial []token
}

// argumentsEnd returns the byte offset at which the plugin's arguments end.
func (c *cache) argumentsEnd() int {
	if len(c.args) == 0 {
		return c.name.end
	}
	return c.args[len(c.args)-1].end
}

// findCache finds the plugin "cache". It returns false if there is not exactly one, or if the
// Corefile cannot be parsed. This is no error, because imported names also work without the edit.
func findCache(text string) (c cache, ok bool) {
	servers, err := parse(text)
	if err != nil {
		return c, false
	}
	s, err := serverFor(servers)
	if err != nil {
		return c, false
	}
	found := 0
	for _, d := range s.directives {
		if d[0].text != "cache" {
			continue
		}
		found++
		end := slices.IndexFunc(d, func(t token) bool { return t.text == "{" })
		if end < 0 {
			c = cache{name: d[0], args: d[1:]}
			continue
		}
		c = cache{name: d[0], args: d[1:end], open: &d[end], next: d[end+1]}
		for _, line := range linesOf(d[end+1:]) {
			if len(line) > 1 && line[0].text == "disable" && line[1].text == "denial" {
				c.denial = line
			}
		}
	}
	return c, found == 1
}

// addDenial returns the Corefile with a line that makes the plugin "cache" store no missing names
// of the zone. It returns text unchanged if the line is not needed, or if it cannot edit the
// plugin's block.
func addDenial(text string) string {
	c, ok := findCache(text)
	if !ok {
		return text
	}
	zones := c.args
	if len(zones) > 0 {
		if _, err := strconv.Atoi(zones[0].text); err == nil {
			zones = zones[1:]
		}
	}
	if len(zones) > 0 && !slices.ContainsFunc(zones, isSuffix) {
		return text
	}
	ending := endingOf(text)
	switch {
	case c.open == nil:
		last := c.argumentsEnd()
		return text[:last] + cacheBlock(ending, indentOf(text, c.name.start)) + text[last:]
	case c.next.line == c.open.line || strings.TrimLeft(text[c.open.start-1:c.open.start], " \t") != "":
		return text
	case len(c.denial) == 0:
		begin := c.open.end + strings.IndexByte(text[c.open.end:], '\n') + 1
		inner := indentOf(text, c.name.start) + "    "
		if c.next.text != "}" {
			inner = indentOf(text, c.next.start)
		}
		return text[:begin] + inner + denialLine + mark + ending + text[begin:]
	case len(c.denial) == 2 || slices.ContainsFunc(c.denial[2:], isSuffix):
		return text
	}
	last := c.denial[len(c.denial)-1].end
	end := last + len(lineEnd(text[last:]))
	return text[:last] + " " + Zone + text[last:end] + " " + markZone + text[end:]
}

// cacheBlock returns the block that addDenial writes if the plugin "cache" has no block.
func cacheBlock(ending, indent string) string {
	return " {" + ending + indent + "    " + denialLine + markOwnBlock + ending + indent + "}"
}

// removeDenial reverts addDenial.
func removeDenial(text string) (string, error) {
	c, ok := findCache(text)
	if !ok || len(c.denial) == 0 || !strings.Contains(lineOf(text, c.denial[0].start), mark) {
		return text, nil
	}
	first := c.denial[0]
	line := lineEnd(text[first.start:])
	begin, end := strings.LastIndexByte(text[:first.start], '\n')+1, first.start+len(line)
	if line == denialLine+markOwnBlock {
		last := c.argumentsEnd()
		if rest, ok := strings.CutPrefix(text[last:], cacheBlock(endingOf(text), indentOf(text, c.name.start))); ok {
			return text[:last] + rest, nil
		}
	}
	if line == denialLine+mark || line == denialLine+markOwnBlock { // a user has added lines to our block
		return text[:begin] + text[end+1+strings.IndexByte(text[end:], '\n'):], nil
	}
	i := slices.IndexFunc(c.denial, isZone)
	if rest, ok := strings.CutSuffix(line, " "+markZone); ok && i > 2 {
		before, zone := c.denial[i-1].end, c.denial[i].end
		return text[:before] + text[zone:first.start+len(rest)] + text[end:], nil
	}
	return "", fmt.Errorf("line %d: the comment of isthmus install was changed; remove %s by hand", first.line, Zone)
}

// lineEnd returns the rest of the first line of text.
func lineEnd(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return strings.TrimSuffix(line, "\r")
}

// isSuffix reports whether Zone is in a zone.
func isSuffix(t token) bool { return covers(strings.Trim(strings.ToLower(t.text), ".")) }
