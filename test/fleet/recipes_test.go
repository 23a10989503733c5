package fleet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

const recipes = "docs/recipes.md"

// The commands and objects of docs/recipes.md do what the page says. Commands that need containers
// are left out; internal/pages says where they are tested.
func TestRecipes(t *testing.T) {
	spec := lab.Spec{Clusters: []lab.ClusterSpec{clusterSpec("10.244.0.0/16", 1), clusterSpec("10.244.0.0/16", 1), clusterSpec("10.244.0.0/16", 1)}}
	for i, name := range []string{"paris", "oslo", "rome"} {
		spec.Clusters[i].Name = name
	}
	f := upWith(t, fleet.Options{Services: true, Spec: spec})
	paris, oslo, rome := f.Clusters[0], f.Clusters[1], f.Clusters[2]

	follow(t, f, "A full mesh of clusters")
	for _, pair := range [][2]*fleet.Cluster{{paris, oslo}, {paris, rome}, {oslo, rome}} {
		ready(t, pair[0], pair[1])
		podsToPods(t, pair[0], pair[1]) // which compares the sources, too
		podsToPods(t, pair[1], pair[0])
	}

	applyRecipe(t, oslo, "A NetworkPolicy for remote pods")
	selectsParis(t, paris, oslo, rome, "database")

	exportShop(t, oslo)
	follow(t, f, "One Service only")
	applyRecipe(t, oslo, "One Service only")
	selectsParis(t, paris, oslo, rome, "shop-for-paris")
	lists(t, paris, map[string]bool{"oslo": true}, oslo)
	reached(t, paris, oslo)

	must(t, oslo.Server.Freeze())
	for _, name := range oslo.Components() {
		must(t, oslo.Kill(name))
	}
	eventually(t, "paris misses oslo", func() error {
		if out, err := f.Isthmus(t.Context(), "status", "--context", "paris"); err == nil || !strings.Contains(out, "PeerSilent") {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	})
	must(t, oslo.Server.Thaw())
	for _, name := range oslo.Components() {
		must(t, oslo.Launch(name))
	}
	follow(t, f, "A cluster that sleeps over the weekend")
	ready(t, paris, oslo)
	podsToPods(t, paris, oslo)
	lists(t, paris, map[string]bool{"oslo": true}, oslo)

	// The new cluster knows nothing of the former one's peers.
	isthmus(t, f, "unpeer", "--context", "oslo", "paris", "--force", "--timeout", patience.String())
	follow(t, f, "Replace a cluster")
	ready(t, paris, oslo)
	podsToPods(t, paris, oslo)
}

// follow runs the commands of a recipe with the program.
func follow(t *testing.T, f *fleet.Fleet, chapter string) {
	t.Helper()
	for _, line := range chapterOf(t, recipes, chapter) {
		if slices.ContainsFunc(elsewhere, func(begin string) bool { return strings.HasPrefix(line, begin) }) {
			continue
		}
		args := strings.Fields(line)[1:]
		if args[0] == "peer" || args[0] == "unpeer" {
			args = append(args, "--timeout", patience.String(), "--request-timeout", "1m")
		}
		eventually(t, line, func() error {
			if out, err := f.Isthmus(t.Context(), args...); err != nil {
				return fmt.Errorf("%w\n%s", err, out)
			}
			return nil
		})
	}
}

// applyRecipe applies the objects of a recipe, as kubectl apply does with its input.
func applyRecipe(t *testing.T, c *fleet.Cluster, chapter string) {
	t.Helper()
	page, err := os.ReadFile("../../" + recipes)
	must(t, err)
	_, text, found := strings.Cut(string(page), "\n## "+chapter+"\n")
	_, text, input := strings.Cut(text, "<<EOF\n")
	text, _, end := strings.Cut(text, "    EOF\n")
	if !found || !input || !end {
		t.Fatalf("%s has no objects under %q", recipes, chapter)
	}
	text = strings.ReplaceAll("\n"+text, "\n    ", "\n")
	applied := 0
	for d := yaml.NewYAMLOrJSONDecoder(bytes.NewReader([]byte(text)), 1<<16); ; applied++ {
		var o unstructured.Unstructured
		if err := d.Decode(&o.Object); errors.Is(err, io.EOF) {
			break
		} else {
			must(t, err)
		}
		must(t, c.Client.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(&o), client.FieldOwner("recipe"), client.ForceOwnership))
	}
	if applied == 0 {
		t.Fatalf("%s: nothing to apply under %q", recipes, chapter)
	}
}

// selectsParis wants a NetworkPolicy of oslo that selects pods of paris by their addresses there, and
// pods of no other cluster.
func selectsParis(t *testing.T, paris, oslo, rome *fleet.Cluster, policy string) {
	t.Helper()
	var p networkingv1.NetworkPolicy
	must(t, oslo.Client.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: policy}, &p))
	block := netip.MustParsePrefix(p.Spec.Ingress[0].From[0].IPBlock.CIDR)
	for name, c := range map[string]struct {
		addr netip.Addr
		want bool
	}{
		"paris": {seen(t, oslo, paris, podOn(t, paris, 0).Addr), true},
		"rome":  {seen(t, oslo, rome, podOn(t, rome, 0).Addr), false},
		"oslo":  {podOn(t, oslo, 0).Addr, false},
	} {
		if block.Contains(c.addr) != c.want {
			t.Errorf("NetworkPolicy %s: %v selects a pod of %s, %v: %v; want %v", policy, block, name, c.addr, !c.want, c.want)
		}
	}
}
