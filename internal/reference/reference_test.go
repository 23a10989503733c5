package main

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/gateway/flowsync"
	"github.com/isthmus-net/isthmus/internal/metric"
	"github.com/isthmus-net/isthmus/internal/source/kube"
	"github.com/isthmus-net/isthmus/manager"
	"github.com/isthmus-net/isthmus/routeagent"
)

func declared() map[string]*metric.Family {
	all := make(map[string]*metric.Family)
	for _, f := range slices.Concat(metric.Common.Families(), gateway.Families(), kube.Families(), flowsync.Families(), routeagent.Families(), manager.Families()) {
		all[f.Name] = f
	}
	return all
}

func monitoring(t *testing.T, name string) []byte {
	t.Helper()
	text, err := deploy.Monitoring.ReadFile("monitoring/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// test/prometheus parses the expressions with Prometheus's parser. This test only compares names.
func TestAlertsAndDashboardNameOnlyMetricsThatExist(t *testing.T) {
	known := declared()
	word := regexp.MustCompile(`\bisthmus_[a-z_]+`)
	for _, file := range []string{"alerts.yaml", "dashboard.json"} {
		names := word.FindAllString(string(monitoring(t, file)), -1)
		if len(names) < 20 {
			t.Errorf("%s names %d metrics", file, len(names))
		}
		for _, name := range names {
			if known[name] == nil {
				t.Errorf("%s names %s, which nothing serves", file, name)
			}
		}
	}
}

func TestEachAlertHasARunbook(t *testing.T) {
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Expr, For   string
				Labels      map[string]string
				Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal(monitoring(t, "alerts.yaml"), &rules); err != nil {
		t.Fatal(err)
	}
	document, err := os.ReadFile("../../docs/alerts.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			seen++
			if !strings.HasSuffix(r.Annotations["runbook_url"], "/docs/alerts.md#"+strings.ToLower(r.Alert)) {
				t.Errorf("%s: runbook_url %q", r.Alert, r.Annotations["runbook_url"])
			}
			if !strings.Contains(string(document), "\n## "+r.Alert+"\n") {
				t.Errorf("docs/alerts.md has no %s", r.Alert)
			}
			row := fmt.Sprintf("| [%s](#%s) | `%s`, %s |\n", r.Alert, strings.ToLower(r.Alert), r.Expr, strings.Replace(r.For, "m", " min", 1))
			if critical := r.Labels["severity"] == "critical"; critical != strings.Contains(string(document), row) || !critical && strings.Contains(string(document), "| ["+r.Alert+"]") {
				t.Errorf("the table of critical alerts in docs/alerts.md is wrong about %s", r.Alert)
			}
			if r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
				t.Errorf("%s lacks severity, summary or description", r.Alert)
			}
		}
	}
	if headings := strings.Count(string(document), "\n## Isthmus"); headings != seen || seen == 0 {
		t.Errorf("%d alerts, and docs/alerts.md has %d", seen, headings)
	}
}

// Grafana identifies panels by ID and title, and places them by their grid position.
func TestPanelsOfTheDashboardDoNotOverlap(t *testing.T) {
	var d struct {
		Panels []struct {
			ID      int
			Title   string
			GridPos struct{ X, Y, W, H int }
		}
	}
	if err := json.Unmarshal(monitoring(t, "dashboard.json"), &d); err != nil {
		t.Fatal(err)
	}
	ids, cells := map[int]string{}, map[[2]int]string{}
	for _, p := range d.Panels {
		if other, twice := ids[p.ID]; twice {
			t.Errorf("%s and %s have the same ID", p.Title, other)
		}
		ids[p.ID] = p.Title
		if p.GridPos.W < 1 || p.GridPos.H < 1 || p.GridPos.X < 0 || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("%s lies outside", p.Title)
		}
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other, taken := cells[[2]int{x, y}]; taken {
					t.Fatalf("%s lies on %s", p.Title, other)
				}
				cells[[2]int{x, y}] = p.Title
			}
		}
	}
}

func TestUnitMatchesTheMetricName(t *testing.T) {
	for name, want := range map[string]string{
		"isthmus_x_bytes_total": "octets", "isthmus_x_seconds": "seconds", "isthmus_x_timestamp_seconds": "Unix time", "isthmus_x_ratio": "0 to 1", "isthmus_x_total": "",
	} {
		if got := unit(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	for name, f := range declared() {
		if f.Type.String() == "COUNTER" != strings.HasSuffix(name, "_total") {
			t.Errorf("%s is a %s", name, f.Type)
		}
	}
}
