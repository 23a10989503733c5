package probe

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"
)

func TestLoadCountsAnswersByServerAndFailures(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, greeting+"here") }))
	defer server.Close()
	begin := time.Now()
	l := NewLoad("localhost", netip.MustParseAddrPort(server.Listener.Addr().String()).Port(), false)
	defer l.Stop()
	until := func(what string, done func(LoadSecond) bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
			for _, s := range l.Since(begin) {
				if done(s) {
					return
				}
			}
			if time.Now().After(deadline) {
				t.Fatalf("no %s", what)
			}
		}
	}
	until("answers", func(s LoadSecond) bool { return s.Answered["here"] > 1 })
	server.Close()
	until("failures", func(s LoadSecond) bool {
		return len(s.Failed) > 0 && s.Failed[0].Error == "connection: connect: connection refused" && !s.Failed[0].Begin.Before(begin)
	})
}
