package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/demo"
	"github.com/isthmus-net/isthmus/internal/kubenodes"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/source/kube"
)

func newDemoCommand() *cobra.Command {
	var o demo.Options
	var kubernetes bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Join clusters with the same PodCIDR on this machine and show what works (root)",
		Long: `Show Isthmus at work in network namespaces on this machine. The first part joins two
clusters by configuration files, and breaks one of the files on purpose. The second part
creates three clusters of three nodes, each with its own API server and all with the same
PodCIDR. It peers each pair by the command line, and sends real traffic, permitted and
refused. Each step is checked; the exit code is 0 if all succeed. Nothing remains at the
end, or after Ctrl-C.

The second part needs etcd and kube-apiserver. If they are missing, they are built from
source while the first part runs. This takes some minutes, once, and needs a checkout of
the source.

With --kubernetes there are two clusters with real nodes instead: kubelet, containerd,
the bridge CNI plugin and kube-proxy. The demo installs Isthmus as usual and shows the time
of each step. At the end a pod of one cluster gets an HTTP answer from the other by the
name of a Service. Then both clusters export the Service, one of them fails, and the pod
still gets answers.`,
		Args: cobra.NoArgs,
		RunE: needsRoot(func(cmd *cobra.Command, _ []string) (err error) {
			if err := lab.Available(); err != nil {
				return cli.Usage("%w", err)
			}
			if o.Binary, err = program(o.Binary); err != nil {
				return err
			}
			o.Out = cmd.OutOrStdout()
			o.Color = o.Out == os.Stdout && isTerminal(os.Stdout)
			if kubernetes {
				if err := kubenodes.Available(); err != nil {
					return cli.Usage("%w", err)
				}
				o.Kube = func(ctx context.Context) (string, error) { return kubetest.BuildNodes(ctx, cmd.ErrOrStderr()) }
				kube.UseLogger(slog.New(slog.DiscardHandler)) // without a logger, the client library prints a warning
				return downHint(demo.RunKubernetes(cmd.Context(), o), o.Name)
			}
			fmt.Fprintln(o.Out, "Two clusters joined by files, then three with API servers, all on this machine, with real traffic between their pods.")
			b := build(cmd.Context(), cmd.ErrOrStderr())
			defer b.end()
			o.Kube = b.wait
			return downHint(demo.Run(cmd.Context(), o), o.Name)
		}),
	}
	addProgramFlag(cmd.Flags(), &o.Binary)
	cmd.Flags().BoolVar(&kubernetes, "kubernetes", false, "make two clusters with real kubelets instead, and share a Service by name")
	cmd.Flags().BoolVar(&o.Keep, "keep", false, "keep the clusters at the end, until Ctrl-C")
	cmd.Flags().StringVar(&o.Name, "name", "demo", "name of the lab")
	return cmd
}

// A kubeBuild compiles etcd and the Kubernetes programs in the background, while the demo shows its
// first steps.
type kubeBuild struct {
	cancel context.CancelFunc
	done   chan struct{}
	shown  *gate
	dir    string // dir and err may be read after done is closed
	err    error
}

func build(ctx context.Context, progress io.Writer) *kubeBuild {
	b := &kubeBuild{done: make(chan struct{}), shown: &gate{w: progress}}
	ctx, b.cancel = context.WithCancel(ctx)
	go func() {
		defer close(b.done)
		b.dir, b.err = kubetest.Build(ctx, b.shown)
	}()
	return b
}

// wait prints the progress until the build ends, and returns the directory with the programs.
func (b *kubeBuild) wait(ctx context.Context) (string, error) {
	b.shown.open()
	select {
	case <-b.done:
		return b.dir, b.err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// end cancels an unfinished build.
func (b *kubeBuild) end() {
	b.cancel()
	<-b.done
}

// A gate is a writer that is closed at first. A closed gate stores only the last write. When the
// gate opens, it forwards that write and all later ones.
type gate struct {
	w io.Writer

	mu     sync.Mutex
	opened bool
	newest []byte
}

func (g *gate) Write(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.opened {
		return g.w.Write(p)
	}
	g.newest = append(g.newest[:0], p...)
	return len(p), nil
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.opened = true; len(g.newest) > 0 {
		_, _ = g.w.Write(append([]byte("\n"), g.newest...)) // ignore the error: only the progress would be missing
	}
}

// isTerminal reports whether f is a terminal on which the user permits colours
// (https://no-color.org).
func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}
