package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestProfilesAreServed(t *testing.T) {
	w := httptest.NewRecorder()
	profiles().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/debug/pprof/heap?debug=1", nil))
	if text := w.Body.String(); w.Code != http.StatusOK || !strings.HasPrefix(text, "heap profile:") {
		t.Errorf("status %d: %.60q", w.Code, text)
	}
}
