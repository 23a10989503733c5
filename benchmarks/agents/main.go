// Command agents measures the cost of one route agent, or of one gateway Pod, in a large cluster.
// It runs the real process against a real API server with the requested number of Nodes, Pods and
// peers. It writes the initial Nodes, Pods and TunnelEndpoints directly into etcd, in the API
// server's storage format, because that takes only a few seconds. Every later change goes through
// the API server.
//
//	go run ./benchmarks/agents -out benchmarks/agents/after.md   # a route agent, all sizes; run it again after an interruption
//	go run ./benchmarks/agents -role gateway
//	go run ./benchmarks/agents -sizes 5000:20:1000 -isthmus PATH # nodes:pods of each:peers, another build
//	go run ./benchmarks/agents -sizes 200:10:1000 -changes "gets networks" -repeats 20 -profile DIR # profile one change
//
// Everything runs in a separate network namespace. Costs are CPU time, not wall-clock time: other
// load on the machine affects them only through the CPU caches. The command needs root, iproute2
// and the programs that internal/kubetest builds.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/go-logr/logr"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/testbin"
)

// insideEnv is the environment variable by which the program knows that it runs inside the network
// namespace.
const insideEnv = "BENCHMARK_NAMESPACE"

func main() {
	log.SetFlags(log.Ltime)
	ctrllog.SetLogger(logr.Discard())
	sizes := flag.String("sizes", "100:20:10,1000:20:500,5000:20:1000", "nodes:pods of each node:peers, separated by commas")
	var o options
	flag.StringVar(&o.role, "role", agentRole, "what is measured: "+agentRole+" or "+gatewayRole)
	flag.StringVar(&o.program, "isthmus", "", "the program (default: built from this tree)")
	flag.IntVar(&o.repeats, "repeats", 0, "how often each change is made (default: 2 to 10 times)")
	changes := flag.String("changes", "", "only changes whose name matches this regular expression")
	flag.StringVar(&o.profiles, "profile", "", "directory for a profile by perf(1) of each change, the kernel's part and all, which makes the figures higher")
	out := flag.String("out", "", "file for the figures, written after each size; sizes that are already in the file are not measured again")
	flag.Parse()
	var err error
	if o.changes, err = regexp.Compile(*changes); err != nil {
		log.Fatal(err)
	}
	if os.Getenv(insideEnv) == "" {
		if err := reexec(o.program); err != nil {
			log.Fatal(err)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	f, err := unfinished(*out, o.role)
	if err != nil {
		log.Fatal(err)
	}
	for text := range strings.SplitSeq(*sizes, ",") {
		var s size
		if n, err := fmt.Sscanf(text, "%d:%d:%d", &s.nodes, &s.pods, &s.peers); n != 3 {
			log.Fatalf("-sizes %q: want nodes:pods of each node:peers (%v)", text, err)
		}
		if slices.ContainsFunc(f.all, func(r *result) bool { return r.size == s }) {
			log.Printf("%v are in %s", s, *out)
			continue
		}
		r, err := measureSize(ctx, s, o)
		if err != nil {
			log.Fatal(err)
		}
		f.all = append(f.all, r)
		if *out != "" {
			if err := os.WriteFile(*out, []byte(f.text()), 0o644); err != nil {
				log.Fatal(err)
			}
		}
	}
	fmt.Print("\n" + f.text())
}

// reexec builds missing programs, then runs this program again in a new network namespace.
func reexec(program string) error {
	if program == "" {
		dir, err := os.MkdirTemp("", "agents-")
		if err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(dir) }()
		if program, err = testbin.Isthmus(dir); err != nil {
			return err
		}
	}
	if _, err := kubetest.Build(context.Background(), os.Stderr); err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", append(os.Args[1:], "-isthmus", program)...)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGTERM}
	if err := cmd.Run(); errors.As(err, new(*exec.ExitError)) {
		return errors.New("not measured")
	} else if err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	return nil
}
