package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestModuleFollowsImportRules(t *testing.T) {
	files := load(t, filepath.Join("..", ".."))
	if len(files) < 10 {
		t.Fatalf("found only %d files: looking in the wrong place", len(files))
	}
	for _, f := range files {
		for _, r := range Rules {
			if why := r.Check(f); why != "" {
				t.Errorf("%s/%s %s (%s)", f.Package, f.Name, why, r.Name)
			}
		}
	}
}

// Code that creates clusters on one machine, or shows them, belongs to isthmus-lab. The program
// isthmus, which runs in clusters, must not link it.
func TestIsthmusDoesNotLinkTheLab(t *testing.T) {
	deps := func(pkg string) []string {
		out, err := exec.Command("go", "list", "-deps", Module+"/cmd/"+pkg).Output()
		if err != nil {
			t.Fatalf("go list -deps: %v", err)
		}
		return strings.Fields(string(out))
	}
	linked, lab := deps("isthmus"), deps("isthmus-lab")
	for _, tree := range []string{"internal/lab", "internal/fleet", "internal/demo", "internal/kubetest"} {
		if slices.Contains(linked, Module+"/"+tree) {
			t.Errorf("isthmus links %s, which is isthmus-lab's alone", tree)
		}
		if !slices.Contains(lab, Module+"/"+tree) {
			t.Errorf("isthmus-lab does not link %s: the name above is out of date", tree)
		}
	}
}

// Each row is a file that breaks exactly one rule, or a similar file that the rule must accept.
func TestEachImportRuleDetectsItsViolation(t *testing.T) {
	file := func(pkg, name string, imports ...string) File {
		return File{Package: pkg, Name: name, Imports: imports}
	}
	for _, tc := range []struct {
		file File
		rule string // empty: the file breaks no rule
	}{
		{file("packet", "view.go", "net/netip", "encoding/binary", Module+"/packet"), ""},
		{file("packet", "view.go", "golang.org/x/sys/unix"), "packet imports only the standard library"},
		{file("packet/packettest", "check.go", "testing"), ""},
		{file("packet", "view.go", "net"), "pure packages do no I/O"},
		{file("natengine", "rules.go", "github.com/gaissmai/bart", Module+"/packet"), ""},
		{file("natengine", "rules.go", "k8s.io/apimachinery/pkg/types"), "natengine imports packet and one prefix table"},
		{file("natengine", "rules.go", "log/slog"), "pure packages do no I/O"},
		{file("fabric", "gateway.go", Module+"/apis/net/v1alpha1", Module+"/natengine", "time"), ""},
		{file("fabric", "gateway.go", "sigs.k8s.io/yaml"), "fabric imports apis, natengine, kernel objects and nothing heavy"},
		{file("fabric", "gateway.go", "os"), "pure packages do no I/O"},
		{file("fabric", "node.go", Module+"/internal/kernel"), ""},
		{file("fabric", "node.go", Module+"/internal/kernel/rtnl"), "pure packages do no I/O"},
		{file("internal/kernel", "plan.go", Module+"/internal/diff"), ""},
		{file("internal/kernel", "plan.go", Module+"/internal/kernel/rtnl"), "pure packages do no I/O"},
		{file("fabric", "gateway.go", "syscall"), "pure packages do no I/O"},
		{File{Package: "fabric", Name: "gateway.go", Clock: []string{"time.Now"}}, "pure packages read no clock"},
		{File{Package: "fabric", Name: "gateway_test.go", Test: true, Clock: []string{"time.Now"}}, ""},
		{File{Package: "gateway/check", Name: "check.go", Clock: []string{"time.Now"}}, ""},
		{file("apis/net/v1alpha1", "types.go", "k8s.io/apimachinery/pkg/apis/meta/v1"), ""},
		{file("apis/net/v1alpha1", "types.go", "k8s.io/api/core/v1"), "apis imports nothing of ours"},
		{file("internal/diff", "diff.go", "golang.org/x/exp/slices"), "internal/diff imports only the standard library"},
		{file("manager/ipam", "x.go", "k8s.io/client-go/rest"), ""},
		{file("internal/source/kube", "watch.go", "sigs.k8s.io/controller-runtime/pkg/client"), ""},
		{file("gateway", "run.go", "k8s.io/client-go/rest"), "Kubernetes clients stay in manager and internal/source/kube"},
		{file("internal/kernel/rtnl", "netlink_linux.go", "github.com/vishvananda/netlink", "os"), ""},
		{file("internal/lab", "link.go", "github.com/vishvananda/netlink"), ""},
		{file("routeagent", "filter.go", "github.com/google/nftables"), "netlink stays in internal/kernel/rtnl"},
		{file("routeagent", "apply.go", "github.com/vishvananda/netlink"), "netlink stays in internal/kernel/rtnl"},
		{file("gateway/datapath", "x.go", "golang.zx2c4.com/wireguard/tun"), ""},
		{file("internal/lab", "x.go", "golang.zx2c4.com/wireguard/device"), "wireguard-go stays in gateway"},
		{file("internal/lab", "x.go", "gvisor.dev/gvisor/pkg/tcpip"), "gVisor stays in gateway"},
		{file("cmd/isthmus", "gateway.go", Module+"/gateway", Module+"/internal/source/file", Module+"/internal/anything"), ""},
		{file("gateway", "run.go", Module+"/gateway/tun", Module+"/fabric"), ""},
		{file("gateway", "tunnels.go", Module+"/gateway/check"), ""},
		{file("gateway/check", "away.go", Module+"/gateway/datapath"), ""},
		{file("gateway/datapath", "port.go", Module+"/gateway/check"), "arrows point one way in gateway"},
		{file("gateway", "run.go", Module+"/manager"), "arrows point one way"},
		{file("gateway", "run.go", Module+"/cmd/isthmus"), "arrows point one way"},
		{file("gateway", "run.go", Module+"/elsewhere"), "arrows point one way"},
		{file("internal/inspect", "hops.go", Module+"/internal/install", Module+"/internal/cluster"), ""},
		{file("internal/cluster", "cluster.go", Module+"/internal/peering"), "arrows point one way"},
		{file("internal/peering", "peer.go", Module+"/internal/install"), "arrows point one way"},
		{file("internal/peering", "peer.go", Module+"/internal/place"), "arrows point one way"},
		{file("internal/install", "install.go", Module+"/internal/inspect"), "arrows point one way"},
		{file("manager", "manager.go", Module+"/manager/peers", Module+"/manager/ipam"), ""},
		{file("manager/peers", "peer.go", Module+"/manager/controllers"), ""},
		{file("manager/controllers", "controllers.go", Module+"/manager/peers"), "arrows point one way in manager"},
	} {
		var caught []string
		for _, r := range Rules {
			if r.Check(tc.file) != "" {
				caught = append(caught, r.Name)
			}
		}
		if got := strings.Join(caught, "; "); got != tc.rule {
			t.Errorf("%s/%s with imports %v, clock %v\n got: %q\nwant: %q", tc.file.Package, tc.file.Name, tc.file.Imports, tc.file.Clock, got, tc.rule)
		}
	}
}

// load parses every Go file of the main module, regardless of build constraints. It skips nested
// modules.
func load(t *testing.T, root string) (files []File) {
	t.Helper()
	fset := token.NewFileSet()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			nested := false
			if path != root {
				_, err := os.Stat(filepath.Join(path, "go.mod"))
				nested = err == nil
			}
			if nested || d.Name() == "testdata" || d.Name() == ".git" || d.Name() == "bin" {
				return filepath.SkipDir
			}
			return nil
		}
		if filepath.Ext(path) != ".go" {
			return nil
		}
		parsed, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		f := File{Package: filepath.ToSlash(dir), Name: d.Name(), Test: strings.HasSuffix(path, "_test.go"), Clock: clockCalls(parsed)}
		for _, imp := range parsed.Imports {
			p, err := strconv.Unquote(imp.Path.Value)
			if err != nil {
				return err
			}
			f.Imports = append(f.Imports, p)
		}
		files = append(files, f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// clockCalls finds uses of the time package's functions that read the clock or wait. It assumes
// that no file imports the package under another name.
func clockCalls(f *ast.File) (calls []string) {
	clock := map[string]bool{"Now": true, "Since": true, "Until": true, "Sleep": true, "After": true, "AfterFunc": true,
		"Tick": true, "NewTicker": true, "NewTimer": true}
	ast.Inspect(f, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if pkg, ok := sel.X.(*ast.Ident); ok && pkg.Name == "time" && clock[sel.Sel.Name] {
				calls = append(calls, "time."+sel.Sel.Name)
			}
		}
		return true
	})
	return calls
}
