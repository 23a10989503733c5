package chart

import (
	"encoding/json"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/deploy"
)

var update = flag.Bool("update", false, "write testdata/defaults.yaml")

func paris(more Values) Values {
	return Merge(Values{"cluster": Values{"name": "paris"}}, more)
}

func objects(t *testing.T, values Values) []*unstructured.Unstructured {
	t.Helper()
	all, err := Objects(Options{Namespace: "elsewhere", AppVersion: "v9", Values: values})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func find(t *testing.T, all []*unstructured.Unstructured, kind, name string) *unstructured.Unstructured {
	t.Helper()
	i := slices.IndexFunc(all, func(u *unstructured.Unstructured) bool { return u.GetKind() == kind && u.GetName() == name })
	if i < 0 {
		t.Fatalf("no %s %s", kind, name)
	}
	return all[i]
}

// everything enables all features that are off by default.
var everything = Values{
	"namespace": Values{"create": true}, "networkPolicy": Values{"enabled": true}, "ipam": Values{"port": 7000.0},
	"metrics": Values{"enabled": true, "podMonitor": Values{"enabled": true}, "prometheusRule": Values{"enabled": true}, "dashboard": Values{"enabled": true}},
}

// The recorded manifests show a reviewer how a change affects the default installation. Other
// values are tested in test/helm, which compares with Helm.
func TestDefaultManifestsMatchRecordedFile(t *testing.T) {
	const file = "testdata/defaults.yaml"
	got, err := Render(Options{Namespace: deploy.Namespace, AppVersion: "0.0.0", Values: paris(Values{"crds": Values{"install": false}})})
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s is not what the chart renders; look at what `go test ./internal/chart -update` changes", file)
	}
}

func TestManifestsUseTheChosenNamespace(t *testing.T) {
	all := objects(t, paris(everything))
	for i, u := range all {
		text, err := u.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), `"`+deploy.Namespace+`"`) {
			t.Errorf("%s %s still says %s", u.GetKind(), u.GetName(), deploy.Namespace)
		}
		if strings.HasSuffix(u.GetKind(), "Role") && (strings.Contains(string(text), `"*"`) || strings.Contains(string(text), `"deletecollection"`)) {
			t.Errorf("%s %s allows everything", u.GetKind(), u.GetName())
		}
		if i > 0 && rank(all[i-1]) > rank(u) {
			t.Errorf("%s %s comes after %s", u.GetKind(), u.GetName(), all[i-1].GetName())
		}
	}
	if all[0].GetName() != "elsewhere" || all[1].GetKind() != "CustomResourceDefinition" {
		t.Errorf("begins with %s, %s", all[0].GetName(), all[1].GetKind())
	}
}

// kubectl applies the objects of a file in order, and does not retry after an error. So each object
// must come after the objects that it needs.
func TestManifestsAreInApplyOrder(t *testing.T) {
	text, err := Manifests(Options{Namespace: "elsewhere", AppVersion: "v9", Values: paris(everything)})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(text) {
		if kind, ok := strings.CutPrefix(line, "kind: "); ok {
			got = append(got, strings.TrimSpace(kind))
		}
	}
	want := objects(t, paris(everything))
	if len(got) != len(want) {
		t.Fatalf("%d manifests, want %d", len(got), len(want))
	}
	for i, u := range want {
		if got[i] != u.GetKind() {
			t.Fatalf("manifest %d is a %s, want %s %s", i, got[i], u.GetKind(), u.GetName())
		}
	}
	order := slices.Compact(got)
	if !slices.Equal(order[:2], []string{"Namespace", "CustomResourceDefinition"}) || !slices.Equal(order[len(order)-2:], []string{"DaemonSet", "Deployment"}) {
		t.Errorf("the kinds are, in this order, %v", order)
	}
}

func TestErrorsNameInvalidValues(t *testing.T) {
	for _, tc := range []struct {
		values Values
		want   string
	}{
		{Values{"gatway": Values{}}, "value gatway: the chart has no such value"},
		{Values{"gateway": Values{"service": Values{"typ": "x"}}}, "value gateway.service.typ: the chart has no such value"},
		{Values{"gateway": Values{"replicas": "3"}}, "value gateway.replicas: want a number"},
		{Values{"gateway": 3.0}, "value gateway: want an object"},
		{Values{"routeAgent": Values{"maxUnavailable": "10%"}}, "value routeAgent.maxUnavailable: renamed to routeAgent.maxSurge"},
		{Values{"routeAgent": Values{"maxSurge": 0.0}}, "value routeAgent.maxSurge: want a number of nodes"},
		{Values{"routeAgent": Values{"maxSurge": "0%"}}, "value routeAgent.maxSurge: want a number of nodes"},
		{Values{"workloads": "yes"}, "value workloads: want true or false"},
		{Values{"gateway": Values{"replicas": 1.5}}, "value gateway.replicas: want a whole number"},
		{Values{"gateway": Values{"service": Values{"nodePort": 99999.0}}}, "value gateway.service.nodePort: want a number from 0 to 65535"},
		{Values{"gateway": Values{"service": Values{"nodePort": 65534.0}, "tunnels": 3.0}}, "value gateway.service.nodePort: want a lower port, because the last of 3 tunnels would exceed 65535"},
		{Values{"gateway": Values{"service": Values{"type": "Nodeport"}}}, `value gateway.service.type: want one of ["" "NodePort"`},
		{Values{"manager": Values{"replicas": -1.0}}, "value manager.replicas: want a number from 0 upwards"},
		{Values{"manager": Values{"extraArgs": []any{"--a", 3.0}}}, "value manager.extraArgs[1]: want text"},
		{Values{"manager": Values{"logLevel": Values{}}}, "value manager.logLevel: want one of"},
		{Values{"networks": Values{"podCIDR": "10.9.0.0/33"}}, "value networks.podCIDR: want a network such as 10.244.0.0/16"},
		{Values{"networks": Values{"podCIDR": "10.300.0.0/16"}}, "value networks.podCIDR: want a network such as 10.244.0.0/16"},
		{Values{"networks": Values{"podCIDR": "10.9.1.0/16"}}, "value networks.podCIDR: 10.9.1.0/16 has host bits set; want 10.9.0.0/16"},
		{Values{"networks": Values{"serviceCIDR": "10.9.0.0/16", "podCIDR": "10.8.0.0/14"}}, "value networks.serviceCIDR: 10.9.0.0/16 overlaps networks.podCIDR, 10.8.0.0/14"},
		{Values{"networks": Values{"reserved": []any{"10.9.0.0/16", "fd00::/129"}}}, "value networks.reserved[1]: want a network"},
		{Values{"image": Values{"tag": strings.Repeat("t", 129)}}, "value image.tag: want a tag of at most 128"},
		{Values{"cluster": Values{"name": ""}}, "cluster.name: want how peers are to call this cluster, such as --set cluster.name=paris"},
	} {
		_, err := Render(Options{Namespace: "n", Values: paris(tc.values)})
		if err == nil || !strings.HasPrefix(err.Error(), tc.want) {
			t.Errorf("%v: %v; want %s", tc.values, err, tc.want)
		}
	}
	for _, right := range []Values{
		{"gateway": Values{"mtu": 1400.0}}, {"gateway": Values{"mtu": "auto"}}, {"manager": Values{"nodeSelector": Values{"a": "b"}}},
		{"routeAgent": Values{"tolerations": []any{}, "maxSurge": 1.0}},
	} {
		if _, err := Render(Options{Namespace: "n", Values: paris(right)}); err != nil {
			t.Errorf("%v: %v", right, err)
		}
	}
}

// The defaults satisfy the schema, and each value in the schema has a default.
func TestSchemaCoversEveryValue(t *testing.T) {
	text, err := deploy.Chart.ReadFile(root + "/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	defaults, err := Defaults()
	if err != nil {
		t.Fatal(err)
	}
	if s, err := readSchema(); err != nil {
		t.Error(err)
	} else if err := s.check(defaults, ""); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	var compare func(path string, schema, values map[string]any)
	compare = func(path string, schema, values map[string]any) {
		if schema["additionalProperties"] != false {
			return // the user chooses the keys
		}
		properties, _ := schema["properties"].(map[string]any)
		known := slices.DeleteFunc(slices.Sorted(maps.Keys(properties)), func(key string) bool {
			property, _ := properties[key].(map[string]any)
			return path == "" && key == "global" || property["deprecated"] == true
		})
		if want := slices.Sorted(maps.Keys(values)); !slices.Equal(known, want) {
			t.Errorf("values.schema.json has at %q %v, values.yaml %v", path, known, want)
		}
		for key, value := range values {
			if inner, ok := value.(map[string]any); ok {
				below, _ := properties[key].(map[string]any)
				compare(path+"."+key, below, inner)
			}
		}
	}
	compare("", schema, defaults)
}

func TestImageTagDefaultsToTheVersion(t *testing.T) {
	for _, tc := range []struct {
		image Values
		want  string
	}{
		{nil, "ghcr.io/isthmus-net/isthmus:v9"},
		{Values{"repository": "a/b", "tag": "t"}, "a/b:t"},
		{Values{"tag": "t", "digest": "sha256:" + strings.Repeat("1", 64)}, "ghcr.io/isthmus-net/isthmus@sha256:" + strings.Repeat("1", 64)},
	} {
		all := objects(t, paris(Values{"image": tc.image}))
		for _, w := range [][2]string{{"Deployment", "isthmus-manager"}, {"Deployment", "isthmus-gateway"}, {"DaemonSet", "isthmus-route-agent"}} {
			containers, _, err := unstructured.NestedSlice(find(t, all, w[0], w[1]).Object, "spec", "template", "spec", "containers")
			if err != nil {
				t.Fatal(err)
			}
			if got := containers[0].(map[string]any)["image"]; got != tc.want {
				t.Errorf("%v: %s has %v, want %s", tc.image, w[1], got, tc.want)
			}
		}
	}
}

func TestVersionLabelTruncatesLongTags(t *testing.T) {
	for tag, want := range map[string]string{
		"v1.2.3": "v1.2.3", strings.Repeat("t", 128): strings.Repeat("t", 63), "_" + strings.Repeat("t", 61) + "._": strings.Repeat("t", 61),
	} {
		manager := find(t, objects(t, paris(Values{"image": Values{"tag": tag}})), "Deployment", "isthmus-manager")
		if got := manager.GetLabels()["app.kubernetes.io/version"]; got != want {
			t.Errorf("tag %s: label %s, want %s", tag, got, want)
		}
	}
}

func TestIPAMRequiresCertificatesIfASecretIsNamed(t *testing.T) {
	for secret, plain := range map[string]bool{"": true, "ipam-tls": false} {
		manager := find(t, objects(t, paris(Values{"ipam": Values{"port": 6000.0, "tlsSecret": secret}})), "Deployment", "isthmus-manager")
		text, err := manager.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		for part, want := range map[string]bool{
			`"--ipam-plain"`: plain, `"--ipam-tls-cert=/etc/isthmus/ipam/tls.crt"`: !plain, `"--ipam-tls-key=/etc/isthmus/ipam/tls.key"`: !plain,
			`"--ipam-client-ca=/etc/isthmus/ipam/ca.crt"`: !plain, `"secretName":"ipam-tls"`: !plain, `"mountPath":"/etc/isthmus/ipam"`: !plain,
		} {
			if strings.Contains(string(text), part) != want {
				t.Errorf("Secret %q: %s is there: %v", secret, part, !want)
			}
		}
	}
}

// The size limit of the state volume must fit both files of a gateway, and the temporary copy of
// one of them that statefile.Write makes.
func TestGatewayStateVolumeHoldsBothFiles(t *testing.T) {
	volumes, _, err := unstructured.NestedSlice(find(t, objects(t, paris(nil)), "Deployment", "isthmus-gateway").Object, "spec", "template", "spec", "volumes")
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range volumes {
		text, ok, err := unstructured.NestedString(v.(map[string]any), "emptyDir", "sizeLimit")
		if err != nil || !ok {
			continue
		}
		if limit := resource.MustParse(text); limit.Value() <= 3*16<<20 {
			t.Errorf("%s for two files of 16 MiB and one that is being written", text)
		}
	}
}

func TestDisruptionBudgetsSelectThePodsOfTheirDeployments(t *testing.T) {
	all := objects(t, paris(nil))
	for _, name := range []string{"isthmus-manager", "isthmus-gateway"} {
		selector := func(kind string) map[string]any {
			s, _, err := unstructured.NestedMap(find(t, all, kind, name).Object, "spec", "selector")
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		if of, budget := selector("Deployment"), selector("PodDisruptionBudget"); !reflect.DeepEqual(of, budget) {
			t.Errorf("%s: the budget is for %v, the Pods are %v", name, budget, of)
		}
	}
}

func TestEachTunnelHasAPort(t *testing.T) {
	all := objects(t, paris(Values{"gateway": Values{"port": 6000.0, "tunnels": 3.0, "service": Values{"nodePort": 30000.0}}}))
	ports, _, err := unstructured.NestedSlice(find(t, all, "Service", "isthmus-gateway").Object, "spec", "ports")
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"wireguard", "wireguard-1", "wireguard-2"} {
		p, _ := ports[i].(map[string]any)
		if p["name"] != want || p["port"] != int64(6000+i) || p["targetPort"] != int64(6000+i) || p["nodePort"] != int64(30000+i) {
			t.Errorf("port %d: %v", i, p)
		}
	}
	if len(ports) != 3 {
		t.Errorf("%d ports", len(ports))
	}
}

// An upgrade must work in a cluster where only one node accepts Pods, so a new gateway may start
// beside the old one. This is impossible if both need the same port of the node.
func TestGatewaysSurgeUnlessTheyUseHostPorts(t *testing.T) {
	for _, tc := range []struct {
		gateway Values
		surge   int64
	}{{nil, 1}, {Values{"hostNetwork": true}, 0}, {Values{"hostPort": true}, 0}} {
		gateway := find(t, objects(t, paris(Values{"gateway": tc.gateway})), "Deployment", "isthmus-gateway")
		surge, _, err := unstructured.NestedInt64(gateway.Object, "spec", "strategy", "rollingUpdate", "maxSurge")
		if err != nil || surge != tc.surge {
			t.Errorf("%v: maxSurge %d, want %d (%v)", tc.gateway, surge, tc.surge, err)
		}
		terms, _, err := unstructured.NestedSlice(gateway.Object, "spec", "template", "spec", "affinity", "podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
		if err != nil || len(terms) != 1 {
			t.Fatalf("%v: %v", terms, err)
		}
		if keys, _, _ := unstructured.NestedStringSlice(terms[0].(map[string]any), "matchLabelKeys"); !slices.Equal(keys, []string{"pod-template-hash"}) {
			t.Errorf("%v: kept apart by %v", tc.gateway, keys)
		}
	}
}

// By default, the nodes elect the active gateway by votes. Gateways on the host network do not use
// votes.
func TestGatewaysUseVotesUnlessOnTheHostNetwork(t *testing.T) {
	for _, tc := range []struct {
		gateway Values
		votes   bool
	}{{nil, true}, {Values{"votes": false}, false}, {Values{"hostNetwork": true}, false}} {
		gateway := find(t, objects(t, paris(Values{"gateway": tc.gateway})), "Deployment", "isthmus-gateway")
		containers, _, err := unstructured.NestedSlice(gateway.Object, "spec", "template", "spec", "containers")
		if err != nil || len(containers) != 1 {
			t.Fatalf("%v: %v", containers, err)
		}
		if args, _, _ := unstructured.NestedStringSlice(containers[0].(map[string]any), "args"); slices.Contains(args, "--votes") != tc.votes {
			t.Errorf("%v: %q", tc.gateway, args)
		}
	}
}

// Privileges are the ways in which a container may affect its node. Each is listed here and in
// docs/security.md, with its reason.
func TestNoComponentHasExtraPrivileges(t *testing.T) {
	const (
		unprivileged = "RuntimeDefault, read-only root, no escalation, drops ALL"
		asRoot       = unprivileged + ", root"
	)
	for _, tc := range []struct {
		hostNetwork bool
		want        map[string]string
	}{
		{false, map[string]string{
			"isthmus-manager":     unprivileged,
			"isthmus-gateway":     asRoot + ", adds NET_ADMIN, hostPath /dev/net/tun (CharDevice)",
			"isthmus-route-agent": asRoot + ", adds NET_ADMIN, hostNetwork, hostPath /var/lib/isthmus (DirectoryOrCreate), hostPath /run/xtables.lock (FileOrCreate)",
		}},
		{true, map[string]string{
			"isthmus-gateway": asRoot + ", adds NET_ADMIN, adds SYS_ADMIN, hostNetwork, hostPath /dev/net/tun (CharDevice)",
		}},
	} {
		got := map[string]string{}
		for _, u := range objects(t, paris(Values{"gateway": Values{"hostNetwork": tc.hostNetwork}})) {
			if spec, ok, _ := unstructured.NestedMap(u.Object, "spec", "template", "spec"); ok {
				got[u.GetName()] = privileges(t, spec)
			}
		}
		for name, want := range tc.want {
			if got[name] != want {
				t.Errorf("hostNetwork %v: %s has: %s\nwant: %s", tc.hostNetwork, name, got[name], want)
			}
		}
		if len(got) != 3 {
			t.Errorf("components: %v", slices.Sorted(maps.Keys(got)))
		}
		for name, row := range map[string]string{"isthmus-manager": "manager", "isthmus-gateway": "gateway", "isthmus-route-agent": "route agent"} {
			if tc.hostNetwork && row == "gateway" {
				row = "gateway with `gateway.hostNetwork`"
			}
			checkDocumented(t, row, got[name])
		}
	}
}

// checkDocumented fails the test if the table in docs/security.md and a manifest have different
// privileges.
func checkDocumented(t *testing.T, component, privileges string) {
	t.Helper()
	text, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "\n| component | privilege | why |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	named, of := "", ""
	for row := range strings.Lines(table) {
		cells := strings.Split(row, "|")
		if len(cells) != 5 {
			t.Fatalf("a row of the table: %q", row)
		}
		if c := strings.TrimSpace(cells[1]); c != "" {
			of = c
		}
		if of != component {
			continue
		}
		named += strings.ReplaceAll(cells[2], "not root", "") + ","
		if cells[2] = strings.TrimSpace(cells[2]); strings.TrimSpace(cells[3]) == "" && !strings.HasPrefix(cells[2], "none") {
			t.Errorf("docs/security.md gives no reason for %s of the %s", cells[2], component)
		}
	}
	if named == "" {
		t.Errorf("docs/security.md has no row of the %s", component)
	}
	privileges = strings.ReplaceAll(privileges, "read-only root", "")
	for _, p := range []string{"NET_ADMIN", "SYS_ADMIN", "hostNetwork", "hostPID", "hostIPC", "privileged", "/dev/net/tun", "/var/lib/isthmus", "root"} {
		if says, has := strings.Contains(named, p), strings.Contains(privileges, p); says != has {
			t.Errorf("docs/security.md says of the %s and %s: %v; the manifest: %v", component, p, says, has)
		}
	}
}

// isthmus install must not apply Helm's hook, and the hook's Pod must have no privileges on its
// node.
func TestOnlyHelmInstallsTheUninstallHook(t *testing.T) {
	for _, u := range objects(t, paris(nil)) {
		if u.GetName() == "isthmus-uninstall" {
			t.Errorf("install applies %s %s", u.GetKind(), u.GetName())
		}
	}
	for _, on := range []bool{true, false} {
		text, err := Render(Options{Namespace: "isthmus-system", Values: paris(Values{"uninstall": Values{"hook": on}})})
		if err != nil {
			t.Fatal(err)
		}
		var job string
		for one := range strings.SplitSeq(text, "\n---\n") {
			if strings.Contains(one, "kind: Job\n") {
				job = one
			}
		}
		if on != (job != "") {
			t.Fatalf("hook %v: the Job is %q", on, job)
		}
		if !on {
			continue
		}
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(job), &u.Object); err != nil {
			t.Fatal(err)
		}
		spec, _, _ := unstructured.NestedMap(u.Object, "spec", "template", "spec")
		if got := privileges(t, spec); got != "RuntimeDefault, read-only root, no escalation, drops ALL" {
			t.Errorf("the hook has: %s", got)
		}
		if u.GetAnnotations()["helm.sh/hook"] != "pre-delete" {
			t.Errorf("annotations: %v", u.GetAnnotations())
		}
	}
}

// privileges formats the privileges of a Pod's spec as one line.
func privileges(t *testing.T, pod map[string]any) string {
	t.Helper()
	at := func(from map[string]any, path ...string) any {
		value, _, err := unstructured.NestedFieldNoCopy(from, path...)
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
	containers, _ := at(pod, "containers").([]any)
	if len(containers) != 1 || at(pod, "initContainers") != nil {
		t.Fatalf("%d containers", len(containers))
	}
	c, _ := containers[0].(map[string]any)
	var all []string
	add := func(is bool, what string) {
		if is {
			all = append(all, what)
		}
	}
	add(at(pod, "securityContext", "seccompProfile", "type") == "RuntimeDefault", "RuntimeDefault")
	add(at(c, "securityContext", "readOnlyRootFilesystem") == true, "read-only root")
	add(at(c, "securityContext", "allowPrivilegeEscalation") == false, "no escalation")
	add(at(c, "securityContext", "privileged") == true, "privileged")
	dropped, _ := at(c, "securityContext", "capabilities", "drop").([]any)
	for _, d := range dropped {
		all = append(all, "drops "+d.(string))
	}
	add(at(pod, "securityContext", "runAsNonRoot") != true, "root")
	added, _ := at(c, "securityContext", "capabilities", "add").([]any)
	for _, a := range added {
		all = append(all, "adds "+a.(string))
	}
	for _, key := range []string{"hostNetwork", "hostPID", "hostIPC"} {
		add(at(pod, key) == true, key)
	}
	volumes, _ := at(pod, "volumes").([]any)
	for _, v := range volumes {
		if path := at(v.(map[string]any), "hostPath", "path"); path != nil {
			all = append(all, "hostPath "+path.(string)+" ("+at(v.(map[string]any), "hostPath", "type").(string)+")")
		}
	}
	return strings.Join(all, ", ")
}

// The chart's folder files/ contains symbolic links to folders outside of it, which Helm follows.
// If a checkout turns a link into a plain file, alerts and dashboard are empty without an error.
func TestChartLinksPointToNonemptyFolders(t *testing.T) {
	entries, err := os.ReadDir("../../deploy/chart/isthmus/files")
	if err != nil || len(entries) == 0 {
		t.Fatalf("%d, %v", len(entries), err)
	}
	for _, e := range entries {
		if inside, err := os.ReadDir(filepath.Join("../../deploy/chart/isthmus/files", e.Name())); err != nil || len(inside) == 0 {
			t.Errorf("%s: %d files, %v", e.Name(), len(inside), err)
		}
	}
}
