package cluster

import (
	"net/http"
	"sync"
	"time"
)

// A serverClock estimates how far the API server's clock is ahead of ours, from the Date header of
// its responses (RFC 9110, section 6.6.1). Date is a time between the request and the response, in
// whole seconds. So each response can narrow the bounds of the difference.
type serverClock struct {
	mu        sync.Mutex
	known     bool
	low, high time.Duration // bounds of the difference
}

func (s *serverClock) observe(date, sent, received time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	low, high := date.Sub(received), date.Add(time.Second).Sub(sent)
	if s.known && max(low, s.low) <= min(high, s.high) { // if the bounds contradict each other, one of the clocks was set
		low, high = max(low, s.low), min(high, s.high)
	}
	s.low, s.high, s.known = low, high, true
}

// ahead returns the difference nearest to 0 within the bounds. It returns false if no response
// had a Date.
func (s *serverClock) ahead() (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(s.low, min(s.high, 0)), s.known
}

// lowerBound returns the lower bound of the difference. A caller that adds it to our time never
// overestimates the age of an event.
func (s *serverClock) lowerBound() (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.low, s.known
}

// listening wraps a client's transport so that the responses update the clock.
func (s *serverClock) listening(to http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		sent := time.Now()
		resp, err := to.RoundTrip(r)
		if err == nil {
			if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
				s.observe(date, sent, time.Now())
			}
		}
		return resp, err
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Now returns the time by the API server's clock, which sets the times in objects. If that
// clock is unknown, it returns false and the time by our clock.
func (c *Cluster) Now() (time.Time, bool) {
	ahead, known := c.clock.ahead()
	return time.Now().Add(ahead), known
}
