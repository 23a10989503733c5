// Command testpod runs in the pods of test clusters. "serve" answers probes, and sends probes on
// request. Without this argument, the program only waits for a signal, and serves as the pause
// container that holds a pod's namespaces.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/isthmus-net/isthmus/internal/kubenodes/probe"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "testpod:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	switch {
	case len(args) == 2 && args[0] == "serve":
		port, err := strconv.ParseUint(args[1], 10, 16)
		if err != nil {
			return err
		}
		return (&probe.Server{Name: os.Getenv("POD_NAME")}).Serve(ctx, uint16(port))
	default: // the kubelet passes no arguments to the pause container
		<-ctx.Done()
		return nil
	}
}
