package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/internal/source/file"
)

func parse(root, name string) (*ast.File, error) {
	return parser.ParseFile(token.NewFileSet(), filepath.Join(root, filepath.FromSlash(name)), nil, parser.ParseComments|parser.SkipObjectResolution)
}

// line returns a comment as one line of text.
func line(c *ast.CommentGroup) string { return strings.Join(strings.Fields(c.Text()), " ") }

// A constant is a string constant and its comment.
type constant struct {
	name, value, text string
	group             string // the comment above a group of constants, for this constant and those below it
}

// constants returns the constants of a file whose names begin with prefix. A constant's text is the
// comment above it if that begins with the constant's name, and otherwise the comment at the end of
// its line.
func constants(f *ast.File, prefix string) (all []constant) {
	for _, d := range f.Decls {
		gen, ok := d.(*ast.GenDecl)
		if !ok || gen.Tok != token.CONST {
			continue
		}
		group := ""
		for _, s := range gen.Specs {
			v := s.(*ast.ValueSpec)
			name := v.Names[0].Name
			if !strings.HasPrefix(name, prefix) || len(v.Values) != 1 {
				continue
			}
			literal, ok := v.Values[0].(*ast.BasicLit)
			if !ok {
				continue
			}
			value, err := strconv.Unquote(literal.Value)
			if err != nil {
				continue
			}
			c := constant{name: name, value: value, text: line(v.Comment)}
			above := v.Doc
			if !gen.Lparen.IsValid() {
				above = gen.Doc
			}
			switch text := line(above); {
			case strings.HasPrefix(text, name):
				text = strings.TrimPrefix(text, name)
				c.text = strings.TrimLeft(strings.TrimPrefix(text, " is"), ": ")
			case text != "":
				group = text
			}
			c.group = group
			all = append(all, c)
		}
	}
	return all
}

// conditions generates docs/conditions.md.
func conditions(root string) (string, error) {
	ours, err := parse(root, "apis/isthmus/v1alpha1/names.go")
	if err != nil {
		return "", err
	}
	theirs, err := parse(root, "apis/net/v1alpha1/names.go")
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("# Conditions and their reasons\n\n")
	fmt.Fprintf(&b, generated, "apis/*/v1alpha1/names.go")
	b.WriteString("Programs may compare reasons. Messages are for people and may change. [troubleshooting.md](troubleshooting.md) has the remedies.\n\n" +
		"## Peering\n\nWritten by the manager.\n\n")
	table := func(head string, rows []constant) {
		fmt.Fprintf(&b, "| %s | meaning |\n| --- | --- |\n", head)
		for _, c := range rows {
			fmt.Fprintf(&b, "| `%s` | %s |\n", c.value, c.text)
		}
		b.WriteByte('\n')
	}
	table("condition", constants(ours, "Condition"))
	group := ""
	var rows []constant
	flush := func() {
		if len(rows) > 0 {
			title, more, _ := strings.Cut(group, ": ")
			fmt.Fprintf(&b, "### Reasons of %s\n\n", title)
			if more != "" {
				fmt.Fprintf(&b, "%s%s:\n\n", strings.ToUpper(more[:1]), more[1:])
			}
			table("reason", rows)
		}
		rows = nil
	}
	for _, c := range constants(ours, "Reason") {
		if c.group != group {
			flush()
			group = c.group
		}
		rows = append(rows, c)
	}
	flush()
	for _, kind := range []struct{ title, about, condition, reasons string }{
		{"NetworkConfig", "Written by the receiver into its copy of the sender's NetworkConfig.", "ConditionAccepted", "Reason"},
		{"TunnelEndpoint", "Written by the active gateway.", "ConditionConnected", "Cause"},
	} {
		fmt.Fprintf(&b, "## %s\n\n%s\n\n", kind.title, kind.about)
		table("condition", constants(theirs, kind.condition))
		table("reason", constants(theirs, kind.reasons))
	}
	return strings.TrimSuffix(b.String(), "\n"), missing(b.String())
}

// missing returns an error if an entry of a page has no explanation.
func missing(text string) error {
	for l := range strings.Lines(text) {
		if strings.HasSuffix(l, "` |  |\n") {
			return fmt.Errorf("%s has no comment that explains it", strings.Fields(l)[1])
		}
	}
	return nil
}

// gatewayFile generates docs/gateway.yaml.md.
func gatewayFile(root string) (string, error) {
	f, err := parse(root, "internal/source/file/gateway.go")
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("# gateway.yaml\n\n")
	fmt.Fprintf(&b, generated, "internal/source/file")
	b.WriteString("`isthmus gateway --config DIR` reads this object, and beside it the peers' TunnelEndpoints and NatMappings as `kubectl get -o yaml`\n" +
		"prints them. A field that is not in this list is an error. Changes take effect without a restart, unless the log reports that one is needed.\n\n" +
		"| field | type | meaning |\n| --- | --- | --- |\n")
	ast.Inspect(f, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok || spec.Name.Name != "GatewayFile" {
			return true
		}
		for _, field := range spec.Type.(*ast.StructType).Fields.List {
			if field.Tag == nil { // fields without a tag, such as those of NAT, follow below
				continue
			}
			tag, _ := strconv.Unquote(field.Tag.Value)
			name, _, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
			text := line(field.Comment)
			if text == "" {
				text = strings.TrimPrefix(strings.TrimPrefix(line(field.Doc), field.Names[0].Name+" "), "is ")
			}
			var kind string
			switch id, _ := field.Type.(*ast.Ident); id.Name {
			case "string":
				kind = "text"
			case "MTU":
				kind = "number or `auto`"
			default:
				kind = "number"
			}
			text = strings.NewReplacer("GatewayAPIVersion", "`"+file.GatewayAPIVersion+"`", "GatewayKind", "`"+file.GatewayKind+"`").Replace(text)
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", name, kind, text)
		}
		return false
	})
	kinds := map[string]string{"int": "number", "bool": "true or false", "duration": "duration"}
	flags := []string{}
	fields := new(file.NAT).Fields()
	for _, f := range fields {
		flags = append(flags, "--"+f.Flag, "`"+f.Name+"`")
	}
	asFields := strings.NewReplacer(flags...)
	for _, f := range fields {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", f.Name, kinds[f.Value.Type()], asFields.Replace(f.Usage))
	}
	return b.String(), missing(b.String())
}
