package inspect

import (
	"encoding/binary"
	"io"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/health"

	"golang.org/x/net/dns/dnsmessage"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/peering"
)

func TestServiceCheckSendsAValidDNSQuery(t *testing.T) {
	for _, tc := range []struct {
		code  dnsmessage.RCode
		other bool // the response has another ID
		short bool
	}{{code: dnsmessage.RCodeSuccess}, {code: dnsmessage.RCodeNameError}, {code: dnsmessage.RCodeServerFailure}, {other: true}, {short: true}} {
		ours, theirs := net.Pipe()
		go func() {
			defer theirs.Close()
			var length [2]byte
			if _, err := io.ReadFull(theirs, length[:]); err != nil {
				return
			}
			text := make([]byte, binary.BigEndian.Uint16(length[:]))
			var m dnsmessage.Message
			if _, err := io.ReadFull(theirs, text); err != nil || m.Unpack(text) != nil || len(m.Questions) != 1 ||
				m.Questions[0].Name.String() != "clusterset.local." || m.Questions[0].Type != dnsmessage.TypeSOA {
				return
			}
			m.Response, m.RCode = true, tc.code
			if tc.other {
				m.ID++
			}
			packed, err := m.Pack()
			if err != nil {
				return
			}
			if tc.short {
				packed = packed[:5]
			}
			_, _ = theirs.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(packed))), packed...))
		}()
		code, err := querySOA(ours, "clusterset.local")
		if wrong := tc.other || tc.short; (err != nil) != wrong || code != tc.code {
			t.Errorf("%+v: %v, %v", tc, code, err)
		}
		ours.Close()
	}
}

func TestServiceCountsDistinguishImportedRefusedAndWaiting(t *testing.T) {
	peerServices := func(observed int64, refused ...string) *isthmus.PeerServices {
		p := &isthmus.PeerServices{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Spec: isthmus.PeerServicesSpec{Services: []isthmus.ExportedService{
			{Namespace: "prod", Name: "shop"}, {Namespace: "prod", Name: "cart"}, {Namespace: "dev", Name: "shop"}}}}
		p.Status.ObservedGeneration = observed
		for _, r := range refused {
			p.Status.Refused = append(p.Status.Refused, isthmus.RefusedService{Namespace: "prod", Name: r, Reason: "NotImported", Message: "bad\x1bword"})
		}
		return p
	}
	var s ServiceCounts
	s.add(peerServices(2, "shop"))
	s.add(peerServices(2))
	s.add(peerServices(1, "cart"))
	if s.Imported != 5 || s.Refused != 1 || s.Waiting != 3 || s.String() != "5 (1 refused)" {
		t.Errorf("%+v", s)
	}
	const want = `prod/shop: NotImported: bad\u001bword`
	if got := s.problems(); !slices.Equal(got, []string{"service " + want}) {
		t.Errorf("%q", got)
	}
	c, p := &cluster.Cluster{}, peering.New("p", isthmus.Peering{}.Spec.Cluster, "tenant", "remote")
	for state, counts := range map[health.HopState]map[string]*ServiceCounts{
		health.Limited: {"tenant": &s}, health.Works: {}, health.Unknown: nil,
	} {
		if h := servicesHop(c, p, counts); h.State != state || state == health.Limited && !strings.Contains(h.Text, want) {
			t.Errorf("%+v; want %s", h, state)
		}
	}
	waiting := &ServiceCounts{Imported: 1, Waiting: 2}
	if h := servicesHop(c, p, map[string]*ServiceCounts{"tenant": waiting}); h.State != health.Unknown {
		t.Errorf("%+v", h)
	}
	many := ServiceCounts{reasons: slices.Repeat([]string{"x"}, 7)}
	if got := many.problems(); len(got) != 6 || got[5] != "and 2 more services" {
		t.Errorf("%q", got)
	}
}
