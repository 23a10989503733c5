package kubetest

import (
	"embed"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

//go:embed liqo/*.yaml
var liqoFiles embed.FS

// liqoEnv is the environment variable with the path of a checkout of Liqo v0.x. If it is set,
// LiqoCRDs returns the definitions of that checkout.
const liqoEnv = "ISTHMUS_LIQO"

// LiqoCRDs returns Liqo's own definitions of the kinds of net.liqo.io, one YAML document each. The
// definitions have no status.conditions, so an API server that has them drops our conditions.
// Without a checkout of Liqo, LiqoCRDs returns the files in the folder liqo, which follow
// docs/liqo-v0.md.
func LiqoCRDs() ([][]byte, error) {
	checkout := os.Getenv(liqoEnv)
	kinds, err := fs.Glob(liqoFiles, "liqo/*.yaml")
	if err != nil {
		return nil, err
	}
	crds := make([][]byte, 0, len(kinds))
	for _, name := range kinds {
		text, err := liqoFiles.ReadFile(name)
		if checkout != "" {
			text, err = findCRD(checkout, strings.TrimPrefix(name, "liqo/"))
		}
		if err != nil {
			return nil, err
		}
		crds = append(crds, text)
	}
	return crds, nil
}

// findCRD reads the file of a definition. The file's folder differs between versions of Liqo.
func findCRD(checkout, name string) ([]byte, error) {
	for _, folder := range []string{"deployments/liqo/crds", "deployments/liqo/charts/liqo-crds/crds"} {
		text, err := os.ReadFile(filepath.Join(checkout, folder, name))
		if err == nil || !os.IsNotExist(err) {
			return text, err
		}
	}
	return nil, fmt.Errorf("%s=%s: no file %s in deployments/liqo", liqoEnv, checkout, name)
}
