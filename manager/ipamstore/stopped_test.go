package ipamstore

import (
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// Only networks are reported by nodes: what else changes of an object leaves the version that a node reports as it
// was, also after the manager was started again.
func TestAnswersAndMappingsLeaveTheVersionThatNodesReport(t *testing.T) {
	h := fresh(t)
	h.grant(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	version := h.versionOf("b")
	same := func(what string) {
		t.Helper()
		if nodes, object := allocations(t).Version, allocationOf(t, "b"); nodes != version || fabric.Version(object.ResourceVersion) == version {
			t.Errorf("%s: nodes report %d of %s; want %d", what, nodes, object.ResourceVersion, version)
		}
		if got := h.versionOf("b"); got != version {
			t.Errorf("%s: the manager waits for %d; want %d", what, got, version)
		}
	}
	h.answered("b", "10.246.0.0/16", "10.247.0.0/16")
	same("an answer")
	h.mapEndpoint("b", "198.51.100.7")
	same("a mapping")
	h.update(func(b ipam.Book) ipam.Book { return b.Part("b", time.Now()) })
	same("it leaves")
	h = loaded(t)
	same("another manager")
	patched(t, "b", `{"spec":{"networksResourceVersion":1}}`)
	refresh(t, h)
	same("an edit")
	h.update(func(b ipam.Book) ipam.Book { return b.Release("b") })
	h.grant(claim("b", "10.66.0.0/16", "10.65.0.0/20"))
	o := allocationOf(t, "b")
	if now := h.versionOf("b"); now != fabric.Version(o.ResourceVersion) || now != allocations(t).Version {
		t.Errorf("another network has version %d in %s", now, o.ResourceVersion)
	}
	o.Spec.NetworksResourceVersion = 9_000_000_000 // of another API server, as a backup has it
	if got := fabric.NamedSince(o.ResourceVersion, &o.Spec); got != fabric.Version(o.ResourceVersion) {
		t.Errorf("a version of the future is %d", got)
	}
}
