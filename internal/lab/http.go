package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// Client returns an HTTP client whose connections start at the host. It keeps no connection open
// between requests.
func (h *Host) Client() *http.Client {
	return &http.Client{Transport: &http.Transport{DialContext: h.Dial, DisableKeepAlives: true, DisableCompression: true}}
}

// Get fetches a URL from inside the host and returns the body. A status other than 200 is an
// error.
func (h *Host) Get(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	res, err := h.Client().Do(req)
	if err != nil {
		return "", fmt.Errorf("from %s: %w", h.Name, err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		return "", fmt.Errorf("from %s: get %s: %w", h.Name, url, err)
	}
	if res.StatusCode != http.StatusOK {
		return "", fmt.Errorf("from %s: get %s: %s: %s", h.Name, url, res.Status, strings.TrimSpace(string(body)))
	}
	return string(body), nil
}

// Serve serves HTTP inside the host at address ("10.244.0.11:80", ":80" for both families) until
// the returned function is called.
func (h *Host) Serve(address string, handler http.Handler) (stop func() error, err error) {
	listener, err := h.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", h.Name, err)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	return func() error {
		err := server.Close()
		if served := <-done; !errors.Is(served, http.ErrServerClosed) {
			err = errors.Join(err, served)
		}
		return err
	}, nil
}

// ServeHosts starts the lab's web server on port 80 of all pods and servers. It runs until the lab
// is removed. It answers
//
//	/           "a-pod1 sees 10.246.0.11": the server's name and the caller's address
//	/bytes?n=N  N octets
//
// and accepts a PUT of any data to /bytes.
func (l *Lab) ServeHosts() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.Clusters {
		hosts := []*Host{c.OnPrem.Host}
		for _, p := range c.Pods {
			hosts = append(hosts, p.Host)
		}
		for _, h := range hosts {
			stop, err := h.Serve(":80", whoami(h.Name))
			if err != nil {
				return err
			}
			l.servers = append(l.servers, stop)
		}
	}
	return nil
}

// stopServing ends the servers of ServeHosts.
func (l *Lab) stopServing() error {
	var errs []error
	for _, stop := range l.servers {
		errs = append(errs, stop())
	}
	l.servers = nil
	return errors.Join(errs...)
}

// maxDownload is the largest number of octets in one response.
const maxDownload = 1 << 40

func whoami(name string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		caller, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprintf(w, "%s sees %s\n", name, caller)
	})
	mux.HandleFunc("GET /bytes", func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.ParseInt(r.FormValue("n"), 10, 64)
		if err != nil || n < 0 || n > maxDownload {
			http.Error(w, "n: want a number of octets", http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
		chunk := make([]byte, 256<<10)
		for n > 0 {
			m, err := w.Write(chunk[:min(n, int64(len(chunk)))])
			if err != nil {
				return // the client closed the connection
			}
			n -= int64(m)
		}
	})
	mux.HandleFunc("PUT /bytes", func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		fmt.Fprintf(w, "%d\n", n)
	})
	return mux
}

// Throughput is the result of a Download.
type Throughput struct {
	Bytes    int64
	Duration time.Duration
}

// BitsPerSecond returns the mean rate of the payload.
func (t Throughput) BitsPerSecond() float64 { return float64(t.Bytes) * 8 / t.Duration.Seconds() }

// Download fetches up to n octets from the lab's web server at addr, and stops after the timeout.
// It measures the time from the request to the last octet.
func (h *Host) Download(ctx context.Context, addr netip.Addr, n int64, timeout time.Duration) (Throughput, error) {
	requestCtx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(requestCtx, http.MethodGet, fmt.Sprintf("http://%v/bytes?n=%d", netip.AddrPortFrom(addr, 80), n), nil)
	if err != nil {
		return Throughput{}, err
	}
	start := time.Now()
	res, err := h.Client().Do(req)
	if err != nil {
		return Throughput{}, fmt.Errorf("from %s: %w", h.Name, err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return Throughput{}, fmt.Errorf("from %s: get %s: %s", h.Name, req.URL, res.Status)
	}
	var got int64
	buf := make([]byte, 256<<10)
	for err == nil {
		var m int
		m, err = res.Body.Read(buf)
		got += int64(m)
	}
	t := Throughput{got, time.Since(start)}
	if errors.Is(err, io.EOF) || requestCtx.Err() != nil && ctx.Err() == nil && got > 0 {
		return t, nil
	}
	return t, fmt.Errorf("from %s: get %s: after %d octets: %w", h.Name, req.URL, got, err)
}
