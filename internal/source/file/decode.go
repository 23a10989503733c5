package file

import (
	"bytes"
	stdjson "encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/json"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// loader collects the objects in the files of one directory.
type loader struct {
	gateways []gatewayObject
	unread   bool // a file could not be read, and it may contain the Gateway
	peers    []fabric.Peer
	mappings []fabric.MappingSet
	seen     map[fabric.Origin]string // Origin of an object, without File → the file that defines the object
	problems []fabric.Problem
}

type gatewayObject struct {
	origin fabric.Origin
	file   GatewayFile
}

func (l *loader) problem(origin fabric.Origin, field, format string, args ...any) {
	l.problems = append(l.problems, fabric.Problem{Origin: origin, Field: field, Message: fmt.Sprintf(format, args...)})
}

// file reads all documents of one file. JSON files have their own decoder, because the YAML decoder
// rejects the surrogate pairs of JSON.
func (l *loader) file(name string, data []byte) {
	origin := fabric.Origin{File: name}
	// An editor or a full disk can leave an empty file. If it counted as valid, the peers in it
	// would be removed.
	if len(bytes.TrimSpace(data)) == 0 {
		l.problem(origin, "", "is empty; want an object or a comment, or delete the file")
		return
	}
	if stdjson.Valid(data) {
		l.object(origin, "", data)
		return
	}
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	decoder.SetStrict(true) // a duplicate key is an error
	for n := 1; ; n++ {
		var value any
		err := decoder.Decode(&value)
		switch broken := (*yaml.TypeError)(nil); {
		case errors.Is(err, io.EOF):
			return
		case errors.As(err, &broken): // only this document is lost; the next document can still be read
			for _, text := range broken.Errors {
				l.yamlProblem(origin, text)
			}
			continue
		case err != nil:
			l.yamlProblem(origin, err.Error())
			return
		case value == nil:
			continue // an empty document, or only comments
		}
		position := ""
		if n > 1 {
			position = fmt.Sprintf("document %d", n)
		}
		if value, err = jsonValue(value); err != nil {
			l.problem(origin, position, "%v", err)
			continue
		}
		raw, err := stdjson.Marshal(value)
		if err != nil {
			l.problem(origin, position, "%v", err)
			continue
		}
		l.object(origin, position, raw)
	}
}

var yamlLine = regexp.MustCompile(`^(?:yaml: )?(?:line (\d+): )?`)

// yamlProblem reports an error of the YAML decoder with its line.
func (l *loader) yamlProblem(origin fabric.Origin, text string) {
	match := yamlLine.FindStringSubmatch(text)
	message := printable(text[len(match[0]):])
	line, _ := strconv.Atoi(match[1])
	// In grammar errors, the decoder counts lines from zero and omits line zero. In all other
	// errors, it counts lines from one (go.yaml.in/yaml/v2 v2.4.4, decode.go, fail).
	if line == 0 || slices.ContainsFunc(grammarErrors, func(s string) bool { return strings.HasPrefix(message, s) }) {
		line++
	}
	l.problem(origin, fmt.Sprintf("line %d", line), "%s", message)
	l.unread = true
}

var grammarErrors = []string{
	"did not find expected <",
	"did not find expected node content",
	"did not find expected key",
	"did not find expected '-' indicator",
	"did not find expected ',' or",
}

// jsonValue converts a value from the YAML decoder into a value that encoding/json can marshal.
func jsonValue(v any) (any, error) {
	switch v := v.(type) {
	case map[any]any:
		object := make(map[string]any, len(v))
		for key, value := range v {
			name, ok := key.(string)
			if !ok {
				return nil, fmt.Errorf("the key %v is not a string; want it in quotes", key)
			}
			value, err := jsonValue(value)
			if err != nil {
				return nil, err
			}
			object[name] = value
		}
		return object, nil
	case []any:
		for i := range v {
			value, err := jsonValue(v[i])
			if err != nil {
				return nil, err
			}
			v[i] = value
		}
		return v, nil
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return nil, errors.New("a number is infinite or NaN; want a finite one")
		}
	}
	return v, nil
}

// object reads one object, or each object of a List. position is the object's position in the file.
// Problems contain it until the object's name is known.
func (l *loader) object(origin fabric.Origin, position string, raw []byte) {
	var head struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Metadata   struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
		} `json:"metadata"`
		Items []stdjson.RawMessage `json:"items"`
	}
	if err := json.UnmarshalCaseSensitivePreserveInts(raw, &head); err != nil {
		l.decodeProblem(origin, position, err)
		return
	}
	type kind struct{ apiVersion, kind string }
	key := kind{head.APIVersion, head.Kind}
	if key == (kind{"v1", "List"}) {
		for i, item := range head.Items {
			l.object(origin, strings.TrimSpace(fmt.Sprintf("%s items[%d]", position, i)), item)
		}
		return
	}
	origin.Kind, origin.Namespace, origin.Name = printable(head.Kind), printable(head.Metadata.Namespace), printable(head.Metadata.Name)
	if origin.Name != "" {
		position = ""
	}
	switch key {
	case kind{GatewayAPIVersion, GatewayKind}:
		l.gateway(fabric.Origin{File: origin.File, Kind: GatewayKind}, raw)
	case kind{v1alpha1.GroupVersion.String(), "TunnelEndpoint"}:
		if l.first(origin, position) {
			l.tunnelEndpoint(origin, raw)
		}
	case kind{v1alpha1.GroupVersion.String(), "NatMapping"}:
		if l.first(origin, position) {
			l.natMapping(origin, raw)
		}
	default:
		l.problem(origin, position, "is of kind %q, apiVersion %q; want TunnelEndpoint or NatMapping (%s), Gateway (%s), or a List (v1) of them",
			cut(head.Kind), cut(head.APIVersion), v1alpha1.GroupVersion, GatewayAPIVersion)
	}
}

// first returns true if an object has a name and no earlier object has the same name. Otherwise it
// records a problem.
func (l *loader) first(origin fabric.Origin, position string) bool {
	if origin.Name == "" {
		l.problem(origin, strings.TrimSpace(position+" metadata.name"), "is empty; want the name of the object")
		return false
	}
	key := origin
	key.File = ""
	if other, again := l.seen[key]; again {
		l.problem(origin, "", "is also in %s; want each object once", other)
		return false
	}
	l.seen[key] = origin.File
	return true
}

// tunnelEndpoint reads one TunnelEndpoint. It ignores the status and the fields that an API
// server adds, even if their values are invalid.
func (l *loader) tunnelEndpoint(origin fabric.Origin, raw []byte) {
	var object struct {
		Metadata struct {
			CreationTimestamp *string `json:"creationTimestamp"`
		} `json:"metadata"`
		Spec v1alpha1.TunnelEndpointSpec `json:"spec"`
	}
	if !l.decode(origin, raw, &object) {
		return
	}
	te := v1alpha1.TunnelEndpoint{Spec: object.Spec}
	if created := object.Metadata.CreationTimestamp; created != nil {
		t, err := time.Parse(time.RFC3339, *created)
		if err != nil {
			l.problem(origin, "metadata.creationTimestamp", "is not a time; want one such as 2026-11-20T09:30:00Z")
			return
		}
		te.CreationTimestamp = metav1.NewTime(t)
	}
	peer, problems := fabric.PeerFrom(&te, origin)
	if len(problems) > 0 {
		l.problems = append(l.problems, problems...)
		return
	}
	l.peers = append(l.peers, peer)
}

func (l *loader) natMapping(origin fabric.Origin, raw []byte) {
	var object struct {
		Spec v1alpha1.NatMappingSpec `json:"spec"`
	}
	if !l.decode(origin, raw, &object) {
		return
	}
	id, mappings, problems := fabric.MappingsFrom(&v1alpha1.NatMapping{Spec: object.Spec}, origin)
	l.problems = append(l.problems, problems...)
	if id != "" {
		l.mappings = append(l.mappings, fabric.MappingSet{ID: id, Mappings: mappings, Origin: origin})
	}
}

// decode parses raw into v. Names of fields are case-sensitive, as in an API server. Unknown fields
// are accepted, because later versions of Liqo may add fields. Duplicate fields are rejected.
func (l *loader) decode(origin fabric.Origin, raw []byte, v any) bool {
	duplicates, err := json.UnmarshalStrict(raw, v, json.DisallowDuplicateFields)
	if err != nil {
		l.decodeProblem(origin, "", err)
		return false
	}
	return !l.strictProblems(origin, duplicates)
}

// strictProblems records a problem for each unknown or duplicate field. It returns false if
// there are none.
func (l *loader) strictProblems(origin fabric.Origin, errs []error) bool {
	for _, err := range errs {
		field, what := "", printable(err.Error())
		if f := json.FieldError(nil); errors.As(err, &f) {
			field = printable(f.FieldPath())
			what, _, _ = strings.Cut(what, " \"")
		}
		switch what {
		case "unknown field":
			what = "is not a field of this kind; want it removed or spelled as documented"
		case "duplicate field":
			what = "appears twice; want it once"
		}
		l.problem(origin, field, "%s", what)
	}
	return len(errs) > 0
}

// decodeProblem records an error of the JSON decoder. The problem never quotes a value, because
// a user may have put a key into the wrong field.
func (l *loader) decodeProblem(origin fabric.Origin, position string, err error) {
	var wrong *stdjson.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		l.problem(origin, position, "%s", printable(err.Error()))
		return
	}
	found, _, _ := strings.Cut(wrong.Value, " ") // "number 70000" → "number"
	want := "an object"
	switch wrong.Type.Kind() {
	case reflect.String:
		want = "a string; put numbers, true and false in quotes"
	case reflect.Slice:
		want = "a list"
	}
	l.problem(origin, strings.TrimSpace(position+" "+printable(wrong.Field)), "is of type %s; want %s", found, want)
}

// printable makes a string from a file safe to print. It returns short, plain strings unchanged,
// and quotes and shortens all others.
func printable(s string) string {
	plain := utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
	if short := cut(s); !plain || short != s {
		return strconv.Quote(short)
	}
	return s
}

// cut shortens a string to the maximum length of a Kubernetes name.
func cut(s string) string {
	const limit = 253
	if len(s) > limit {
		return s[:limit] + "..."
	}
	return s
}
