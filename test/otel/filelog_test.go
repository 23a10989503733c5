// Package otel tests that an OpenTelemetry collector can read the flow log with the configuration
// in docs/capture.md.
package otel

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/open-telemetry/opentelemetry-collector-contrib/receiver/filelogreceiver"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/receiver/receivertest"
	"gopkg.in/yaml.v3"
)

const (
	page = "../../docs/capture.md"
	// lines is a flow log written by the gateway's own test.
	lines = "../../gateway/testdata/flows.json"
)

// receivers returns the receivers in the configuration of the page.
func receivers(t *testing.T) map[string]any {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```yaml\n(# OpenTelemetry collector\n.*?)```").FindSubmatch(text)
	if m == nil {
		t.Fatal("the page has no configuration of a collector")
	}
	var config struct{ Receivers map[string]any }
	if err := yaml.Unmarshal(m[1], &config); err != nil {
		t.Fatal(err)
	}
	return config.Receivers
}

// read starts the receiver as a collector does. It returns the attributes and times of the records
// from a file, as soon as there are want records.
func read(t *testing.T, config any, file string, want int) (all []map[string]any, times []time.Time) {
	t.Helper()
	factory := filelogreceiver.NewFactory()
	c := factory.CreateDefaultConfig()
	settings := config.(map[string]any)
	settings["include"] = []any{file}
	settings["poll_interval"] = "20ms"
	if err := confmap.NewFromStringMap(settings).Unmarshal(c); err != nil {
		t.Fatal(err)
	}
	sink := new(consumertest.LogsSink)
	r, err := factory.CreateLogs(context.Background(), receivertest.NewNopSettings(factory.Type()), c, sink)
	if err != nil {
		t.Fatal(err)
	}
	var host component.Host = componenttest.NewNopHost()
	if err := r.Start(context.Background(), host); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); sink.LogRecordCount() < want && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	if err := r.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	for _, logs := range sink.AllLogs() {
		for _, resource := range logs.ResourceLogs().All() {
			for _, scope := range resource.ScopeLogs().All() {
				for _, record := range scope.LogRecords().All() {
					attributes := record.Attributes().AsRaw()
					maps.Copy(attributes, resource.Resource().Attributes().AsRaw())
					all, times = append(all, attributes), append(times, record.Timestamp().AsTime())
				}
			}
		}
	}
	return all, times
}

// Each line must become a record with its fields as attributes and its own time. From a Pod's
// log, the collector keeps only lines of the flow log, and adds the name of the Pod.
func TestACollectorReadsTheFlowLog(t *testing.T) {
	text, err := os.ReadFile(lines)
	if err != nil {
		t.Fatal(err)
	}
	written := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(written) < 4 {
		t.Fatalf("%d lines", len(written))
	}
	var log strings.Builder // in containerd's format
	for i, line := range written {
		fmt.Fprintf(&log, "2026-11-23T10:00:0%d.123456789Z stdout F {\"time\":\"2026-11-23T10:00:00Z\",\"level\":\"INFO\",\"msg\":\"something else\"}\n", i)
		fmt.Fprintf(&log, "2026-11-23T10:00:0%d.123456789Z stdout F %s\n", i, line)
	}
	for name, c := range map[string]struct{ file, content string }{
		"filelog/file": {"flows.json", string(text)},
		"filelog/pod":  {"isthmus-system_isthmus-gateway-0_0a1b2c3d-0000-4000-8000-000000000000/gateway/0.log", log.String()},
	} {
		t.Run(name, func(t *testing.T) {
			config := receivers(t)[name]
			if config == nil {
				t.Fatal("not on the page")
			}
			file := filepath.Join(t.TempDir(), c.file)
			if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(c.content), 0o600); err != nil {
				t.Fatal(err)
			}
			got, times := read(t, config, file, len(written))
			if len(got) != len(written) {
				t.Fatalf("%d records of %d lines: %v", len(got), len(written), got)
			}
			for i, line := range written {
				var want map[string]any
				if err := json.Unmarshal([]byte(line), &want); err != nil {
					t.Fatal(err)
				}
				for key, value := range want {
					if fmt.Sprint(got[i][key]) != fmt.Sprint(value) {
						t.Errorf("%s\nattribute %s is %v", line, key, got[i][key])
					}
				}
				if at, err := time.Parse(time.RFC3339Nano, want["time"].(string)); err != nil || !times[i].Equal(at) {
					t.Errorf("%s\nat %v (%v)", line, times[i], err)
				}
				if pod := got[i]["k8s.pod.name"]; name == "filelog/pod" && pod != "isthmus-gateway-0" {
					t.Errorf("of Pod %v", pod)
				}
			}
		})
	}
}
