// Package testbin builds the programs of this repository for tests that run them as processes.
package testbin

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const module = "github.com/isthmus-net/isthmus"

// Isthmus builds the isthmus program in dir and returns its path.
func Isthmus(dir string) (path string, err error) {
	return filepath.Join(dir, "isthmus"), Build(dir, "isthmus")
}

// Build builds programs of cmd/ in dir under their own names. It works from any package of the main
// module and of nested modules. It uses the flags of `make build`, and disables cgo, so that all
// builds share one cache. Under the race detector, cgo would otherwise be on.
func Build(dir string, programs ...string) error {
	packages := make([]string, len(programs))
	for i, p := range programs {
		packages[i] = "cmd/" + p
	}
	return BuildPackage(dir, packages...)
}

// BuildPackage is Build for packages anywhere in the main module.
func BuildPackage(dir string, packages ...string) error {
	root, err := Root()
	if err != nil {
		return err
	}
	args := []string{"build", "-C", root, "-trimpath", "-ldflags=-s -w", "-o", dir + string(filepath.Separator)}
	for _, p := range packages {
		args = append(args, "./"+p)
	}
	cmd := exec.Command("go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, out)
	}
	return nil
}

// Root returns the main module's folder. It also works in a nested module.
func Root() (string, error) {
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		return "", fmt.Errorf("folder of module %s: %w", module, err)
	}
	return strings.TrimSpace(string(root)), nil
}
