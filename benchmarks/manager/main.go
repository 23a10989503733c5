// Command manager measures the CPU and memory of one manager with many peers: while the peers are
// added, at rest, and after a restart that reconnects to all of them.
//
//	go run ./benchmarks/manager -peers 500,1000
//	go run ./benchmarks/manager -services # 1,000 services of ten peers, whose pods are replaced
//
// It runs TestManagerHandlesManyPeerings of test/control and formats its figures as a table. That
// test runs the real manager and two real API servers, and simulates peers that answer. One API
// server is the manager's own. The other acts as the API server of every peer, each with its own
// certificate. With -services, the command runs TestClusterImportsManyServices with two managers.
// Other log output goes to standard error. The command needs the programs that internal/kubetest
// builds. With 500 peers it takes about five minutes on two processors.
package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
)

func main() {
	log.SetFlags(0)
	text := flag.String("peers", "500,1000", "numbers of peers, separated by commas")
	shared := flag.Bool("services", false, "measure imported services instead of numbers of peers")
	profiles := flag.String("profiles", "", "existing directory for profiles of the manager; empty: none, because profiling costs CPU time")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var heads, remarks, rows []string // rows of the table, in order
	cells := make(map[string][]string)
	handle := func(kind, text string) {
		row, cell, _ := strings.Cut(text, " = ")
		switch {
		case kind == "column":
			heads = append(heads, text)
		case kind == "remark":
			remarks = append(remarks, "- "+text)
		case !slices.Contains(rows, row):
			rows = append(rows, row)
			fallthrough
		default:
			cells[row] = append(cells[row], cell)
		}
	}
	if *shared {
		if err := run(ctx, handle, "TestClusterImportsManyServices", "-profiles="+*profiles); err != nil {
			log.Fatal(err)
		}
		*text = ""
	}
	for _, s := range strings.FieldsFunc(*text, func(r rune) bool { return r == ',' }) {
		n, err := strconv.Atoi(s)
		if err != nil || n < 3 || n > 4096 {
			log.Fatalf("-peers %q: want numbers from 3 to 4096", *text)
		}
		heads = append(heads, fmt.Sprintf("%d peers", n))
		log.Printf("%d peers:", n)
		if err := run(ctx, handle, "TestManagerHandlesManyPeerings", fmt.Sprintf("-peers=%d", n), "-profiles="+*profiles); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Printf("%s.\n\n| | %s |\n|---|%s\n", measure.Where(), strings.Join(heads, " | "), strings.Repeat("---|", len(heads)))
	for _, row := range rows {
		fmt.Printf("| %s | %s |\n", row, strings.Join(cells[row], " | "))
	}
	if len(remarks) > 0 {
		fmt.Printf("\n%s\n", strings.Join(remarks, "\n"))
	}
}

// run runs one test. It calls handle for each log line of the test that begins with figure, column
// or remark, and prints the other log lines.
func run(ctx context.Context, handle func(kind, text string), test string, flags ...string) error {
	args := []string{"test", "./control", "-run", "^" + test + "$", "-count=1", "-v", "-timeout=60m", "-long"}
	cmd := exec.CommandContext(ctx, "go", append(args, flags...)...)
	cmd.Dir, cmd.Stderr = "test", os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		_, text, found := strings.Cut(lines.Text(), "_test.go:")
		if !found {
			continue
		}
		_, text, _ = strings.Cut(text, ": ")
		if kind, rest, _ := strings.Cut(text, " "); slices.Contains([]string{"figure", "column", "remark"}, kind) {
			handle(kind, rest)
		} else {
			log.Print("- " + text)
		}
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("%s failed; run it by itself to see its whole output", test)
	}
	return nil
}
