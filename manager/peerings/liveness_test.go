package peerings

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// leaseReader is a reader that returns a Lease or an error.
type leaseReader struct {
	client.Reader
	holder  string
	renewed time.Time
	err     error
}

func (r *leaseReader) Get(_ context.Context, _ client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	if r.err != nil {
		return r.err
	}
	at := metav1.NewMicroTime(r.renewed)
	into.(*coordinationv1.Lease).Spec = coordinationv1.LeaseSpec{HolderIdentity: &r.holder, RenewTime: &at}
	return nil
}

func TestGatewayIsReportedInactiveWhenItsLeaseIsNotRenewed(t *testing.T) {
	notFound := apierrors.NewNotFound(schema.GroupResource{Resource: "leases"}, isthmus.LeaseGateway)
	renew := func(r *leaseReader) { r.renewed = r.renewed.Add(2 * time.Second) }
	for _, c := range []struct {
		name   string
		first  func(*leaseReader)               // called before the first look
		each   func(r *leaseReader, second int) // called each second for one minute
		silent bool
	}{
		{"renewed", nil, func(r *leaseReader, _ int) { renew(r) }, false},
		{"renewed with a clock that is 25 s ahead", func(r *leaseReader) { r.renewed = r.renewed.Add(25 * time.Second) }, func(r *leaseReader, _ int) { renew(r) }, false},
		{"no longer renewed", nil, func(*leaseReader, int) {}, true},
		{"acquired by another gateway", nil, func(r *leaseReader, second int) {
			if second > 10 {
				r.holder = "gateway-2"
				renew(r)
			}
		}, false},
		{"released and not acquired", nil, func(r *leaseReader, _ int) { r.holder = "" }, true},
		{"not renewed for 40 s, then renewed", nil, func(r *leaseReader, second int) {
			if second > 40 {
				renew(r)
			}
		}, false},
		{"unreadable for most of the time", nil, func(r *leaseReader, second int) {
			if r.err = nil; second < 55 {
				r.err = errors.New("connection refused")
			}
		}, false},
		{"deleted", nil, func(r *leaseReader, second int) {
			if second > 5 {
				r.err = notFound
			}
		}, true},
		{"deleted and created again", nil, func(r *leaseReader, second int) {
			if r.err = nil; second > 5 && second < 40 {
				r.err = notFound
			}
			renew(r)
		}, false},
		{"Lease never existed", func(r *leaseReader) { r.err = notFound }, func(*leaseReader, int) {}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &leaseReader{holder: "gateway-1", renewed: time.Now()}
				if c.first != nil {
					c.first(r)
				}
				p := NewLiveness(r, "isthmus-system", slog.New(slog.DiscardHandler))
				p.checkLease(t.Context())
				if got := p.Silent(); got != "" {
					t.Errorf("silent at the first look: %s", got)
				}
				for second := range 60 {
					time.Sleep(time.Second)
					if c.each(r, second); second%3 == 0 {
						p.checkLease(t.Context())
					}
				}
				if got := p.Silent(); (got != "") != c.silent {
					t.Errorf("silent: %q; want %v", got, c.silent)
				}
				if c.silent && len(p.Changed()) == 0 {
					t.Error("nobody is told")
				}
			})
		})
	}
}

// If an API server answers two renewals too late, the third succeeds after 11 s.
func TestLivenessToleratesTwoFailedLeaseRenewals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &leaseReader{holder: "gateway-1", renewed: time.Now()}
		p := NewLiveness(r, "isthmus-system", slog.New(slog.DiscardHandler))
		p.checkLease(t.Context())
		time.Sleep(11 * time.Second)
		if p.checkLease(t.Context()); p.Silent() != "" {
			t.Errorf("silent after 11 s: %s", p.Silent())
		}
		time.Sleep(time.Second)
		if p.checkLease(t.Context()); p.Silent() == "" {
			t.Error("not silent after 12 s")
		}
	})
}

// A gateway that stops releases the Lease. Without a standby, no other gateway acquires it.
func TestReleasedLeaseIsReportedEarlierThanAnUnrenewedOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &leaseReader{holder: "gateway-1", renewed: time.Now()}
		p := NewLiveness(r, "isthmus-system", slog.New(slog.DiscardHandler))
		p.checkLease(t.Context())
		r.holder = ""
		for second := range 9 {
			if p.checkLease(t.Context()); (p.Silent() != "") != (second >= 6) {
				t.Errorf("%d s after the release: %q", second, p.Silent())
			}
			time.Sleep(time.Second)
		}
	})
}

// The clocks of two machines may differ by half a minute at most.
func TestStartingManagerReportsAnOldLeaseAsInactive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &leaseReader{holder: "gateway-1", renewed: time.Now().Add(-time.Minute)}
		p := NewLiveness(r, "isthmus-system", slog.New(slog.DiscardHandler))
		p.checkLease(t.Context())
		if got := p.Silent(); !strings.Contains(got, "gateway-1 and renewed at") {
			t.Errorf("silent: %q", got)
		}
		r.renewed = time.Now()
		time.Sleep(livenessInterval)
		if p.checkLease(t.Context()); p.Silent() != "" {
			t.Errorf("silent although renewed: %q", p.Silent())
		}
	})
}
