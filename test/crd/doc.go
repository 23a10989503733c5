// Package crd tests the CustomResourceDefinitions in deploy/crds with the API server's own code,
// without an API server: pruning, defaulting, schema validation and the rules in CEL. There is
// nothing in it but tests.
//
// What is in testdata are links into the main module: go test remembers a result until a file below
// the test's own module changes, and does not look at others.
package crd
