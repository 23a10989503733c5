// Package corefile adds the zone of multi-cluster services to the Corefile of a cluster's
// CoreDNS, and removes it again:
//
//	kubernetes cluster.local in-addr.arpa ip6.arpa clusterset.local {
//	    multicluster clusterset.local # added by isthmus install, with the zone
//	    pods insecure
//
// It also keeps the plugin cache from storing missing names of the zone; see addDenial.
//
// It edits the text in place and keeps comments and layout. A comment marks the changes of Add.
// Remove reverts only those, byte for byte. A Corefile that the package cannot parse is an error,
// never a guess: if CoreDNS rejects its Corefile at its next start, the whole cluster loses its
// DNS.
package corefile

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Zone is the zone of imported services in the Multi-Cluster Services API.
const Zone = "clusterset.local"

// option is the name of an option of the plugin "kubernetes", available since CoreDNS 1.12.2.
const option = "multicluster"

// A mark is a comment at the end of a line that Add has written. The mark's text states which other
// parts Add has written together with the line. Remove removes these parts, too.
const (
	mark      = "# added by isthmus install"
	markZone  = mark + ", with the zone"
	markBlock = markZone + " and this block"
	// markOwnBlock marks a block that Add created for this line.
	markOwnBlock = mark + ", with this block"
)

// Lines are the lines that a user must add by hand when Add fails.
const Lines = "kubernetes cluster.local in-addr.arpa ip6.arpa " + Zone + " { # add the zone at the end\n    " + option + " " + Zone + "\n" +
	"cache 30 { # only if it is there already\n    disable denial cluster.local " + Zone + " # add the zone at the end"

// Add returns the Corefile with the zone. It returns text unchanged if nothing is missing.
func Add(text string) (string, error) {
	text, err := addZone(text)
	if err != nil {
		return "", err
	}
	return addDenial(text), nil
}

// addZone returns the Corefile with the zone. It returns text unchanged if CoreDNS already serves
// the zone.
func addZone(text string) (string, error) {
	k, err := find(text)
	if err != nil {
		return "", err
	}
	if k.serves {
		return text, nil
	}
	if k.option != nil {
		return "", fmt.Errorf("line %d: plugin kubernetes already has the option %s; add %s by hand, both to the option and to the zones of the plugin", k.option[0].line, option, Zone)
	}
	ending := endingOf(text)
	zone, note := "", mark
	if !slices.ContainsFunc(k.zones, isZone) {
		zone, note = " "+Zone, markZone
	}
	last := k.zones[len(k.zones)-1].end
	indent := indentOf(text, k.name.start)
	if k.open == nil {
		if zone == "" {
			return "", fmt.Errorf("line %d: plugin kubernetes has %s but no block; add a block with %q", k.name.line, Zone, option+" "+Zone)
		}
		return text[:last] + block(ending, indent) + text[last:], nil
	}
	if k.next.line == k.open.line || k.open.start == last {
		return "", fmt.Errorf("line %d: plugin kubernetes: want a space before the opening brace, and nothing after it on its line", k.open.line)
	}
	begin := k.open.end + strings.IndexByte(text[k.open.end:], '\n') + 1
	inner := indent + "    "
	if k.next.text != "}" {
		inner = indentOf(text, k.next.start)
	}
	line := inner + option + " " + Zone + " " + note + ending
	return text[:last] + zone + text[last:begin] + line + text[begin:], nil
}

// block returns the block that Add writes, after the zones, if the plugin "kubernetes" has no
// block.
func block(ending, indent string) string {
	return " " + Zone + " {" + ending + indent + "    " + option + " " + Zone + " " + markBlock + ending + indent + "}"
}

// Remove returns the Corefile without the changes of Add. It returns text unchanged if there are
// none.
func Remove(text string) (string, error) {
	text, err := removeDenial(text)
	if err != nil {
		return "", err
	}
	if !Marked(text) {
		return text, nil
	}
	k, err := find(text)
	if err != nil {
		return "", err
	}
	if k.option == nil || !strings.Contains(lineOf(text, k.option[0].start), mark) {
		return "", fmt.Errorf("the comment %q is not on the line of plugin kubernetes with the option %s for %s", mark, option, Zone)
	}
	first, last := k.option[0], k.option[len(k.option)-1]
	if len(k.option) != 2 || !isZone(last) {
		return "", fmt.Errorf("line %d: the zones of the option %s were changed; remove %s by hand", first.line, option, Zone)
	}
	begin := strings.LastIndexByte(text[:first.start], '\n') + 1
	if strings.TrimSpace(text[begin:first.start]) != "" || k.after.line == last.line {
		return "", fmt.Errorf("line %d: want nothing but the option %s on its line", first.line, option)
	}
	end := last.end + strings.IndexByte(text[last.end:], '\n') + 1
	note := strings.TrimSpace(text[last.end:end])
	if note == mark {
		return text[:begin] + text[end:], nil
	}
	if note != markZone && note != markBlock {
		return "", fmt.Errorf("line %d: the comment of isthmus install was changed; remove %s by hand", first.line, Zone)
	}
	i := slices.IndexFunc(k.zones, isZone)
	if i < 1 {
		return "", fmt.Errorf("line %d: plugin kubernetes: want %s among its zones, but not first", k.name.line, Zone)
	}
	before, zone := k.zones[i-1], k.zones[i]
	if note == markBlock && i == len(k.zones)-1 {
		for _, ending := range []string{"\n", "\r\n"} {
			if rest, ok := strings.CutPrefix(text[before.end:], block(ending, indentOf(text, k.name.start))); ok {
				return text[:before.end] + rest, nil
			}
		}
	}
	return text[:before.end] + text[zone.end:begin] + text[end:], nil
}

// Marked reports whether Add has changed the text.
func Marked(text string) bool { return strings.Contains(text, mark) }

// Serves reports whether CoreDNS answers for the zone.
func Serves(text string) (bool, error) {
	k, err := find(text)
	return err == nil && k.serves, err
}

// Multicluster reports whether a Corefile has the option multicluster, for any zone. A CoreDNS with
// that option needs ServiceImports. Any word that equals the option's name counts.
func Multicluster(text string) bool {
	tokens, err := lex(text)
	return err != nil && strings.Contains(text, option) || slices.ContainsFunc(tokens, func(t token) bool { return t.text == option })
}

// A plugin has the tokens of the plugin "kubernetes", in the server block that answers for Zone.
type plugin struct {
	name   token
	zones  []token
	open   *token // opening brace; nil: no block
	next   token  // the token after open
	option []token
	after  token // the token after option
	serves bool
}

// find finds the plugin "kubernetes" of the server that answers for Zone.
func find(text string) (plugin, error) {
	servers, err := parse(text)
	if err != nil {
		return plugin{}, err
	}
	s, err := serverFor(servers)
	if err != nil {
		return plugin{}, err
	}
	var found []plugin
	for _, d := range s.directives {
		if d[0].text == "import" && slices.ContainsFunc(servers, func(other server) bool { return other.snippet(d) && other.has("kubernetes") }) {
			return plugin{}, fmt.Errorf("line %d: plugin kubernetes is in a snippet", d[0].line)
		}
		if d[0].text == "kubernetes" {
			k, err := readPlugin(d)
			if err != nil {
				return plugin{}, err
			}
			found = append(found, k)
		}
	}
	if len(found) != 1 {
		return plugin{}, fmt.Errorf("line %d: want plugin kubernetes once in the server block that answers for %s, not %d times", s.line, Zone, len(found))
	}
	return found[0], nil
}

func readPlugin(d []token) (plugin, error) {
	k := plugin{name: d[0]}
	rest := d[1:]
	for len(rest) > 0 && rest[0].text != "{" {
		k.zones, rest = append(k.zones, rest[0]), rest[1:]
	}
	if len(k.zones) == 0 {
		return k, fmt.Errorf("line %d: plugin kubernetes names no zones; want those of its server block after its name", k.name.line)
	}
	if len(rest) == 0 {
		return k, nil
	}
	k.open, k.next = &rest[0], rest[1]
	rest = rest[1:]
	for _, line := range linesOf(rest) {
		if rest = rest[len(line):]; line[0].text == option {
			if k.option != nil {
				return k, fmt.Errorf("line %d: %s appears twice", line[0].line, option)
			}
			k.option, k.after = line, rest[0]
		}
	}
	k.serves = slices.ContainsFunc(k.zones, isZone) && slices.ContainsFunc(k.option, isZone)
	return k, nil
}

// linesOf splits the content of a block into lines. rest begins after the opening brace. The
// result omits the closing brace.
func linesOf(rest []token) (all [][]token) {
	for len(rest) > 1 {
		n := 1
		for n < len(rest)-1 && rest[n].line == rest[0].line {
			n++
		}
		all, rest = append(all, rest[:n]), rest[n:]
	}
	return all
}

// isZone reports whether a token is Zone. It compares names as CoreDNS does.
func isZone(t token) bool { return strings.TrimSuffix(strings.ToLower(t.text), ".") == Zone }

// serverFor returns the server that CoreDNS uses for Zone: the server whose zone is the longest
// suffix of Zone.
func serverFor(servers []server) (server, error) {
	port, err := portOf(servers)
	if err != nil {
		return server{}, err
	}
	var best []server
	length := 0
	for _, s := range servers {
		n := -1
		for _, key := range s.keys {
			if host, p := address(key); p == port && covers(host) {
				n = max(n, len(host))
			}
		}
		if n > length {
			best, length = nil, n
		}
		if n == length {
			best = append(best, s)
		}
	}
	switch len(best) {
	case 0:
		return server{}, fmt.Errorf("no server block answers for %s; want one for the zone `.`", Zone)
	case 1:
		return best[0], nil
	}
	return server{}, fmt.Errorf("line %d, line %d: two server blocks answer for %s", best[0].line, best[1].line, Zone)
}

// portOf returns the port of the servers that pods use: 53, or another port if all servers have
// that port.
func portOf(servers []server) (string, error) {
	var ports []string
	for _, s := range servers {
		for _, key := range s.keys {
			if _, port := address(key); port != "" && !slices.Contains(ports, port) {
				ports = append(ports, port)
			}
		}
	}
	switch {
	case len(ports) == 1:
		return ports[0], nil
	case len(ports) == 0 || slices.Contains(ports, "53"):
		return "53", nil
	}
	return "", fmt.Errorf("server blocks have the ports %s, and it is unknown which one pods use", strings.Join(ports, ", "))
}

// address returns the zone and the port of a server's key. The port is empty if the server is not
// plain DNS.
func address(key string) (host, port string) {
	scheme, rest, found := strings.Cut(key, "://")
	if strings.HasPrefix(key, "(") {
		return "", "" // a snippet is not a server
	}
	if !found {
		rest = key
	} else if scheme != "dns" {
		return "", ""
	}
	host, port, _ = strings.Cut(rest, ":")
	if port == "" {
		port = "53"
	}
	return strings.Trim(strings.ToLower(host), "."), port
}

// covers reports whether a server for the zone host may answer for Zone: whether host is a suffix
// of Zone.
func covers(host string) bool { return host == "" || host == Zone || strings.HasSuffix(Zone, "."+host) }

// A server is one block of a Corefile.
type server struct {
	keys       []string
	line       int
	directives [][]token // each with its block
}

// parse reads servers in the way github.com/coredns/caddy does (v1.1.4, caddyfile/parse.go). It
// treats import as an ordinary directive and does not read the imported text.
func parse(text string) ([]server, error) {
	tokens, err := lex(text)
	if err != nil {
		return nil, err
	}
	var all []server
	for len(tokens) > 0 {
		if tokens[0].text == "import" {
			if len(tokens) < 2 || tokens[1].line != tokens[0].line {
				return nil, fmt.Errorf("line %d: import without a name", tokens[0].line)
			}
			tokens = tokens[2:]
			continue
		}
		s := server{line: tokens[0].line}
		for another := true; another; tokens = tokens[1:] {
			if len(tokens) == 0 {
				return nil, fmt.Errorf("line %d: want server blocks with names and braces", s.line)
			}
			t := tokens[0]
			if t.text == "{" {
				break
			}
			if t.text == "" || strings.ContainsAny(t.text, "{}") {
				return nil, fmt.Errorf("line %d: %q is not the plain name of a server block", t.line, t.text)
			}
			another = strings.HasSuffix(t.text, ",") || len(tokens) > 1 && tokens[1].line == t.line
			s.keys = append(s.keys, strings.TrimSuffix(t.text, ","))
		}
		if len(s.keys) == 0 || len(tokens) == 0 || tokens[0].text != "{" {
			return nil, fmt.Errorf("line %d: want server blocks with names and braces", s.line)
		}
		if tokens, err = s.read(tokens[1:]); err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// snippet reports whether the block is not a server, but a snippet that the import directive names.
func (s *server) snippet(imports []token) bool {
	return len(imports) > 1 && s.keys[0] == "("+imports[1].text+")"
}

// has reports whether a server has a directive, or imports text that may contain it.
func (s *server) has(directive string) bool {
	return slices.ContainsFunc(s.directives, func(d []token) bool { return d[0].text == directive || d[0].text == "import" })
}

// read reads the directives of a server, and returns the tokens after its closing brace.
func (s *server) read(tokens []token) ([]token, error) {
	for len(tokens) > 0 {
		if tokens[0].text == "}" {
			return tokens[1:], nil
		}
		n, nesting := 1, 0
		for ; n < len(tokens); n++ {
			t := tokens[n]
			if t.text == "{" {
				if nesting == 0 && t.line != tokens[0].line {
					return nil, fmt.Errorf("line %d: want the opening brace on the line of its server block or plugin", t.line)
				}
				nesting++
				continue
			}
			if nesting == 0 && t.line != tokens[n-1].line {
				break
			}
			if t.text == "}" {
				if nesting--; nesting < 0 {
					return nil, fmt.Errorf("line %d: closing brace without an opening one", t.line)
				}
			}
		}
		if nesting > 0 {
			break
		}
		if end := tokens[n-1]; tokens[0].text == "{" || end.text != "}" && slices.ContainsFunc(tokens[:n], func(t token) bool { return t.text == "{" }) {
			return nil, fmt.Errorf("line %d: text after the closing brace", end.line)
		}
		s.directives, tokens = append(s.directives, tokens[:n]), tokens[n:]
	}
	return nil, fmt.Errorf("line %d: the server block has no closing brace", s.line)
}

// A token is one word. start and end are its byte offsets in the text, including quotes.
type token struct {
	text             string
	line, start, end int
}

// lex splits text in the way github.com/coredns/caddy does (v1.1.4, caddyfile/lexer.go), where #
// begins a comment even inside a word. Unlike that lexer, lex returns an error for a word that
// spans several lines.
func lex(text string) (tokens []token, err error) {
	line := 1
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '\n':
			line++
		case c == ' ' || c == '\t' || c == '\r' && strings.HasPrefix(text[i:], "\r\n"):
		case c == '#':
			for i+1 < len(text) && text[i+1] != '\n' {
				i++
			}
		case c == '"':
			end := i + 1
			for end < len(text) && text[end] != '"' {
				if text[end] == '\\' {
					end++
				}
				end++
			}
			if end >= len(text) || strings.Contains(text[i:end], "\n") {
				return nil, fmt.Errorf("line %d: a quoted word does not end on its line", line)
			}
			tokens = append(tokens, token{strings.ReplaceAll(text[i+1:end], `\"`, `"`), line, i, end + 1})
			i = end
		case c < ' ' || c >= 0x7f:
			return nil, fmt.Errorf("line %d: want printable ASCII", line)
		default:
			end := i
			for end < len(text) && text[end] > ' ' && text[end] != '#' && text[end] < 0x7f {
				end++
			}
			tokens = append(tokens, token{text[i:end], line, i, end})
			i = end - 1
		}
	}
	if len(tokens) == 0 {
		return nil, errors.New("it is empty")
	}
	return tokens, nil
}

func endingOf(text string) string {
	if strings.Contains(text, "\r\n") {
		return "\r\n"
	}
	return "\n"
}

// indentOf returns the white space before a word, or "" if the word is not the first of its line.
func indentOf(text string, start int) string {
	before := text[strings.LastIndexByte(text[:start], '\n')+1 : start]
	if strings.TrimSpace(before) != "" {
		return ""
	}
	return before
}

func lineOf(text string, offset int) string {
	line, _, _ := strings.Cut(text[strings.LastIndexByte(text[:offset], '\n')+1:], "\n")
	return line
}
