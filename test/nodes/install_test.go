package nodes

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/kubenodes"
)

// elsewhere matches commands of docs/install.md that this test does not run, because they write
// to this machine's containerd and to a registry.
var elsewhere = regexp.MustCompile(`^(make image-load|skopeo )`)

// The commands of docs/install.md must have the documented effects. Cluster paris has kubeadm's
// ConfigMap, from which install reads the PodCIDR.
func TestCommandsOfInstallPageWork(t *testing.T) {
	if fixture.skip != "" {
		t.Skip(fixture.skip)
	}
	if !*all {
		t.Skip("with -all")
	}
	if _, err := exec.LookPath("kubectl"); err != nil {
		t.Skip("needs kubectl (Debian's package kubernetes-client)")
	}
	dir := t.TempDir()
	// The nodes run one image under several names: the name of the image that the page builds, and
	// the default names of the program and of the chart.
	build, _, _ := strings.Cut(chapter(t, "install.md", "The image"), "\n")
	if out, err := exec.CommandContext(t.Context(), "sh", "-exc", "cd ../..\n"+strings.Replace(build, "make ", "make BIN="+dir+" ", 1)).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	images := []string{filepath.Join(dir, "isthmus-image.tar")}
	standard := defaultImage(t)
	repository, _, _ := strings.Cut(standard, ":")
	for file, name := range map[string]string{"standard.tar": standard, "v1.tar": repository + ":v1"} {
		archive, err := kubenodes.ImageAs(fixture.program, name, filepath.Join(dir, file))
		must(t, err)
		images = append(images, archive)
	}
	w, err := makeClusters(t.Context(), lifecyclePlan, images...)
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(w.a.Explain())
		}
		if err := w.down(); err != nil {
			t.Error(err)
		}
	})
	must(t, w.a.Apply(t.Context(), `
apiVersion: v1
kind: ConfigMap
metadata: {name: kubeadm-config, namespace: kube-system}
data:
  ClusterConfiguration: |
    networking: {podSubnet: `+w.a.PodCIDR.String()+`, serviceSubnet: 10.96.0.0/12}
`))
	must(t, startPods(t.Context(), w.a)) // creates the CNI's bridge and kube-proxy's rules
	before := stateOf(t, w.a)
	sh := &shell{w: w, program: fixture.program}
	sh.run(t, "kubectl config use-context paris") // the page names the context only where it matters
	ran := map[string]bool{"The image": true}
	manifests := filepath.Join(dir, "isthmus.yaml")
	section := func(name string) {
		t.Helper()
		ran[name] = true
		var lines strings.Builder
		for line := range strings.Lines(chapter(t, "install.md", name)) {
			if !elsewhere.MatchString(line) {
				lines.WriteString(line)
			}
		}
		sh.run(t, strings.NewReplacer("'*=IMAGE'", "'*="+newImage+"'", "isthmus.yaml", manifests).Replace(lines.String()))
	}
	rolledOut := func(namespace string) {
		t.Helper()
		sh.run(t, "for what in deployment/isthmus-manager deployment/isthmus-gateway daemonset/isthmus-route-agent; do kubectl -n "+namespace+" rollout status $what --timeout=2m; done")
	}

	section("With the program")
	rolledOut(kubenodes.Namespace)
	text, err := os.ReadFile(manifests)
	must(t, err)
	if !strings.Contains(string(text), "kind: DaemonSet") {
		t.Errorf("static manifests:\n%.2000s", text)
	}
	section("Priority")
	section("Upgrade") // upgrades only the gateways' image
	rolledOut(kubenodes.Namespace)
	var gateways appsv1.Deployment
	must(t, w.a.Client.Get(t.Context(), client.ObjectKey{Namespace: kubenodes.Namespace, Name: "isthmus-gateway"}, &gateways))
	if image := gateways.Spec.Template.Spec.Containers[0].Image; image != newImage {
		t.Errorf("the gateways have the image %s", image)
	}
	uninstall := strings.Split(strings.TrimSpace(chapter(t, "install.md", "Uninstall")), "\n")
	if len(uninstall) != 5 {
		t.Fatalf("the chapter Uninstall has %d commands: %q", len(uninstall), uninstall)
	}
	ran["Uninstall"] = true
	sh.run(t, uninstall[0])
	before.waitSame(t, w.a)

	sh.beside = buildHelm(t)
	section("With Helm")
	rolledOut(kubenodes.Namespace)
	sh.run(t, "isthmus install --context oslo --cluster-name oslo --pod-cidr "+w.b.PodCIDR.String()+"\nisthmus peer --context paris --remote-context oslo")
	sh.run(t, strings.Join(uninstall[1:], "\n"))
	before.waitSame(t, w.a)

	t.Run("beside Liqo", func(t *testing.T) {
		sh.run(t, "kubectl create namespace liqo\nkubectl create -f internal/kubetest/liqo -f manager/testdata/liqo/foreignclusters.yaml")
		must(t, w.a.Apply(t.Context(), `
apiVersion: v1
kind: ConfigMap
metadata: {name: liqo-clusterid-configmap, namespace: liqo, labels: {app.kubernetes.io/name: clusterid-configmap}}
data: {CLUSTER_ID: 8f3f0b5c-6b0e-4d53-9b6f-0a3f7b3f6a11, CLUSTER_NAME: paris}
`))
		definitions := definitionsOf(t, w.a)
		section("Beside Liqo")
		rolledOut("liqo")
		for name, generation := range definitionsOf(t, w.a) {
			if was, liqos := definitions[name]; liqos && was != generation {
				t.Errorf("Liqo's definition %s was changed", name)
			}
		}
		out, err := sh.w.set.Command(t.Context(), "kubectl", "-n", "liqo", "logs", "-l", "app.kubernetes.io/name=manager", "--tail=-1").CombinedOutput()
		if err != nil || !strings.Contains(string(out), `"clusterID":"8f3f0b5c-6b0e-4d53-9b6f-0a3f7b3f6a11"`) || !strings.Contains(string(out), `"foreignClusters":true`) {
			t.Errorf("the manager does not take Liqo's identity and ForeignClusters: %v\n%s", err, out)
		}
		expect.Eventually(t, "an endpoint of the IPAM's Service", func() error {
			var slice discoveryv1.EndpointSlice
			err := w.a.Client.Get(t.Context(), client.ObjectKey{Namespace: "liqo", Name: "isthmus-ipam"}, &slice)
			if err == nil && len(slice.Endpoints) != 1 {
				err = fmt.Errorf("it has %d", len(slice.Endpoints))
			}
			return err
		})
		sh.run(t, "helm uninstall isthmus --namespace liqo --timeout 10m")
		if now := definitionsOf(t, w.a); !slices.ContainsFunc(slices.Collect(maps.Keys(now)), func(name string) bool { return strings.HasSuffix(name, ".net.liqo.io") }) {
			t.Errorf("Liqo's definitions are gone: %v", now)
		}
	})

	page, err := os.ReadFile("../../docs/install.md")
	must(t, err)
	for part := range strings.SplitSeq(string(page), "\n## ") {
		name, rest, _ := strings.Cut(part, "\n")
		if strings.Contains(rest, "\n    ") && !ran[name] {
			t.Errorf("nobody runs the commands of %q", name)
		}
	}
}

// definitionsOf returns the generations of a cluster's custom resource definitions, by name.
func definitionsOf(t *testing.T, c *kubenodes.Cluster) map[string]int64 {
	t.Helper()
	list, err := metadata.NewForConfigOrDie(c.Config).Resource(apiextensionsv1.SchemeGroupVersion.WithResource("customresourcedefinitions")).List(t.Context(), metav1.ListOptions{})
	must(t, err)
	all := map[string]int64{}
	for _, o := range list.Items {
		all[o.Name] = o.Generation
	}
	return all
}

// defaultImage returns the image that the program installs by default.
func defaultImage(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), fixture.program, "install", "--cluster-name", "x", "--pod-cidr", "10.0.0.0/16", "--print").Output()
	must(t, err)
	image := regexp.MustCompile(`image: "?([^"\s]+)`).FindSubmatch(out)
	if image == nil {
		t.Fatal("no image in the manifests")
	}
	return string(image[1])
}
