// Package crd tests the CustomResourceDefinitions in deploy/crds with the API server's own code,
// without an API server: pruning, defaulting, schema validation and the rules in CEL. The package
// contains only tests.
//
// The files in testdata are links into the main module. go test caches a result until a file of the
// test's own module changes, and does not notice changes of other files.
package crd
