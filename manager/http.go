package manager

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/internal/httpserve"
)

// listen serves the addresses of o until the returned servers are closed. It replaces
// controller-runtime's servers, which do not limit slow or numerous clients. waitReason points to
// the reason why a leading manager cannot begin its work; such a manager is not ready. A standby is
// ready.
func listen(o Options, mgr ctrl.Manager, waitReason *atomic.Pointer[string]) (*httpserve.Servers, error) {
	public, private := http.NewServeMux(), http.NewServeMux()
	private.Handle("GET /metrics", o.MetricsSecure.Guarded(promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError})))
	public.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	public.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), time.Second)
		defer cancel()
		if !mgr.GetCache().WaitForCacheSync(ctx) {
			http.Error(w, "the manager has not read all objects yet", http.StatusServiceUnavailable)
			return
		}
		if why := waitReason.Load(); why != nil {
			http.Error(w, "this manager is the leader but cannot start: "+*why, http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	s := httpserve.New(o.Log)
	_, err := s.Listen("health address", o.HealthAddress, public)
	if err == nil {
		_, err = s.ListenPrivate("metrics address", o.MetricsAddress, o.MetricsSecure, private)
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	s.Serve()
	return s, nil
}
