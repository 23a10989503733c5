package chart

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/deploy"
)

// A schema is one schema object in values.schema.json, a file that Helm reads as well. Its fields
// are all keywords of JSON Schema that the file uses.
type schema struct {
	Type                 any                `json:"type"` // a name, or a list of names
	Properties           map[string]*schema `json:"properties"`
	AdditionalProperties *bool              `json:"additionalProperties"`
	Items                *schema            `json:"items"`
	Enum                 []any              `json:"enum"`
	Pattern              string             `json:"pattern"`
	Minimum              *float64           `json:"minimum"`
	Maximum              *float64           `json:"maximum"`
	// Description follows the word "want" in error messages.
	Description string `json:"description"`

	Schema     string `json:"$schema"`
	Title      string `json:"title"`
	Deprecated bool   `json:"deprecated"`
}

func readSchema() (*schema, error) {
	text, err := deploy.Chart.ReadFile(root + "/values.schema.json")
	if err != nil {
		return nil, err
	}
	s, d := new(schema), json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields() // an unknown keyword would be ignored silently
	if err := d.Decode(s); err != nil {
		return nil, fmt.Errorf("values.schema.json: %w", err)
	}
	return s, nil
}

// kinds maps JSON Schema types to the words in messages.
var kinds = map[any]string{"string": "text", "integer": "a number", "number": "a number", "boolean": "true or false", "array": "a list", "object": "an object"}

func kindOf(value any) string {
	switch value.(type) {
	case Values:
		return kinds["object"]
	case []any, []string:
		return kinds["array"]
	case bool:
		return kinds["boolean"]
	case float64, int, int32, int64:
		return kinds["number"]
	}
	return kinds["string"]
}

// check returns an error for each value that the schema does not allow. path locates the value in
// messages, and is empty for the root. A null removes a value and is always valid.
func (s *schema) check(value any, path string) error {
	if value == nil {
		return nil
	}
	wrong := func(want string) error { return fmt.Errorf("value %s: want %s", path, cmp.Or(s.Description, want)) }
	types, several := s.Type.([]any)
	if !several && s.Type != nil {
		types = []any{s.Type}
	}
	kind := kindOf(value)
	if len(types) > 0 && !slices.ContainsFunc(types, func(t any) bool { return kinds[t] == kind }) {
		return wrong(kinds[types[0]])
	}
	if len(s.Enum) > 0 && !slices.ContainsFunc(s.Enum, func(one any) bool { return reflect.DeepEqual(one, value) }) {
		return wrong(fmt.Sprintf("one of %q", s.Enum))
	}
	switch v := value.(type) {
	case Values:
		return s.checkObject(v, path)
	case []string:
		return s.checkList(anys(v), path)
	case []any:
		return s.checkList(v, path)
	case string:
		if s.Pattern == "" {
			return nil
		}
		if ok, err := regexp.MatchString(s.Pattern, v); err != nil || !ok {
			return errors.Join(err, wrong("text that matches "+s.Pattern))
		}
	case float64:
		return s.checkNumber(v, slices.Contains(types, any("integer")), wrong)
	default:
		if kind == kinds["number"] {
			return s.checkNumber(float64(number(value)), false, wrong)
		}
	}
	return nil
}

func anys(texts []string) []any {
	all := make([]any, len(texts))
	for i, text := range texts {
		all[i] = text
	}
	return all
}

func (s *schema) checkNumber(v float64, whole bool, wrong func(string) error) error {
	low, high := math.Inf(-1), math.Inf(1)
	if s.Minimum != nil {
		low = *s.Minimum
	}
	if s.Maximum != nil {
		high = *s.Maximum
	}
	switch {
	case whole && v != math.Trunc(v):
		return wrong("a whole number")
	case low <= v && v <= high:
		return nil
	case math.IsInf(high, 1):
		return wrong(fmt.Sprintf("a number from %v upwards", low))
	}
	return wrong(fmt.Sprintf("a number from %v to %v", low, high))
}

func (s *schema) checkObject(v Values, path string) error {
	var wrong []error
	for _, key := range slices.Sorted(maps.Keys(v)) {
		name := strings.TrimPrefix(path+"."+key, ".")
		if below, known := s.Properties[key]; known {
			wrong = append(wrong, below.check(v[key], name))
		} else if s.AdditionalProperties != nil && !*s.AdditionalProperties {
			// Without an error, a misspelt name would be ignored.
			wrong = append(wrong, fmt.Errorf("value %s: the chart has no such value; `isthmus install --print-values` lists them", name))
		}
	}
	return errors.Join(wrong...)
}

func (s *schema) checkList(v []any, path string) error {
	var wrong []error
	for i, one := range v {
		if s.Items != nil {
			wrong = append(wrong, s.Items.check(one, fmt.Sprintf("%s[%d]", path, i)))
		}
	}
	return errors.Join(wrong...)
}

// checkNetworks checks the complete values for errors that no pattern detects: networks with host
// bits, overlapping networks of this cluster, and ports above 65535. With such values managers and
// gateways would exit at once.
func checkNetworks(values Values) error {
	var wrong []error
	own := map[string]netip.Prefix{}
	read := func(name, text string) {
		p, err := netip.ParsePrefix(text)
		switch {
		case text == "":
		case err != nil:
			wrong = append(wrong, fmt.Errorf("value %s: want a network such as 10.244.0.0/16", name))
		case p != p.Masked():
			wrong = append(wrong, fmt.Errorf("value %s: %v has host bits set; want %v", name, p, p.Masked()))
		default:
			for _, other := range slices.Sorted(maps.Keys(own)) {
				if p.Overlaps(own[other]) {
					wrong = append(wrong, fmt.Errorf("value %s: %v overlaps %s, %v; want networks that do not overlap", name, p, other, own[other]))
				}
			}
			if !strings.HasSuffix(name, "]") {
				own[name] = p
			}
		}
	}
	for _, key := range []string{"pools", "reserved"} {
		list, _ := Get(values, "networks", key).([]any)
		for i, one := range list {
			read(fmt.Sprintf("networks.%s[%d]", key, i), fmt.Sprint(one))
		}
	}
	for _, key := range []string{"podCIDR", "serviceCIDR", "externalCIDR"} {
		text, _ := Get(values, "networks", key).(string)
		read("networks."+key, text)
	}
	tunnels := number(Get(values, "gateway", "tunnels"))
	for _, path := range [][]string{{"gateway", "port"}, {"gateway", "service", "nodePort"}} {
		if first := number(Get(values, path...)); first > 0 && first+tunnels-1 > math.MaxUint16 {
			wrong = append(wrong, fmt.Errorf("value %s: want a lower port, because the last of %d tunnels would exceed 65535", strings.Join(path, "."), tunnels))
		}
	}
	return errors.Join(wrong...)
}
