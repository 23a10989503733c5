package services

import (
	"context"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	net "github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/replication"
)

// answered is a Replicator with the peer's answer to the exports.
type answered replication.Sharing

func (answered) Share(string, map[string]isthmus.PeerServicesSpec) {}
func (a answered) Sharing(string) (replication.Sharing, bool)      { return replication.Sharing(a), true }

// formOfReason is the form that the API server demands for the reason of a condition. An answer of
// a peer must not keep us from writing conditions.
var formOfReason = regexp.MustCompile(`^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$`)

func TestConditionsOfAnExportAreValidForAnyAnswerOfAPeer(t *testing.T) {
	for answer, want := range map[string]struct{ ready, conflict string }{
		"PortConflict":                           {"Exported", "PortConflict"},
		"LabelsConflict,TypeConflict":            {"Exported", "LabelsConflict,TypeConflict"},
		"ForeignAddress,PortConflict":            {"Failed", "PortConflict"},
		"NotImported":                            {"Failed", "NoConflicts"},
		"MyConflict":                             {"Failed", "NoConflicts"},
		"one more Conflict":                      {"Failed", "NoConflicts"},
		"":                                       {"Failed", "NoConflicts"},
		strings.Repeat("xConflict,", 25) + "Ä,":  {"Failed", "NoConflicts"},
		"PortConflict," + strings.Repeat(",", 9): {"Failed", "PortConflict"},
	} {
		c := &Controller{board: newBoard(), Options: Options{
			Pods: func(context.Context) (netip.Prefix, error) { return moved.From, nil },
			Replicator: answered{
				Condition: replication.Condition{Status: metav1.ConditionTrue, Reason: isthmus.ReasonShared},
				Refused:   []isthmus.RefusedService{{Namespace: shop.Namespace, Name: shop.Name, Reason: answer, Message: "port http TCP/80"}},
			},
		}}
		p := &isthmus.Peering{}
		p.Spec.Cluster, p.Spec.Services.Export = net.ClusterIdentity{ClusterID: "b", ClusterName: "b"}, []string{"*"}
		all := c.conditions(t.Context(), gathered{
			key: shop, export: &mcs.ServiceExport{}, ownExport: &Export{Service: service(0, "10.244.0.5")}, peerings: []*isthmus.Peering{p},
		}, Merged{})
		if !slices.ContainsFunc(all, func(c metav1.Condition) bool { return c.Reason == want.ready }) ||
			meta.FindStatusCondition(all, string(mcs.ServiceExportConditionConflict)).Reason != want.conflict {
			t.Errorf("%q: %+v", answer, all)
		}
		conflict := meta.FindStatusCondition(all, string(mcs.ServiceExportConditionConflict))
		if message := "cluster b: " + want.conflict + ": port http TCP/80"; (conflict.Message == message) != (conflict.Status == metav1.ConditionTrue) {
			t.Errorf("%q: %q; want %q", answer, conflict.Message, message)
		}
		for _, c := range all {
			if !formOfReason.MatchString(c.Reason) || len(c.Reason) > 1024 || len(c.Message) > 32768 {
				t.Errorf("%q: the API server refuses %+v", answer, c)
			}
		}
	}
}
