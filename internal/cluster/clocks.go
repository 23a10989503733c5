package cluster

import (
	"net/http"
	"sync"
	"time"
)

// A serverClock measures how far the API server's clock is ahead of ours, by the Date header of its
// responses (RFC 9110, section 6.6.1). Date lies between request and response, and has whole
// seconds. So each response narrows the bounds of the difference.
type serverClock struct {
	mu        sync.Mutex
	known     bool
	low, high time.Duration // the difference is between them
}

func (s *serverClock) heard(date, sent, received time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	low, high := date.Sub(received), date.Add(time.Second).Sub(sent)
	if s.known && max(low, s.low) <= min(high, s.high) { // otherwise one of the clocks was set
		low, high = max(low, s.low), min(high, s.high)
	}
	s.low, s.high, s.known = low, high, true
}

// ahead returns the difference nearest to 0 within the bounds; false: no response had a Date.
func (s *serverClock) ahead() (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(s.low, min(s.high, 0)), s.known
}

// atLeast returns the lower bound of the difference, with which nothing looks older than it is.
func (s *serverClock) atLeast() (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.low, s.known
}

// listening wraps a client's transport, to measure by its responses.
func (s *serverClock) listening(to http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		sent := time.Now()
		resp, err := to.RoundTrip(r)
		if err == nil {
			if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
				s.heard(date, sent, time.Now())
			}
		}
		return resp, err
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Now returns the time by the API server's clock, which dates objects. It returns false and our own
// time if the server's is unknown.
func (c *Cluster) Now() (time.Time, bool) {
	ahead, known := c.clock.ahead()
	return time.Now().Add(ahead), known
}
