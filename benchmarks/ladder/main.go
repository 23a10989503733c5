// Command ladder benchmarks the single steps of the data path, from parsing to two gateways on
// real TUNs. It prints one table in one unit, which shows the cost of each step.
//
//	go run ./benchmarks/ladder -rounds 10 -out benchmarks/ladder.md
//
// It builds each package once. Each round then runs all benchmarks briefly, so that other load on
// the machine affects all steps alike. The last step, real TUNs, needs root.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
)

func main() {
	log.SetFlags(0)
	rounds := flag.Int("rounds", 10, "rounds; each runs every benchmark once")
	d := flag.Duration("duration", 100*time.Millisecond, "duration of one benchmark in a round")
	out := flag.String("out", "", "write the table to this file too")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *rounds, *d, *out); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, rounds int, d time.Duration, out string) error {
	if rounds < 1 {
		return fmt.Errorf("%d rounds: want one or more", rounds)
	}
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return fmt.Errorf("find the module: %w", err)
	}
	module := strings.TrimSpace(string(root))
	programs, err := os.MkdirTemp("", "ladder")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(programs) }()
	for _, pkg := range packages() {
		build := exec.CommandContext(ctx, "go", "test", "-c", "-o", program(programs, pkg), "./"+pkg)
		build.Dir = module
		if text, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("build the benchmarks of %s: %w\n%s", pkg, err, text)
		}
	}
	all := results{}
	for round := range rounds {
		log.Printf("ladder, round %d of %d", round+1, rounds)
		for _, pkg := range packages() {
			cmd := exec.CommandContext(ctx, program(programs, pkg), "-test.run", "^$", "-test.bench", pattern(pkg), "-test.benchmem", "-test.benchtime", d.String())
			cmd.Dir = filepath.Join(module, pkg)
			text, err := cmd.CombinedOutput()
			if err == nil {
				err = all.read(pkg, bytes.NewReader(text))
			}
			if err != nil {
				return fmt.Errorf("benchmarks of %s: %w\n%s", pkg, err, text)
			}
		}
	}
	for _, name := range all.missing() {
		log.Printf("no figure of %s", name)
	}
	text := table(all, measure.Where(), rounds)
	fmt.Print("\n" + text)
	if out == "" {
		return nil
	}
	return os.WriteFile(out, []byte(text), 0o644)
}

// program returns the path of the test program of a package.
func program(folder, pkg string) string {
	return filepath.Join(folder, strings.ReplaceAll(pkg, "/", "-")+".test")
}
