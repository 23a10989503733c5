// Package crd tests the CustomResourceDefinitions in deploy/crds with the API
// server's own code, without an API server: pruning, defaulting, schema
// validation and the rules in CEL. There is nothing in it but tests.
package crd
