// Package helm renders the chart of Isthmus by Helm 3 and 4, and compares the results with those
// of internal/chart.
package helm

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	loader3 "helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	engine3 "helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	loader4 "helm.sh/helm/v4/pkg/chart/v2/loader"
	engine4 "helm.sh/helm/v4/pkg/engine"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/isthmus-net/isthmus/internal/chart"
)

// objects parses manifests. It returns each object as JSON with sorted keys, by its kind and
// name.
func objects(t *testing.T, text string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for decoder := utilyaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096); ; {
		var o map[string]any
		if err := decoder.Decode(&o); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		if len(o) == 0 {
			continue
		}
		meta, _ := o["metadata"].(map[string]any)
		text, err := json.MarshalIndent(o, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		namespace, _ := meta["namespace"].(string)
		all[o["kind"].(string)+" "+namespace+"/"+meta["name"].(string)] = string(text)
	}
}

const folder = "../../deploy/chart/isthmus"

// helms render the chart with values, after a check against the chart's schema.
var helms = map[string]func(values map[string]any) (map[string]string, error){
	"Helm 3": func(values map[string]any) (map[string]string, error) {
		c, err := loader3.Load(folder)
		if err != nil {
			return nil, err
		}
		all, err := chartutil.ToRenderValues(c, values, chartutil.ReleaseOptions{Name: "isthmus", Namespace: "isthmus-system", IsInstall: true}, nil)
		if err != nil {
			return nil, err
		}
		return engine3.Render(c, all)
	},
	"Helm 4": func(values map[string]any) (map[string]string, error) {
		c, err := loader4.Load(folder)
		if err != nil {
			return nil, err
		}
		all, err := util.ToRenderValues(c, values, common.ReleaseOptions{Name: "isthmus", Namespace: "isthmus-system", IsInstall: true}, nil)
		if err != nil {
			return nil, err
		}
		return engine4.Render(c, all)
	},
}

func TestHelmRendersWhatInstallApplies(t *testing.T) {
	files, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil || len(files) < 3 {
		t.Fatalf("%d files with values: %v", len(files), err)
	}
	for version, render := range helms {
		for _, file := range files {
			values, err := chartutil.ReadValuesFile(file)
			if err != nil {
				t.Fatal(err)
			}
			rendered, err := render(values)
			if err != nil {
				t.Fatalf("%s: %s: %v", version, file, err)
			}
			var text bytes.Buffer
			for _, name := range slices.Sorted(maps.Keys(rendered)) {
				if strings.HasSuffix(name, ".yaml") {
					text.WriteString("\n---\n" + rendered[name])
				} else if strings.HasSuffix(name, "NOTES.txt") && !strings.Contains(rendered[name], "isthmus peer --context") {
					t.Errorf("%s: %s: NOTES.txt does not say the next command:\n%s", version, file, rendered[name])
				}
			}
			ours, err := chart.Render(chart.Options{Namespace: "isthmus-system", AppVersion: "0.0.0", Values: values})
			if err != nil {
				t.Fatal(err)
			}
			got, want := objects(t, text.String()), objects(t, ours)
			for _, name := range slices.Sorted(maps.Keys(got)) {
				if got[name] != want[name] {
					t.Errorf("%s: %s by %s:\n%s\nby isthmus install:\n%s", file, name, version, got[name], want[name])
				}
			}
			for name := range want {
				if got[name] == "" {
					t.Errorf("%s: %s does not make %s", file, version, name)
				}
			}
		}
	}
}

func TestHelmRejectsUnknownValues(t *testing.T) {
	for version, render := range helms {
		for _, text := range []string{"gatway: {}", "gateway: {port: 70000}", "gateway: {service: {typ: x}}", "cluster: {name: PARIS}",
			"routeAgent: {maxSurge: 0}", "routeAgent: {maxSurge: 0%}", "routeAgent: {maxSurge: some}"} {
			values, err := chartutil.ReadValues([]byte(text))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := render(values); err == nil {
				t.Errorf("%s admits %s", version, text)
			}
		}
	}
}

// `helm upgrade --reuse-values` replaces the chart's default values by those of the previous
// chart version. Rendering must fail with a message for each value that was renamed since.
func TestHelmExplainsRenamedValues(t *testing.T) {
	const old = "{cluster: {name: paris, configMap: true}, routeAgent: {maxUnavailable: 10%}, gateway: {}, metrics: {}, networkPolicy: {}, crds: {}, workloads: true}"
	c3, err := loader3.Load(folder)
	if err != nil {
		t.Fatal(err)
	}
	if c3.Values, err = chartutil.ReadValues([]byte(old)); err != nil {
		t.Fatal(err)
	}
	all, err := chartutil.ToRenderValues(c3, nil, chartutil.ReleaseOptions{Name: "isthmus", Namespace: "isthmus-system", IsUpgrade: true}, nil)
	if err == nil {
		_, err = engine3.Render(c3, all)
	}
	if err == nil || !strings.Contains(err.Error(), "--reset-then-reuse-values") {
		t.Errorf("Helm 3: %v", err)
	}
	c4, err := loader4.Load(folder)
	if err != nil {
		t.Fatal(err)
	}
	c4.Values = c3.Values
	all4, err := util.ToRenderValues(c4, nil, common.ReleaseOptions{Name: "isthmus", Namespace: "isthmus-system", IsUpgrade: true}, nil)
	if err == nil {
		_, err = engine4.Render(c4, all4)
	}
	if err == nil || !strings.Contains(err.Error(), "--reset-then-reuse-values") {
		t.Errorf("Helm 4: %v", err)
	}
}
