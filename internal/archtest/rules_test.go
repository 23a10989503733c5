// Package archtest holds the project's import rules as code: which package may import which, and
// where the clock may be read. Its test applies them to the whole module.
//
//	cmd ─► manager, gateway, routeagent, internal/source ─► fabric ─► apis, internal/kernel
//	                                                          └────► natengine ─► packet ─► standard library
//
// Imports go in one direction only. A reader can start at any package and never has to look back
// up, and each kind of bug has one possible home.
package archtest

import (
	"fmt"
	"slices"
	"strings"
)

// Module is the path of the main module.
const Module = "github.com/isthmus-net/isthmus"

// A File holds the properties of one Go source file that the rules check.
type File struct {
	Package string   // import path without Module and its slash, e.g. "gateway/tun"; "" is the root
	Name    string   // base name of the file
	Test    bool     // a _test.go file
	Imports []string // complete import paths
	Clock   []string // calls that read the clock or wait, e.g. "time.Now"
}

// A Rule is a condition on one file. Check returns the reason why the file breaks the rule, or ""
// if it does not.
type Rule struct {
	Name  string
	Check func(File) string
}

// Rules are all rules. Unless a rule states otherwise, they exempt test files, which may import
// anything.
var Rules = []Rule{
	{"packet imports only the standard library", importsOnly([]string{"packet"}, nil, nil)},
	{"natengine imports packet and one prefix table", importsOnly([]string{"natengine"}, []string{"packet"}, []string{"github.com/gaissmai/bart"})},
	{"fabric imports apis, natengine, kernel objects and nothing heavy", importsOnly([]string{"fabric"}, []string{"apis", "natengine", "internal/kernel"}, nil)},
	{"apis imports nothing of ours", importsOnly([]string{"apis"}, nil, []string{"k8s.io/apimachinery"})},
	{"internal/diff imports only the standard library", importsOnly([]string{"internal/diff"}, nil, nil)},

	{"pure packages do no I/O", importsNone([]string{"packet", "natengine", "fabric", "internal/kernel", "internal/health"},
		Module+"/internal/kernel/rtnl", "os", "os/*", "io/ioutil", "net", "net/http", "net/rpc", "net/smtp", "net/textproto", "syscall", "log", "log/*", "plugin", "crypto/rand", "testing")},
	{"pure packages read no clock", noClock("packet", "natengine", "fabric", "internal/kernel", "internal/health")},

	{"Kubernetes clients stay in manager and internal/source/kube", onlyIn([]string{"k8s.io/client-go", "sigs.k8s.io/controller-runtime"},
		inPackage("manager"), inPackage("internal/source/kube"), inPackage("internal/owncluster"), inPackage("internal/peering"), inPackage("internal/cluster"), inPackage("internal/clustertest"), inPackage("internal/coredns"), inPackage("internal/place"),
		inPackage("internal/install"), inPackage("internal/uninstall"), inPackage("internal/inspect"), // join clusters
		inPackage("internal/gather"), inPackage("internal/podport"), inPackage("internal/verify"), // inspect clusters
		inPackage("internal/kubetest"), inPackage("internal/fleet"), inPackage("internal/kubenodes"), inPackage("internal/demo"), // create clusters, or show them
		inPackage("benchmarks"),          // measure clusters
		inPackage("internal/kubeauth"))}, // asks the API server whether a client may read metrics
	{"netlink stays in internal/kernel/rtnl", onlyIn([]string{"github.com/vishvananda/netlink", "github.com/mdlayher/netlink", "github.com/jsimonetti/rtnetlink", "github.com/google/nftables"},
		inPackage("internal/kernel/rtnl"), inPackage("internal/lab"), inPackage("benchmarks"))},
	{"wireguard-go stays in gateway", onlyIn([]string{"golang.zx2c4.com/wireguard"}, inPackage("gateway"), inPackage("benchmarks"))},
	{"gVisor stays in gateway", onlyIn([]string{"gvisor.dev/gvisor"}, inPackage("gateway"))},

	{"arrows point one way", downwards},
	{"arrows point one way in manager", inOrder(managerOrder)},
	{"arrows point one way in gateway", inOrder(gatewayOrder)},
}

// managerOrder lists the packages of the manager's controllers. Each may import only the packages
// before it.
var managerOrder = []string{"manager/controllers", "manager/peers", "manager/facts", "manager/exchange", "manager/peerings", "manager"}

// gatewayOrder lists the packages of the gateway. Each may import only the packages before it.
var gatewayOrder = []string{"gateway/bind", "gateway/capture", "gateway/datapath", "gateway/tun", "gateway/flowsync", "gateway/check", "gateway"}

// layers gives each folder its layer. A package may import packages of lower layers and packages of
// its own folder. If several paths match a package, the longest one applies.
var layers = map[string]int{
	"internal/diff":      0,
	"internal/kernel":    1,
	"deploy":             0, // contains only embedded files
	"packet":             0,
	"natengine":          1,
	"apis":               1,
	"fabric":             2,
	"internal/kubetest":  2, // runs API servers and makes clients for them
	"internal/source":    3,
	"internal/cluster":   3, // one cluster, as seen by an operator's client
	"internal/coredns":   4,
	"internal/place":     4,
	"internal/peering":   4,
	"internal/install":   5,
	"internal/uninstall": 6,
	"internal/inspect":   6,
	"internal/lab":       3, // creates clusters and writes their configuration; executes the binary but does not import it
	"gateway":            3,
	"routeagent":         3,
	"manager":            3,
	"internal/verify":    7,
	"internal/gather":    7,
	"cmd":                8,
	"benchmarks":         8,
}

func downwards(f File) string {
	mine, myTree, ok := layerOf(f.Package)
	if !ok {
		return ""
	}
	for _, imp := range f.localImports() {
		its, itsTree, ok := layerOf(imp)
		switch {
		case !ok:
			if strings.HasPrefix(imp, "internal/") {
				continue // the package has no layer, but its own imports are checked
			}
			return fmt.Sprintf("imports %s, which has no layer: add it to the table", imp)
		case its > mine:
			return fmt.Sprintf("imports %s, which lies above it", imp)
		case its == mine && itsTree != myTree:
			return fmt.Sprintf("imports %s, which lies beside it: only cmd knows both", imp)
		}
	}
	return ""
}

// inOrder returns a check that each package of a list imports only packages of the list before
// it.
func inOrder(packages []string) func(File) string {
	return func(f File) string {
		mine := slices.Index(packages, f.Package)
		for _, imp := range f.localImports() {
			if its := slices.Index(packages, imp); its > mine && mine >= 0 {
				return fmt.Sprintf("imports %s, which lies above it", imp)
			}
		}
		return ""
	}
}

func layerOf(pkg string) (layer int, tree string, ok bool) {
	for name, n := range layers {
		if within(pkg, name) && len(name) > len(tree) {
			layer, tree, ok = n, name, true
		}
	}
	return layer, tree, ok
}

// importsOnly returns a check that files in trees import nothing but the standard library, their
// own tree, the given packages of this module (ours) and the given foreign packages (others).
func importsOnly(trees, ours, others []string) func(File) string {
	return func(f File) string {
		if f.Test || !withinAny(f.Package, trees) {
			return ""
		}
		for _, imp := range f.Imports {
			rel, isOurs := strings.CutPrefix(imp, Module+"/")
			switch {
			case isOurs && (withinAny(rel, trees) || withinAny(rel, ours)):
			case !isOurs && (isStandard(imp) || withinAny(imp, others)):
			default:
				return "imports " + imp
			}
		}
		return ""
	}
}

// importsNone returns a check that files in trees import none of the banned packages. "net" bans
// that package alone and permits net/netip; "os/*" bans everything below os.
func importsNone(trees []string, banned ...string) func(File) string {
	return func(f File) string {
		if f.Test || !withinAny(f.Package, trees) || strings.HasSuffix(f.Package, "test") || f.Package == rtnl {
			return "" // package packettest contains helpers for tests
		}
		for _, imp := range f.Imports {
			for _, b := range banned {
				if tree, all := strings.CutSuffix(b, "*"); imp == b || all && strings.HasPrefix(imp, tree) {
					return "imports " + imp
				}
			}
		}
		return ""
	}
}

func noClock(trees ...string) func(File) string {
	return func(f File) string {
		if !f.Test && withinAny(f.Package, trees) && len(f.Clock) > 0 && f.Package != rtnl {
			return "calls " + f.Clock[0]
		}
		return ""
	}
}

// rtnl is the package that does the I/O of internal/kernel.
const rtnl = "internal/kernel/rtnl"

// onlyIn returns a check that the given modules are imported only by test files, and by files for
// which one of the allowed functions returns true.
func onlyIn(modules []string, allowed ...func(File) bool) func(File) string {
	return func(f File) string {
		if f.Test || slices.ContainsFunc(allowed, func(here func(File) bool) bool { return here(f) }) {
			return ""
		}
		for _, imp := range f.Imports {
			if withinAny(imp, modules) {
				return "imports " + imp
			}
		}
		return ""
	}
}

func inPackage(tree string) func(File) bool {
	return func(f File) bool { return within(f.Package, tree) }
}

// localImports lists the packages of this module that f imports, as paths relative to the module.
// It returns none for test files, which may import any package.
func (f File) localImports() (paths []string) {
	if f.Test {
		return nil
	}
	for _, imp := range f.Imports {
		if rel, ok := strings.CutPrefix(imp, Module+"/"); ok {
			paths = append(paths, rel)
		}
	}
	return paths
}

func isStandard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".")
}

func within(path, tree string) bool { return path == tree || strings.HasPrefix(path, tree+"/") }

func withinAny(path string, trees []string) bool {
	return slices.ContainsFunc(trees, func(tree string) bool { return within(path, tree) })
}
