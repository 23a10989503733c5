// Command roots prints Mozilla's certificate authorities in PEM. It takes them from
// golang.org/x/crypto/x509roots/fallback, in the version that go.mod requires. The first line
// contains that version, for the SBOM. The output becomes part of the image, and is the same for
// each build of a commit. Mozilla trusts some authorities only under conditions, which PEM cannot
// express. The command omits these authorities.
package main

import (
	"encoding/pem"
	"fmt"
	"os"
	"runtime/debug"
	"slices"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

const module = "golang.org/x/crypto/x509roots/fallback"

func main() {
	info, ok := debug.ReadBuildInfo()
	at := -1
	if ok {
		at = slices.IndexFunc(info.Deps, func(m *debug.Module) bool { return m.Path == module })
	}
	if at < 0 {
		fmt.Fprintln(os.Stderr, "roots: built without the version of", module)
		os.Exit(1)
	}
	fmt.Println("#", module, info.Deps[at].Version)
	for root := range bundle.Roots() {
		if root.Constraint != nil {
			continue
		}
		if err := pem.Encode(os.Stdout, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
