package manager

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"k8s.io/client-go/rest"
)

func TestServerClockReturnsTheTimeOfTheAPIServer(t *testing.T) {
	date := "Sun, 06 Nov 1994 08:49:37 GMT"
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Date"] = []string{date}
		w.WriteHeader(http.StatusForbidden) // only the Date header of the answer matters
	}))
	defer server.Close()
	now, err := serverClock(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	if at, err := now(t.Context()); err != nil || at.Unix() != 784111777 {
		t.Errorf("%v, %v", at, err)
	}
	date = ""
	if at, err := now(t.Context()); err == nil {
		t.Errorf("without a Date: %v", at)
	}
	server.Close()
	if at, err := now(t.Context()); err == nil {
		t.Errorf("without a server: %v", at)
	}
}
