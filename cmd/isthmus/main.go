// Command isthmus joins the pod networks of Kubernetes clusters.
//
//	isthmus gateway --config DIR     run a gateway
//	isthmus status                   what it is doing
//	isthmus trace SRC DST            what it would do with a packet
//	isthmus genkey | pubkey          WireGuard keys
//
// The exit code is 0 when all is fine, 1 when a problem was found and 2 when the
// command was used wrongly or what it asks could not be reached.
package main

import (
	"io"
	"os"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is the whole program; it returns the exit code.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRootCommand()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return exitCode(root, root.Execute())
}
