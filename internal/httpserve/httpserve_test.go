package httpserve

import (
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
)

func TestServersAnswerUntilTheyAreClosed(t *testing.T) {
	s := New(slog.New(slog.DiscardHandler))
	release, entered := make(chan struct{}), make(chan struct{})
	addr, err := s.Listen("status", "127.0.0.1:0", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(entered)
		<-release
		io.WriteString(w, "all of it")
	}))
	if err != nil {
		t.Fatal(err)
	}
	s.Serve()
	answers := make(chan string)
	go func() {
		r, err := http.Get("http://" + addr.String())
		if err != nil {
			answers <- err.Error()
			return
		}
		defer r.Body.Close()
		text, _ := io.ReadAll(r.Body)
		answers <- string(text)
	}()
	<-entered
	closed := make(chan struct{})
	go func() { s.Close(); close(closed) }()
	close(release)
	if got := <-answers; got != "all of it" {
		t.Errorf("a request under way got %q", got)
	}
	<-closed
	if c, err := net.Dial("tcp", addr.String()); err == nil {
		c.Close()
		t.Error("listens after Close")
	}
	s.Close()
}

func TestAddressInUseIsAnErrorThatNamesTheServer(t *testing.T) {
	s := New(slog.New(slog.DiscardHandler))
	addr, err := s.Listen("metrics address", "127.0.0.1:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Listen("status address", addr.String(), nil); err == nil || !strings.HasPrefix(err.Error(), "status address: listen tcp") {
		t.Errorf("twice: %v", err)
	}
	if none, err := s.Listen("none", "", nil); none != nil || err != nil {
		t.Errorf("no address: %v, %v", none, err)
	}
	s.Close() // never served
	if _, err := net.Dial("tcp", addr.String()); err == nil {
		t.Error("listens after Close")
	}
}
