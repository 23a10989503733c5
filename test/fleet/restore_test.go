package fleet

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// The etcd of one side is restored from a backup as docs/lifecycle.md describes, and the clients
// of its API server are restarted. The other side keeps its newer state.
func TestAClusterRestoredFromABackupRecovers(t *testing.T) {
	if !*long {
		t.Skip("takes half a minute or more: -long runs it")
	}
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{inPods(clusterSpec("10.244.0.0/16", 2)), inPods(clusterSpec("10.244.64.0/19", 2))}})
	a, b := f.Clusters[0], f.Clusters[1]
	days := t.TempDir()
	save := func(day string) { must(t, b.Server.Save(filepath.Join(days, day))) }
	restart := func() {
		t.Helper()
		for _, name := range b.Components() {
			must(t, b.Stop(name))
		}
		for _, name := range b.Components() {
			must(t, b.Launch(name))
		}
		active(t, b)
	}
	restore := func(day string) {
		t.Helper()
		must(t, b.Server.Restore(t.Context(), filepath.Join(days, day)))
		restart()
	}
	networks := func() string {
		p, err := a.Peering(t.Context(), b)
		must(t, err)
		return fmt.Sprint(p.Status.Remote)
	}

	save("before the peering")
	peer(t, f, a, b)
	podsToPods(t, a, b)
	was := networks()
	save("peered")

	t.Run("nothing changed since the backup", func(t *testing.T) {
		during := startTraffic(t, a, b)
		mappedEndpoint(t, a, b) // this mapping is newer than the backup, so the restored manager does not know it
		must(t, b.Server.Restore(t.Context(), filepath.Join(days, "peered")))
		waitReady(t, a, b)
		during.endWithoutLoss(t) // no loss before components are restarted
		restart()
		waitReady(t, a, b)
		podsToPods(t, a, b)
		if now := networks(); now != was {
			t.Errorf("the networks were %s, and are %s", was, now)
		}
	})
	t.Run("peered since the backup", func(t *testing.T) {
		restore("before the peering")
		peer(t, f, a, b)
		podsToPods(t, a, b)
		if now := networks(); now != was {
			t.Errorf("the networks were %s, and are %s", was, now)
		}
	})
	t.Run("un-peered since the backup", func(t *testing.T) {
		isthmus(t, f, "unpeer", "--context", a.Name, "--remote-context", b.Name)
		restore("peered")
		begin, said := time.Now(), ""
		eventually(t, "a Peering that says that the other side is gone", func() error {
			p, err := b.Peering(t.Context(), a)
			if err != nil {
				return err
			}
			if ready := meta.FindStatusCondition(p.Status.Conditions, "Ready"); ready == nil || ready.Status != metav1.ConditionFalse {
				return fmt.Errorf("%+v", p.Status.Conditions)
			} else {
				said = ready.Reason + ": " + ready.Message
			}
			return nil
		})
		t.Logf("after %.1f s: %s", time.Since(begin).Seconds(), said)
		isthmus(t, f, "unpeer", "--context", b.Name, a.Name, "--force")
		if _, err := b.Peering(t.Context(), a); err == nil {
			t.Error("the Peering is still there")
		}
		peer(t, f, a, b)
		podsToPods(t, a, b)
	})
}
