package lab

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// fakeEnv makes this test binary act as a gateway. Its value selects the behavior.
const fakeEnv = "ISTHMUS_LAB_TEST_GATEWAY"

func TestMain(m *testing.M) {
	if behaviour := os.Getenv(fakeEnv); behaviour != "" && len(os.Args) == 4 && os.Args[1] == "gateway" && os.Args[2] == "--config" {
		os.Exit(fakeGateway(behaviour, os.Args[3]))
	}
	firstNetns, _ = nsfsInode("/proc/self/ns/net")
	os.Exit(m.Run())
}

// firstNetns is the network namespace of the main thread before all tests.
var firstNetns uint64

func fakeGateway(behaviour, dir string) int {
	if _, err := os.Stat(filepath.Join(dir, "gateway.yaml")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if behaviour == "broken" {
		fmt.Fprintln(os.Stderr, "peer-b.yaml: the reason why")
		return 1
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	fmt.Fprintln(os.Stderr, "listening")
	var requests atomic.Int32
	http.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if behaviour == "unready" {
			if requests.Add(1) == 5 {
				_ = os.WriteFile(filepath.Join(dir, "asked"), nil, 0o600)
			}
			http.Error(w, "waiting for the moon", http.StatusServiceUnavailable)
		}
	})
	http.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "up 1\n") })
	go func() { fmt.Fprintln(os.Stderr, http.ListenAndServe(fmt.Sprintf(":%d", metricsPort), nil)) }()
	<-term
	if behaviour == "stubborn" {
		time.Sleep(time.Hour)
	}
	return 0
}

func TestGatewaysStartStopAndStartAgain(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(2)})
	t.Setenv(fakeEnv, "good")
	if err := l.StartGateways(t.Context(), os.Args[0]); err != nil {
		t.Fatal(err)
	}
	if err := l.StartGateway(t.Context(), l.Clusters[0], os.Args[0]); err == nil || !strings.Contains(err.Error(), "runs already") {
		t.Errorf("a second gateway: %v", err)
	}
	if v, err := l.Metric(t.Context(), l.Clusters[0], "up"); err != nil || v != 1 {
		t.Errorf("metric: %v, %v", v, err)
	}
	opened, err := Open(l.Name)
	if err != nil {
		t.Fatal(err)
	}
	if err := opened.StopGateway(opened.Clusters[0]); err != nil {
		t.Errorf("stop from another process: %v", err)
	}
	if pid, ok := l.GatewayProcess(l.Clusters[0]); ok {
		t.Errorf("process %d still runs", pid)
	}
	if err := l.StartGateway(t.Context(), l.Clusters[0], os.Args[0]); err != nil {
		t.Error(err)
	}
	if err := l.StopGateways(); err != nil {
		t.Error(err)
	}
	if err := l.StopGateways(); err != nil {
		t.Errorf("a second stop: %v", err)
	}
}

func TestStartGatewaysReportsWhyAGatewayFailed(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(1)})
	t.Setenv(fakeEnv, "broken")
	err := l.StartGateways(t.Context(), os.Args[0])
	if err == nil || !strings.Contains(err.Error(), "ended before it was ready: exit status 1") || !strings.Contains(err.Error(), "peer-b.yaml: the reason why") {
		t.Errorf("error %v", err)
	}
	t.Setenv(fakeEnv, "unready")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { // cancels the start after a few readiness checks
		for ctx.Err() == nil {
			if _, err := os.Stat(filepath.Join(l.Clusters[0].ConfigDir, "asked")); err == nil {
				cancel()
			}
			time.Sleep(20 * time.Millisecond)
		}
	}()
	err = l.StartGateways(ctx, os.Args[0])
	if err == nil || !strings.Contains(err.Error(), "waiting for the moon") || !strings.Contains(err.Error(), "\tlistening") {
		t.Errorf("error %v", err)
	}
	if strings.Contains(err.Error(), "the reason why") {
		t.Errorf("the error quotes the log of an earlier start: %v", err)
	}
	if err := l.KillGateway(l.Clusters[0]); err != nil {
		t.Error(err)
	}
	err = l.StartGateways(t.Context(), filepath.Join(t.TempDir(), "no-such-binary"))
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}

func TestDownEndsGateways(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(2)})
	t.Setenv(fakeEnv, "stubborn")
	if err := l.StartGateways(t.Context(), os.Args[0]); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if err := l.Down(); err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > time.Minute {
		t.Errorf("took %v", d)
	}
}

func TestMetricSumsMatchingSeries(t *testing.T) {
	const text = `# HELP drops_total Packets dropped.
# TYPE drops_total counter
drops_total{direction="inbound",peer="b",reason="no_flow"} 3
drops_total{direction="outbound",peer="b",reason="no_flow"} 5
drops_total{direction="inbound",peer="c",reason="no_flow"} 1e+1
drops_total_other 7
plain 42
`
	for _, tc := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"drops_total", nil, 18},
		{"drops_total", []string{`direction="inbound"`}, 13},
		{"drops_total", []string{`peer="b"`, `direction="inbound"`}, 3},
		{"drops_total", []string{`peer="x"`}, 0},
		{"plain", nil, 42},
		{"none", nil, 0},
	} {
		if got, err := SumMetric(text, tc.name, tc.labels); err != nil || got != tc.want {
			t.Errorf("%s%v = %v, %v; want %v", tc.name, tc.labels, got, err, tc.want)
		}
	}
}
