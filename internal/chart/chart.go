// Package chart renders the chart of Isthmus (deploy/chart/isthmus) without Helm, so that
// `isthmus install` and `helm install` create the same objects from one source. It implements
// only the parts of Helm's templates that this chart uses. test/helm compares the results with
// Helm's.
package chart

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"text/template"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/deploy"
)

// Values are the input of a chart: the content of values.yaml, or a user's changes to it.
type Values = map[string]any

// Options control the rendering.
type Options struct {
	Namespace string
	// AppVersion is the tag of the image, unless Values set a tag.
	AppVersion string
	// Values take precedence over those of values.yaml. Maps are merged field by field; lists are
	// replaced.
	Values Values
}

const root = "chart/isthmus"

// Defaults returns the values of values.yaml.
func Defaults() (Values, error) {
	text, err := deploy.Chart.ReadFile(root + "/values.yaml")
	if err != nil {
		return nil, err
	}
	return ParseValues(text)
}

// ParseValues parses a file in the format of values.yaml.
func ParseValues(text []byte) (Values, error) {
	values := Values{}
	if err := yaml.UnmarshalStrict(text, &values); err != nil {
		return nil, err
	}
	return values, nil
}

// Set sets one value by the keys of its path, such as gateway.replicas.
func Set(values Values, value any, keys ...string) {
	for _, key := range keys[:len(keys)-1] {
		next, ok := values[key].(Values)
		if !ok {
			next = Values{}
			values[key] = next
		}
		values = next
	}
	values[keys[len(keys)-1]] = value
}

// Get returns one value by the keys of its path, or nil if it does not exist.
func Get(values Values, keys ...string) any {
	for _, key := range keys[:len(keys)-1] {
		values, _ = values[key].(Values)
	}
	return values[keys[len(keys)-1]]
}

// Merge returns base with the changes in overrides. A null in overrides removes a value. Merge
// changes neither argument.
func Merge(base, overrides Values) Values {
	merged := maps.Clone(base)
	if merged == nil {
		merged = Values{}
	}
	for key, value := range overrides {
		inner, isMap := value.(Values)
		below, wasMap := merged[key].(Values)
		switch {
		case isMap && wasMap:
			merged[key] = Merge(below, inner)
		case value == nil:
			delete(merged, key)
		default:
			merged[key] = value
		}
	}
	return merged
}

// Render returns the manifests as text, each under its file name, in the order of the names.
func Render(o Options) (string, error) {
	defaults, err := Defaults()
	if err != nil {
		return "", err
	}
	known, err := readSchema()
	if err != nil {
		return "", err
	}
	if err := known.check(o.Values, ""); err != nil {
		return "", err
	}
	values := Merge(defaults, o.Values)
	if err := checkNetworks(values); err != nil {
		return "", err
	}
	names, err := fs.Glob(deploy.Chart, root+"/templates/*")
	if err != nil {
		return "", err
	}
	all := template.New("chart").Option("missingkey=error")
	all.Funcs(functions(all))
	for _, name := range names {
		text, err := deploy.Chart.ReadFile(name)
		if err != nil {
			return "", err
		}
		if _, err := all.New(path.Base(name)).Parse(string(text)); err != nil {
			return "", err
		}
	}
	data := map[string]any{
		"Values":  values,
		"Release": map[string]any{"Name": "isthmus", "Namespace": o.Namespace},
		"Chart":   map[string]any{"Name": "isthmus", "AppVersion": o.AppVersion},
		"Files":   files{},
	}
	var out strings.Builder
	for _, name := range names {
		if path.Ext(name) != ".yaml" {
			continue
		}
		var text bytes.Buffer
		if err := all.ExecuteTemplate(&text, path.Base(name), data); err != nil {
			return "", readable(err)
		}
		if strings.TrimSpace(text.String()) != "" {
			fmt.Fprintf(&out, "---\n# Source: isthmus/templates/%s\n%s\n", path.Base(name), strings.Trim(text.String(), "\n"))
		}
	}
	return out.String(), nil
}

// readable returns errors that the chart itself reports, such as a missing value, without the
// position in the template. It returns other errors unchanged.
func readable(err error) error {
	if wants := (*wantsError)(nil); errors.As(err, &wants) {
		return wants
	}
	return err
}

type wantsError struct{ what string }

func (e *wantsError) Error() string { return e.what }

// A document is a rendered object: its text, and the object parsed from it.
type document struct {
	text   string
	object *unstructured.Unstructured
}

// Objects renders the chart and parses the result. It returns objects in the order in which they
// can be applied.
func Objects(o Options) ([]*unstructured.Unstructured, error) {
	documents, err := documents(o)
	all := make([]*unstructured.Unstructured, len(documents))
	for i, d := range documents {
		all[i] = d.object
	}
	return all, err
}

// Manifests returns the objects as text, in an order in which `kubectl apply` succeeds.
func Manifests(o Options) (string, error) {
	documents, err := documents(o)
	var all strings.Builder
	for _, d := range documents {
		all.WriteString("---\n" + d.text + "\n")
	}
	return all.String(), err
}

func documents(o Options) ([]document, error) {
	text, err := Render(o)
	if err != nil {
		return nil, err
	}
	var all []document
	for one := range strings.SplitSeq("\n"+text, "\n---\n") {
		content, err := yaml.YAMLToJSON([]byte(one))
		if err != nil {
			return nil, fmt.Errorf("rendered chart: not YAML: %w", err)
		}
		if string(content) == "null" { // the document has only comments
			continue
		}
		u := &unstructured.Unstructured{}
		if err := u.UnmarshalJSON(content); err != nil { // unlike yaml.Unmarshal, this keeps integers as integers
			return nil, fmt.Errorf("rendered chart: not an object: %w", err)
		}
		if _, hook := u.GetAnnotations()["helm.sh/hook"]; hook {
			continue // only Helm needs hooks: `isthmus uninstall` does their work itself
		}
		all = append(all, document{strings.Trim(one, "\n"), u})
	}
	slices.SortStableFunc(all, func(a, b document) int { return rank(a.object) - rank(b.object) })
	return all, nil
}

// rank returns an object's position in the order of creation, so that an object comes after those
// that it needs. A Pod is not created without its ServiceAccount. A component without its
// permissions or configuration exits with an error. Agents come before gateways, because agents
// accept packets only from gateways that they know.
func rank(u *unstructured.Unstructured) int {
	switch u.GetKind() {
	case "Namespace":
		return 0
	case "CustomResourceDefinition":
		return 1
	case "DaemonSet":
		return 3
	case "Deployment", "Job":
		return 4
	}
	return 2
}

// functions returns the template functions of Helm that the chart uses. They behave as in Helm.
func functions(all *template.Template) template.FuncMap {
	return template.FuncMap{
		"default": func(or, value any) any {
			if empty(value) {
				return or
			}
			return value
		},
		"include": func(name string, data any) (string, error) {
			var b strings.Builder
			err := all.ExecuteTemplate(&b, name, data)
			return b.String(), err
		},
		"nindent": func(n int, text string) string {
			return "\n" + indent(n, text)
		},
		"quote": func(value any) string { return fmt.Sprintf("%q", fmt.Sprint(value)) },
		"replace": func(from, to, text string) string {
			return strings.ReplaceAll(text, from, to)
		},
		"trunc":   func(n int, text string) string { return text[:min(n, len(text))] },
		"trimAll": func(cutset, text string) string { return strings.Trim(text, cutset) },
		"required": func(what string, value any) (any, error) {
			if value == nil || value == "" {
				return nil, &wantsError{what}
			}
			return value, nil
		},
		"fail":   func(what string) (string, error) { return "", &wantsError{what} },
		"hasKey": func(values Values, key string) bool { _, has := values[key]; return has },
		"toYaml": func(value any) (string, error) {
			text, err := yaml.Marshal(value)
			return strings.TrimSuffix(string(text), "\n"), err
		},
		"regexFind": func(expression, text string) (string, error) {
			r, err := regexp.Compile(expression)
			if err != nil {
				return "", err
			}
			return r.FindString(text), nil
		},
		"list": func(values ...any) []any { return values },
		"int":  number,
		"add":  func(a, b any) int64 { return int64(number(a) + number(b)) },
		"until": func(n int) []int {
			up := make([]int, n)
			for i := range up {
				up[i] = i
			}
			return up
		},
	}
}

func indent(n int, text string) string {
	pad := strings.Repeat(" ", n)
	return pad + strings.ReplaceAll(text, "\n", "\n"+pad)
}

func number(value any) int {
	switch n := value.(type) {
	case int:
		return n
	case int32:
		return int(n)
	case int64:
		return int(n)
	case float64:
		return int(n)
	}
	return 0
}

// empty reports whether a value counts as absent in templates.
func empty(value any) bool {
	truth, ok := template.IsTrue(value)
	return !ok || !truth
}

// files gives templates access to the chart's folder files/. Templates call its methods.
type files struct{}

// Get returns the text of a file, or the empty string if there is none.
func (files) Get(name string) string {
	text, err := read(name)
	if err != nil {
		return ""
	}
	return string(text)
}

// Glob returns the files whose names match.
func (files) Glob(pattern string) (map[string][]byte, error) {
	found := map[string][]byte{}
	for _, from := range []fs.FS{deploy.Files, deploy.Optional, deploy.Monitoring} {
		names, err := fs.Glob(from, strings.TrimPrefix(pattern, "files/"))
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			if found["files/"+name], err = fs.ReadFile(from, name); err != nil {
				return nil, err
			}
		}
	}
	return found, nil
}

func read(name string) ([]byte, error) {
	name, ok := strings.CutPrefix(name, "files/")
	if !ok {
		return nil, fs.ErrNotExist
	}
	for _, from := range []fs.FS{deploy.Files, deploy.Optional, deploy.Monitoring} {
		if text, err := fs.ReadFile(from, name); !errors.Is(err, fs.ErrNotExist) {
			return text, err
		}
	}
	return nil, fs.ErrNotExist
}
