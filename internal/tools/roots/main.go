// Command roots prints Mozilla's certificate authorities in PEM, from the version of
// golang.org/x/crypto/x509roots/fallback in go.mod. They go into the image, and each build of a
// commit gets the same ones. Authorities that Mozilla trusts only under conditions are left out,
// because a PEM file cannot express conditions.
package main

import (
	"encoding/pem"
	"fmt"
	"os"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

func main() {
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
