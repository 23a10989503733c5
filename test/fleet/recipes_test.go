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
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/test/internal/hosts"
)

const recipes = "docs/recipes.md"

// The commands and objects of docs/recipes.md must have the documented effects. This test skips
// commands that need containers; internal/pages lists the tests for those.
func TestCommandsOfRecipesPageWork(t *testing.T) {
	spec := lab.Spec{Clusters: []lab.ClusterSpec{clusterSpec("10.244.0.0/16", 1), clusterSpec("10.244.0.0/16", 1), clusterSpec("10.244.0.0/16", 1)}}
	for i, name := range []string{"paris", "oslo", "rome"} {
		spec.Clusters[i].Name = name
	}
	hosts.Need(t, "nft")
	f := upWith(t, fleet.Options{Services: true, Spec: spec})
	paris, oslo, rome := f.Clusters[0], f.Clusters[1], f.Clusters[2]

	follow(t, f, "A full mesh of clusters")
	for _, pair := range [][2]*fleet.Cluster{{paris, oslo}, {paris, rome}, {oslo, rome}} {
		waitReady(t, pair[0], pair[1])
		podsToPods(t, pair[0], pair[1]) // podsToPods also compares the sources
		podsToPods(t, pair[1], pair[0])
	}

	applyRecipe(t, oslo, "A NetworkPolicy for remote pods")
	checkAdmitsParisOnly(t, paris, oslo, rome, "database")

	exportShop(t, oslo)
	follow(t, f, "One Service only")
	applyRecipe(t, oslo, "One Service only")
	checkAdmitsParisOnly(t, paris, oslo, rome, "local-pods-only", "shop-for-paris")
	waitListed(t, paris, map[string]bool{"oslo": true}, oslo)
	fetchFromAll(t, paris, oslo)

	exportShop(t, rome)
	isthmus(t, f, "peer", "--request-timeout", "1m", "--timeout", patience.String(), "--context", "paris", "--remote-context", "rome", "--services", "default")
	waitListed(t, paris, map[string]bool{"oslo": true, "rome": true}, oslo, rome)
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
	waitListed(t, paris, map[string]bool{"oslo": false, "rome": true}, oslo, rome)
	fetchFromAll(t, paris, rome)
	must(t, oslo.Server.Thaw())
	for _, name := range oslo.Components() {
		must(t, oslo.Launch(name))
	}
	follow(t, f, "A cluster that sleeps over the weekend")
	waitReady(t, paris, oslo)
	podsToPods(t, paris, oslo)
	waitListed(t, paris, map[string]bool{"oslo": true, "rome": true}, oslo, rome)

	before := seen(t, paris, oslo, podOn(t, oslo, 0).Addr)
	must(t, f.Replace(t.Context(), oslo))
	follow(t, f, "Replace a cluster")
	waitReady(t, paris, oslo)
	podsToPods(t, paris, oslo)
	podsToPods(t, oslo, paris)
	if now := seen(t, paris, oslo, podOn(t, oslo, 0).Addr); now == before {
		t.Errorf("paris gives the new cluster %v, an address of the former one", now)
	}
	exportShop(t, oslo)
	waitListed(t, paris, map[string]bool{"oslo": true, "rome": true}, oslo, rome)
}

// follow runs the commands of a recipe.
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

// applyRecipe applies the objects of a recipe, as kubectl apply does from standard input.
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

// checkAdmitsParisOnly checks that policies of oslo, when enforced, admit pods of paris to the pods
// of oslo, but not pods of rome.
func checkAdmitsParisOnly(t *testing.T, paris, oslo, rome *fleet.Cluster, policies ...string) {
	t.Helper()
	var rules []networkingv1.NetworkPolicyIngressRule
	for _, name := range policies {
		var p networkingv1.NetworkPolicy
		must(t, oslo.Client.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: name}, &p))
		rules = append(rules, p.Spec.Ingress...)
	}
	end := enforce(t, oslo, rules)
	podsToPods(t, paris, oslo)
	nodesToPods(t, paris, oslo)
	checkRefused(t, rome, oslo, podOn(t, rome, 0).Host)
	end()
	podsToPods(t, rome, oslo) // without the policy these pods are admitted

	withParis := slices.IndexFunc(rules, func(r networkingv1.NetworkPolicyIngressRule) bool { return r.From[0].IPBlock != nil })
	block := rules[withParis].From[0].IPBlock
	block.Except = []string{netip.PrefixFrom(netip.MustParsePrefix(block.CIDR).Addr(), 32).String()}
	end = enforce(t, oslo, rules)
	defer end()
	podsToPods(t, paris, oslo)
	checkRefused(t, paris, oslo, paris.Nodes[0].Host)
}

// enforce drops packets to the pods of a cluster from addresses that no rule admits, until end is
// called. It uses the netfilter hook of real policy engines. It ignores ports, because each pod
// has only one.
func enforce(t *testing.T, c *fleet.Cluster, rules []networkingv1.NetworkPolicyIngressRule) (end func()) {
	t.Helper()
	var admit []string
	for _, r := range rules {
		for _, from := range r.From {
			switch block := from.IPBlock; {
			case block == nil: // a namespaceSelector, which selects all pods of the cluster
				admit = append(admit, fmt.Sprintf("ip saddr %v accept", c.PodCIDR))
			case len(block.Except) > 0:
				admit = append(admit, fmt.Sprintf("ip saddr %s ip saddr != { %s } accept", block.CIDR, strings.Join(block.Except, ", ")))
			default:
				admit = append(admit, fmt.Sprintf("ip saddr %s accept", block.CIDR))
			}
		}
	}
	nft := func(line string) {
		t.Helper()
		for _, n := range c.Nodes {
			if out, err := n.Command(t.Context(), "nft", line).CombinedOutput(); err != nil {
				t.Fatalf("%s: nft %s: %v\n%s", n, line, err, out)
			}
		}
	}
	var pods []string
	for _, p := range c.Pods {
		pods = append(pods, p.Addr.String())
	}
	nft(fmt.Sprintf("table ip recipe { chain ingress { %s; drop; }; chain forward { type filter hook forward priority filter; ip daddr { %s } jump ingress; }; }",
		strings.Join(admit, "; "), strings.Join(pods, ", ")))
	return func() { nft("delete table ip recipe") }
}

// checkRefused checks that no pod of a cluster answers a host of another cluster.
func checkRefused(t *testing.T, at, of *fleet.Cluster, from *lab.Host) {
	t.Helper()
	for i := range of.Nodes {
		to := podOn(t, of, i)
		if _, err := from.PingWith(t.Context(), seen(t, at, of, to.Addr), lab.PingOptions{Wait: time.Second}); err == nil {
			t.Errorf("%s -> %s: answered in spite of the policy", from, to)
		}
	}
}
