package nodes

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/internal/image"
	"github.com/isthmus-net/isthmus/internal/kubenodes"
)

var suite = flag.String("suite", "", "a checkout of kubernetes-sigs/mcs-api, whose conformance suite is run (make test-mcs)")

// ofPods is the only spec that cannot pass with address translation, because it expects the
// importer's DNS to return the addresses that pods have in the exporting cluster.
const ofPods = "headless service should return the ready endpoint addresses of all the backing pods"

// This test runs the unmodified conformance suite of the Multi-Cluster Services API, from the
// checkout given by -suite. docs/mcs-conformance.md shows the results.
func TestServicesPassTheMultiClusterConformanceSuite(t *testing.T) {
	if *suite == "" {
		t.Skip("needs the conformance suite: -suite PATH (make test-mcs SUITE=PATH)")
	}
	if out, err := exec.CommandContext(t.Context(), "git", "-C", *suite, "status", "--porcelain").CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%s is no unmodified checkout: %v\n%s", *suite, err, out)
	}
	commit, err := exec.CommandContext(t.Context(), "git", "-C", *suite, "log", "-1", "--format=%H %cs").Output()
	t.Logf("mcs-api %s (%v)", commit, err)
	for _, c := range []struct {
		name  string
		pods  [2]string
		upper bool // pods of cluster b have different addresses than those of cluster a
		fails string
	}{
		{name: "disjoint PodCIDRs", pods: [2]string{"10.244.0.0/16", "10.20.0.0/16"}},
		// With equal addresses, a spec could pass by accident: it expects an answer of a pod of
		// cluster a, and a pod of cluster b with the same address sends it.
		{name: "the same PodCIDR, no address used twice", pods: samePlan.pods, upper: true, fails: ofPods},
		{name: "the same PodCIDR, addresses used twice", pods: samePlan.pods, fails: ofPods},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := samePlan
			p.name, p.pods = c.name, c.pods
			p.nodes[1].UpperHalf = c.upper
			dir := t.TempDir()
			var images []string
			for name, programs := range suiteImages {
				archive := filepath.Join(dir, strings.NewReplacer("/", "-", ":", "-").Replace(name)+".tar")
				must(t, imageOfPrograms(t.Context(), archive, name, programs))
				images = append(images, archive)
			}
			program := filepath.Join(dir, "conformance.test")
			must(t, buildSuite(t.Context(), program))
			w := namesWorld(t, p, images...)
			must(t, w.set.Install(t.Context(), fixture.program, "--services", "--configure-dns"))
			must(t, w.set.Peer(t.Context(), fixture.program, w.a, w.b, "--services", "*"))
			must(t, w.a.Watch(t.Context(), w.sniffer, w.b))
			must(t, w.b.Watch(t.Context(), w.sniffer, w.a))
			w.waitNames(t)

			addressesA, addressesB := addressesOfSuite(t, w.a), addressesOfSuite(t, w.b)
			specs := w.runSuite(t, program)
			ofA, ofB := addressesA(), addressesB()
			both := 0
			for _, a := range ofA {
				if slices.Contains(ofB, a) {
					both++
				}
			}
			t.Logf("the suite's pods had %d addresses in a and %d in b, %d of them in both", len(ofA), len(ofB), both)
			if twice := c.fails != "" && !c.upper; twice && both < 10 || !twice && both > 0 {
				t.Errorf("%d addresses are used in both clusters", both)
			}
			for _, s := range specs {
				if want := c.fails == "" || !strings.Contains(s.Desc, c.fails); s.Passed != want {
					t.Errorf("passed %v, want %v: %s%s", s.Passed, want, s.Desc, s.Message)
				}
			}
			if len(specs) != 27 {
				t.Errorf("%d specs, want 27", len(specs))
			}
			if c.fails != "" { // repeat that spec with the expected addresses from the EndpointSlice
				must(t, buildSuite(t.Context(), program, "-overlay", expectingSlices(t, dir)))
				specs := w.runSuite(t, program, "-ginkgo.focus", regexp.QuoteMeta(c.fails))
				if len(specs) != 1 || !specs[0].Passed {
					t.Errorf("with the addresses of the EndpointSlice: %+v", specs)
				}
			}
			w.noPlaintext(t)
		})
	}
}

// waitNames waits until CoreDNS of both clusters answers for clusterset.local. It recreates the
// Pods of CoreDNS, because new Pods read the new Corefile at once.
func (w *world) waitNames(t *testing.T) {
	t.Helper()
	for _, c := range w.set.Clusters {
		must(t, c.Client.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace("kube-system"), client.MatchingLabels{"k8s-app": "kube-dns"}))
	}
	for _, c := range w.set.Clusters {
		for deadline := time.Now().Add(patience); ; time.Sleep(2 * time.Second) {
			if out, code := w.isthmus(t, "diagnose", "--context", c.Name); code == 0 && strings.Contains(out, "CoreDNS answers for clusterset.local") {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("CoreDNS of cluster %s does not answer", c.Name)
			}
		}
	}
}

// A spec is an entry of the suite's report.
type spec struct {
	Desc            string
	Labels          []string
	Passed, Skipped bool
	Message         string
}

// runSuite runs the suite and returns the specs that were not skipped. In the suite, cluster a is
// the exporter, and in some specs cluster b is a second exporter.
func (w *world) runSuite(t *testing.T, program string, flags ...string) (specs []spec) {
	t.Helper()
	dir := t.TempDir()
	cmd := w.set.Command(t.Context(), program, append([]string{"-contexts", "a,b", "-ginkgo.no-color", "-ginkgo.v", "-project", "Isthmus"}, flags...)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, t.Output(), t.Output()
	begin := time.Now()
	err := cmd.Run()
	t.Logf("after %.0f s: %v", time.Since(begin).Seconds(), err)
	text, err := os.ReadFile(filepath.Join(dir, "report.yaml"))
	must(t, err)
	var report struct {
		Groups []struct {
			Name  string
			Tests []spec
		}
	}
	must(t, yaml.Unmarshal(text, &report))
	var table strings.Builder
	passed := 0
	for _, g := range report.Groups {
		for _, s := range g.Tests {
			if s.Skipped {
				continue
			}
			if s.Passed {
				passed++
			}
			fmt.Fprintf(&table, "| %s | %s | %s | %v%s |\n", g.Name, strings.Join(s.Labels, ", "), s.Desc, s.Passed, s.Message)
			specs = append(specs, s)
		}
	}
	t.Logf("%d of %d pass\n%s", passed, len(specs), table.String())
	return specs
}

// addressesOfSuite records the addresses of the suite's pods until the returned function is
// called, which returns them.
func addressesOfSuite(t *testing.T, c *kubenodes.Cluster) func() []netip.Addr {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	found := map[netip.Addr]bool{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			var pods corev1.PodList
			if c.Client.List(ctx, &pods) == nil {
				for _, p := range pods.Items {
					if addr, err := netip.ParseAddr(p.Status.PodIP); err == nil && strings.HasPrefix(p.Namespace, "mcs-conformance-") {
						found[addr] = true
					}
				}
			}
			time.Sleep(500 * time.Millisecond)
		}
	}()
	return func() (all []netip.Addr) {
		cancel()
		<-done
		for a := range found {
			all = append(all, a)
		}
		return all
	}
}

// buildSuite builds the suite with the dependencies of its own module.
func buildSuite(ctx context.Context, program string, flags ...string) error {
	args := append([]string{"test", "-c", "-trimpath", "-o", program}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, ".")...)
	cmd.Dir = filepath.Join(*suite, "conformance")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the conformance suite in %s: %w\n%s", cmd.Dir, err, out)
	}
	return nil
}

// expectingSlices returns a file for the flag -overlay of go build. It changes ofPods to expect
// the addresses in the EndpointSlice of the importing cluster. The checkout stays unmodified.
func expectingSlices(t *testing.T, dir string) string {
	t.Helper()
	file, err := filepath.Abs(filepath.Join(*suite, "conformance", "headless_service_dns.go"))
	must(t, err)
	text, err := os.ReadFile(file)
	must(t, err)
	call := regexp.MustCompile(`t\.awaitK8sEndpoints\(ctx, &clients\[0\], (addressTypeOf\(ipFamily\))\)`)
	at := call.FindSubmatchIndex(text)
	if at == nil {
		t.Fatalf("%s has changed: it does not compare with the addresses of pods", file)
	}
	changed := string(text[:at[0]]) + `func() (all []endpointInfo) {
		slice := t.awaitMCSEndpointSlice(ctx, &client, ` + string(text[at[2]:at[3]]) + `, func(g Gomega, s *discovery.EndpointSlice) {
			g.Expect(s.Endpoints).To(HaveLen(replicas))
		})
		for _, e := range slice.Endpoints {
			all = append(all, endpointInfo{address: e.Addresses[0]})
		}
		return all
	}()` + string(text[at[1]:])
	with, overlay := filepath.Join(dir, "headless_service_dns.go"), filepath.Join(dir, "overlay.json")
	must(t, os.WriteFile(with, []byte(changed), 0o644))
	b, err := json.Marshal(map[string]any{"Replace": map[string]string{file: with}})
	must(t, err)
	must(t, os.WriteFile(overlay, b, 0o644))
	return overlay
}

// suiteImages maps the images of the suite's pods to the programs that the suite calls in them.
// The key is the name in the image, the value the name on this machine.
var suiteImages = map[string]map[string]string{
	"docker.io/alpine/socat:1.7.4.4":    {"sh": "dash", "socat": "socat", "grep": "grep", "tr": "tr", "awk": "awk"},
	"docker.io/nicolaka/netshoot:v0.15": {"sh": "dash", "nc": "nc.openbsd", "nslookup": "nslookup", "grep": "grep", "tail": "tail", "awk": "awk", "sleep": "sleep"},
}

// imageOfPrograms writes the archive of an image with programs of this machine and the libraries
// to which they are linked.
func imageOfPrograms(ctx context.Context, archive, ref string, programs map[string]string) (err error) {
	content := map[string]string{} // path on this machine by path in the image
	for name, program := range programs {
		path, err := exec.LookPath(program)
		if err != nil {
			return fmt.Errorf("%w (make deps-mcs installs it)", err)
		}
		content["/"+name] = path // PATH in the image is /
		if name == "sh" {
			content["/bin/sh"] = path
		}
		out, err := exec.CommandContext(ctx, "ldd", path).Output()
		if err != nil {
			return fmt.Errorf("ldd %s: %w", path, err)
		}
		for _, word := range strings.Fields(string(out)) {
			if filepath.IsAbs(word) {
				content[filepath.Clean(word)] = word
			}
		}
	}
	p := image.Platform{OS: "linux", Architecture: runtime.GOARCH}
	for there, here := range content {
		b, err := os.ReadFile(here)
		if err != nil {
			return err
		}
		p.Files = append(p.Files, image.File{Path: there, Content: b, Mode: 0o755})
	}
	f, err := os.Create(archive)
	if err != nil {
		return err
	}
	_, err = image.Image{Ref: ref, Created: time.Unix(0, 0), Platforms: []image.Platform{p}}.Write(f)
	return errors.Join(err, f.Close())
}
