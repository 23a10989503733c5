package crd

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsvalidation "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/objectmeta"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"sigs.k8s.io/yaml"
)

// An object is a custom resource as the API server handles it.
type object = map[string]any

// A server handles objects of one kind as an API server does, from decoding a request to storing
// the object, with the API server's own code. Validation ratcheting is off, so an update is
// validated like a creation, except by rules that use oldSelf.
type server struct {
	crd        *apiextensions.CustomResourceDefinition
	structural *structuralschema.Structural
	schema     validation.SchemaValidator
	rules      *cel.Validator
	subStatus  bool
}

// servers returns a server for each CRD of Liqo's kinds, by kind.
func servers(t *testing.T) map[string]*server {
	t.Helper()
	files, err := filepath.Glob("testdata/crds/net.liqo.io_*.yaml")
	if err != nil || len(files) != 4 {
		t.Fatalf("want the CRDs of four kinds in deploy/crds, found %v, %v", files, err)
	}
	all := map[string]*server{}
	for _, file := range files {
		s := newServer(t, file)
		all[s.crd.Spec.Names.Kind] = s
	}
	return all
}

// ours returns servers for the kinds that Liqo does not have.
func ours(t *testing.T) (all []*server) {
	t.Helper()
	for _, name := range []string{"peerings", "nodenetworks", "networkallocations", "peerservices"} {
		all = append(all, newServer(t, "testdata/crds/isthmus.net_"+name+".yaml"))
	}
	return all
}

func newServer(t *testing.T, file string) *server {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var external apiextensionsv1.CustomResourceDefinition
	if err := yaml.UnmarshalStrict(text, &external); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	apiextensionsv1.SetDefaults_CustomResourceDefinition(&external)
	apiextensionsv1.SetDefaults_CustomResourceDefinitionSpec(&external.Spec)
	external.Status.StoredVersions = []string{"v1alpha1"} // the API server sets this on creation
	crd := &apiextensions.CustomResourceDefinition{}
	if err := apiextensionsv1.Convert_v1_CustomResourceDefinition_To_apiextensions_CustomResourceDefinition(&external, crd, nil); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	// In the internal form, the schema of a single version is at the top level.
	if len(external.Spec.Versions) != 1 || crd.Spec.Validation == nil || crd.Spec.Validation.OpenAPIV3Schema == nil {
		t.Fatalf("%s: want one version with a schema", file)
	}
	schema := crd.Spec.Validation.OpenAPIV3Schema
	structural, err := structuralschema.NewStructural(schema)
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	if errs := structuralschema.ValidateStructural(nil, structural); len(errs) > 0 {
		t.Fatalf("%s: not structural: %v", file, errs.ToAggregate())
	}
	validator, _, err := validation.NewSchemaValidator(schema)
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return &server{
		crd:        crd,
		structural: structural,
		schema:     validator,
		rules:      cel.NewValidator(structural, true, celconfig.PerCallLimit),
		subStatus:  crd.Spec.Subresources != nil && crd.Spec.Subresources.Status != nil,
	}
}

// decode parses an object, drops fields that are not in the schema, and sets defaults. It also
// returns the paths of the dropped fields.
func (s *server) decode(obj object) (object, []string) {
	obj = runtime.DeepCopyJSON(obj)
	dropped := pruning.PruneWithOptions(obj, s.structural, true, structuralschema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true})
	defaulting.PruneNonNullableNullsWithoutDefaults(obj, s.structural)
	defaulting.Default(obj, s.structural)
	return obj, dropped
}

// create handles a POST. It returns the object as it would be stored.
func (s *server) create(obj object) (object, field.ErrorList) {
	obj, _ = s.decode(obj)
	if s.subStatus {
		delete(obj, "status")
	}
	return obj, s.validate(obj, nil)
}

// update handles a PUT on the object.
func (s *server) update(obj, old object) (object, field.ErrorList) {
	obj, _ = s.decode(obj)
	if s.subStatus {
		delete(obj, "status")
		if status, ok := old["status"]; ok {
			obj["status"] = status
		}
	}
	return obj, s.validate(obj, old)
}

// updateStatus handles a PUT on the status subresource.
func (s *server) updateStatus(obj, old object) (object, field.ErrorList) {
	if !s.subStatus {
		return nil, field.ErrorList{field.NotFound(field.NewPath("status"), nil)}
	}
	obj, _ = s.decode(obj)
	stored := runtime.DeepCopyJSON(old)
	delete(stored, "status")
	if status, ok := obj["status"]; ok {
		stored["status"] = status
	}
	return stored, s.validate(stored, old)
}

// put stores an object with its status, with two requests if the kind has a status subresource.
func (s *server) put(obj object) (object, field.ErrorList) {
	stored, errs := s.create(obj)
	if _, ok := obj["status"]; ok && s.subStatus && len(errs) == 0 {
		return s.updateStatus(obj, stored)
	}
	return stored, errs
}

func (s *server) validate(obj, old object) field.ErrorList {
	errs := validation.ValidateCustomResource(nil, obj, s.schema)
	errs = append(errs, objectmeta.Validate(context.Background(), nil, obj, s.structural, false)...)
	errs = append(errs, listtype.ValidateListSetsAndMaps(nil, s.structural, obj)...)
	for _, err := range errs {
		// The API server does not evaluate the rules if the object does not fit the schema.
		switch err.Type {
		case field.ErrorTypeNotSupported, field.ErrorTypeRequired, field.ErrorTypeTooLong, field.ErrorTypeTooMany, field.ErrorTypeTypeInvalid:
			return errs
		}
	}
	var before any // a nil interface, not a nil map, means that there is no old object
	if old != nil {
		before = old
	}
	found, _ := s.rules.Validate(context.Background(), nil, s.structural, obj, before, celconfig.RuntimeCELCostBudget)
	return append(errs, found...)
}

// read parses one YAML document.
func read(t *testing.T, text string) object {
	t.Helper()
	var obj object
	if err := yaml.UnmarshalStrict([]byte(text), &obj); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return obj
}

// goldens returns the documents in testdata/golden, by file name without its extension.
func goldens(t *testing.T) map[string]object {
	t.Helper()
	files, err := filepath.Glob("testdata/golden/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden documents: %v", err)
	}
	all := map[string]object{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimSuffix(filepath.Base(file), ".yaml")] = read(t, string(bytes.TrimSpace(text)))
	}
	return all
}

// The API server estimates the cost of rules from the bounds in the schema. It rejects a CRD whose
// rules could cost too much.
func TestAPIServerAcceptsTheCRDs(t *testing.T) {
	all := ours(t)
	for _, s := range servers(t) {
		all = append(all, s)
	}
	for _, s := range all {
		if errs := apiextensionsvalidation.ValidateCustomResourceDefinition(context.Background(), s.crd); len(errs) > 0 {
			t.Errorf("%s: %v", s.crd.Spec.Names.Kind, strings.ReplaceAll(fmt.Sprint(errs.ToAggregate()), "], [", "\n"))
		}
	}
}
