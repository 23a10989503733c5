package main

import (
	"bytes"
	"io"
	"log/slog"
	"net/http"
	"regexp"
	"testing"
)

func TestProfilesAreServedOnLoopback(t *testing.T) {
	var log bytes.Buffer
	stop, err := serveProfiles("127.0.0.1:0", slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	at := regexp.MustCompile(`address=(\S+)`).FindStringSubmatch(log.String())[1]
	r, err := http.Get("http://" + at + "/debug/pprof/heap?debug=1")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if text, err := io.ReadAll(r.Body); err != nil || !bytes.HasPrefix(text, []byte("heap profile:")) {
		t.Errorf("%v: %.60q", err, text)
	}
}
