package manager

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"k8s.io/client-go/rest"
)

// serverClock returns a function that reads the API server's time from the Date header of a
// response (RFC 9110, section 6.6.1). The resolution is one second. The manager uses this clock for
// holds, so that a wrong clock on this machine cannot end the hold of a released network early.
func serverClock(cfg *rest.Config) (func(context.Context) (time.Time, error), error) {
	cfg = rest.CopyConfig(cfg)
	cfg.Timeout = 10 * time.Second
	web, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, err
	}
	base, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, err
	}
	at := base.JoinPath("version").String()
	return func(ctx context.Context) (time.Time, error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
		if err != nil {
			return time.Time{}, err
		}
		answer, err := web.Do(request)
		if err != nil {
			return time.Time{}, fmt.Errorf("time of the API server: %w", err)
		}
		defer answer.Body.Close()
		if _, err := io.Copy(io.Discard, io.LimitReader(answer.Body, 1<<16)); err != nil { // allows the connection to be reused
			return time.Time{}, fmt.Errorf("time of the API server: %w", err)
		}
		date, err := http.ParseTime(answer.Header.Get("Date"))
		if err != nil {
			return time.Time{}, errors.New("time of the API server: its answer has no Date")
		}
		return date, nil
	}, nil
}
