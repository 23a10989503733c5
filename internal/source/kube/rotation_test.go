package kube

import (
	"testing"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

func TestNobodyIsToldWhereAllWhoAreConnectedLag(t *testing.T) {
	peer := func(id string, status v1alpha1.ConnectionStatus) PeerReport {
		return PeerReport{ID: id, Status: status}
	}
	for name, tc := range map[string]struct {
		peers   []PeerReport
		lagging []string
		want    bool
	}{
		"there is no peer":                    {nil, nil, false},
		"all lag":                             {[]PeerReport{peer("a", v1alpha1.Connected), peer("b", v1alpha1.Connected)}, []string{"a", "b"}, true},
		"one has moved":                       {[]PeerReport{peer("a", v1alpha1.Connected), peer("b", v1alpha1.Connected)}, []string{"a"}, false},
		"whoever is away has not moved":       {[]PeerReport{peer("a", v1alpha1.Connected), peer("b", v1alpha1.Connecting)}, []string{"a"}, true},
		"all who lag are away":                {[]PeerReport{peer("a", v1alpha1.Connecting)}, []string{"a"}, false},
		"one who lags is away, one has moved": {[]PeerReport{peer("a", v1alpha1.Connecting), peer("b", v1alpha1.Connected)}, []string{"a"}, false},
	} {
		if got := untold(Report{Peers: tc.peers}, tc.lagging); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
