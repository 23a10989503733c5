// Command roots prints the certificate authorities of Mozilla in PEM, as the version of
// golang.org/x/crypto/x509roots/fallback in go.mod has them: the image gets them, and each build of
// a commit gets the same. Those that Mozilla trusts with conditions that a file cannot say are left
// out.
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
