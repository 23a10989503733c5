// Command manager measures what one manager costs with many peers: CPU and memory when they come, at
// rest, and when it starts again among them and reconnects to all.
//
//	go run ./benchmarks/manager -peers 500,1000
//
// It runs TestManyPeerings of test/control, which has the real manager, two real API servers (one
// stands for those of all peers, and knows each by a certificate of its own) and peers that answer, and
// prints what that logs. It needs the programs that internal/kubetest builds. With 500 peers it takes some
// five minutes on two processors.
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
	fmt.Printf("%s.\n", measure.Where())
	for s := range strings.SplitSeq(*text, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 3 || n > 4096 {
			log.Fatalf("-peers %q: want numbers from 3 to 4096", *text)
		}
		fmt.Printf("\n%d peers:\n\n", n)
		if err := run(ctx, n, *profiles); err != nil {
			log.Fatal(err)
		}
	}
}

// run prints the lines of one test that have figures.
func run(ctx context.Context, peers int, profiles string) error {
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
			fmt.Println("- " + text)
		}
	}
	if err := cmd.Wait(); err != nil {
		return errors.New("TestManyPeerings failed; see above, or run it by itself")
	}
	return nil
}
