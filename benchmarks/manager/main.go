// Command manager measures what one manager costs with many peers: CPU and memory when they come, at
// rest, and when it starts again among them and reconnects to all.
//
//	go run ./benchmarks/manager -peers 500,1000
//
// It runs TestManyPeerings of test/control, which has the real manager, two real API servers (one
// stands for those of all peers, and knows each by a certificate of its own) and peers that answer, and
// makes a table of its figures. What else it logs goes to standard error. It needs the programs that
// internal/kubetest builds. With 500 peers it takes some five minutes on two processors.
package main

import (
	"bufio"
	"context"
	"errors"
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
	profiles := flag.String("profiles", "", "existing directory for profiles of the manager; empty: none, since taking them costs something")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var head string
	var rows []string // of the table, in order
	cells := make(map[string][]string)
	for s := range strings.SplitSeq(*text, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 3 || n > 4096 {
			log.Fatalf("-peers %q: want numbers from 3 to 4096", *text)
		}
		head += fmt.Sprintf(" %d peers |", n)
		log.Printf("%d peers:", n)
		err = run(ctx, n, *profiles, func(row, cell string) {
			if !slices.Contains(rows, row) {
				rows = append(rows, row)
			}
			cells[row] = append(cells[row], cell)
		})
		if err != nil {
			log.Fatal(err)
		}
	}
	fmt.Printf("%s.\n\n| |%s\n|---|%s\n", measure.Where(), head, strings.Repeat("---|", strings.Count(*text, ",")+1))
	for _, row := range rows {
		fmt.Printf("| %s | %s |\n", row, strings.Join(cells[row], " | "))
	}
}

// run takes the figures of one test, and logs its other lines.
func run(ctx context.Context, peers int, profiles string, figure func(row, cell string)) error {
	cmd := exec.CommandContext(ctx, "go", "test", "./control", "-run", "^TestManyPeerings$", "-count=1", "-v", "-timeout=60m", "-long", fmt.Sprintf("-peers=%d", peers), "-profiles="+profiles)
	cmd.Dir, cmd.Stderr = "test", os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if _, text, is := strings.Cut(lines.Text(), "scale_test.go:"); is {
			_, text, _ = strings.Cut(text, ": ")
			if f, is := strings.CutPrefix(text, "figure "); is {
				row, cell, _ := strings.Cut(f, " = ")
				figure(row, cell)
				continue
			}
			log.Print("- " + text)
		}
	}
	if err := cmd.Wait(); err != nil {
		return errors.New("TestManyPeerings failed; see above, or run it by itself")
	}
	return nil
}
