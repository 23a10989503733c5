package file

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// watched runs a Watch on a directory and records its callbacks. It must run in a synctest
// bubble: time passes only while all goroutines wait, so nothing depends on the speed of the
// machine.
type watched struct {
	t     *testing.T
	dir   string
	mu    sync.Mutex
	calls []string // "error: ..." or the endpoints of the peers
	stop  context.CancelFunc
	done  chan struct{}
}

func watch(t *testing.T, dir string) *watched {
	ctx, cancel := context.WithCancel(t.Context())
	w := &watched{t: t, dir: dir, stop: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		Watch(ctx, dir, func(s Snapshot, err error) {
			if ctx.Err() != nil {
				t.Error("called back after the end of its context")
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			if err != nil {
				w.calls = append(w.calls, "error: "+err.Error())
				return
			}
			call := ""
			for _, p := range s.Gateway.Peers {
				call += fmt.Sprintf("%s@%s ", p.ID, p.Endpoint)
			}
			w.calls = append(w.calls, strings.TrimSpace(call))
		})
	}()
	return w
}

// expect lets the given time pass and compares the callbacks since the last expect with want.
func (w *watched) expect(after time.Duration, want ...string) {
	w.t.Helper()
	time.Sleep(after)
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if got := strings.Join(w.calls, "\n"); got != strings.Join(want, "\n") {
		w.t.Errorf("called back with\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
	w.calls = nil
}

func (w *watched) end() {
	w.t.Helper()
	w.stop()
	synctest.Wait()
	select {
	case <-w.done:
	default:
		w.t.Error("Watch goes on after the end of its context")
	}
}

func peerFile(n int, endpoint string) string {
	return strings.Replace(peerYAML(n), "192.0.2.1", endpoint, 1)
}

func TestWatchCallsBackOnChangeOnly(t *testing.T) {
	dir := writeDir(t, valid(nil))
	peers := filepath.Join(dir, "peers.yaml")
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, dir)
		defer w.end()
		w.expect(0, "id1@192.0.2.1")
		w.expect(time.Minute)

		write(t, peers, peerFile(1, "192.0.2.2"))
		w.expect(1500*time.Millisecond, "id1@192.0.2.2")
		write(t, filepath.Join(dir, "second.yaml"), peerYAML(2))
		w.expect(1500*time.Millisecond, "id1@192.0.2.2 id2@192.0.2.1")

		write(t, peers, peerFile(1, "192.0.2.2")) // the same content again
		w.expect(time.Minute)
		write(t, filepath.Join(dir, "notes.txt"), "nothing of ours")
		w.expect(time.Minute)

		if err := os.Remove(filepath.Join(dir, "second.yaml")); err != nil {
			t.Fatal(err)
		}
		w.expect(1500*time.Millisecond, "id1@192.0.2.2")
		w.expect(time.Minute)
	})
}

func TestWatchReportsAnInvalidDirectoryOnce(t *testing.T) {
	dir := writeDir(t, valid(nil))
	peers := filepath.Join(dir, "peers.yaml")
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, dir)
		defer w.end()
		w.expect(0, "id1@192.0.2.1")
		write(t, peers, "{")
		w.expect(1500*time.Millisecond, "error: peers.yaml: line 2: did not find expected node content")
		write(t, peers, "{ ")
		w.expect(time.Minute)
		write(t, peers, peerFile(1, "[]"))
		w.expect(1500*time.Millisecond, `error: peers.yaml: TunnelEndpoint tenant/peer1: spec.endpointIP: is of type array; want a string; put numbers, true and false in quotes`)
		write(t, peers, peerYAML(1)) // back to the first content: the end of the error is a change, too
		w.expect(1500*time.Millisecond, "id1@192.0.2.1")

		if err := os.Rename(dir, dir+"x"); err != nil {
			t.Fatal(err)
		}
		w.expect(1500*time.Millisecond, "error: open "+dir+": no such file or directory")
		w.expect(time.Minute)
		if err := os.Rename(dir+"x", dir); err != nil {
			t.Fatal(err)
		}
		w.expect(1500*time.Millisecond, "id1@192.0.2.1")
	})
}

func TestWatchReportsAMissingDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later")
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, dir)
		defer w.end()
		w.expect(0, "error: open "+dir+": no such file or directory")
		w.expect(time.Minute)
	})
}

// An editor truncates the file and writes it in pieces. Each state in between is a different,
// invalid configuration.
func TestWatchDoesNotSeeAHalfWrittenFile(t *testing.T) {
	dir := writeDir(t, valid(nil))
	peers := filepath.Join(dir, "peers.yaml")
	text := peerYAML(1) + "---\n" + peerFile(2, "192.0.2.2")
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, dir)
		defer w.end()
		w.expect(300*time.Millisecond, "id1@192.0.2.1")
		for range 20 { // starting at different times between two polls
			for n := 0; n < len(text); n += 150 {
				write(t, peers, text[:n])
				w.expect(110 * time.Millisecond)
			}
			write(t, peers, text)
			w.expect(1500*time.Millisecond, "id1@192.0.2.1 id2@192.0.2.2")
			write(t, peers, peerYAML(1))
			w.expect(1500*time.Millisecond, "id1@192.0.2.1")
		}
	})
}

func TestWatchIsNotBlockedByAConstantWriter(t *testing.T) {
	dir, next := writeDir(t, valid(nil)), filepath.Join(t.TempDir(), "next")
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, dir)
		defer w.end()
		w.expect(0, "id1@192.0.2.1")
		write(t, filepath.Join(dir, "peers.yaml"), peerFile(1, "192.0.2.2"))
		for i := range 120 {
			write(t, next, strings.Repeat("#", i+1))
			if err := os.Rename(next, filepath.Join(dir, "busy.yaml")); err != nil { // another test covers half-written files
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond)
		}
		w.expect(0, "id1@192.0.2.2")
	})
}

// The kubelet replaces a mounted ConfigMap by renaming one symbolic link to a directory.
func TestWatchFollowsAConfigMap(t *testing.T) {
	dir := t.TempDir()
	version := func(t *testing.T, name string, files map[string]string) {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		for file, text := range files {
			write(t, filepath.Join(dir, name, file), text)
		}
		if err := os.Symlink(name, filepath.Join(dir, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	version(t, "..1", valid(nil))
	for name := range valid(nil) {
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, dir)
		defer w.end()
		w.expect(0, "id1@192.0.2.1")
		version(t, "..2", valid(map[string]string{"peers.yaml": peerFile(1, "192.0.2.9")}))
		w.expect(1500*time.Millisecond, "id1@192.0.2.9")
		w.expect(time.Minute)
	})
}

// A file is replaced by one with the same name, time and size, or with the same name, time and
// inode. Watch must notice both replacements.
func TestWatchNoticesAReplacementWithTheSameTimestamp(t *testing.T) {
	dir := writeDir(t, valid(nil))
	peers := filepath.Join(dir, "peers.yaml")
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, dir)
		defer w.end()
		w.expect(10*time.Second, "id1@192.0.2.1")
		info, err := os.Stat(peers)
		if err != nil {
			t.Fatal(err)
		}
		write(t, peers+".new", peerFile(1, "192.0.2.2"))
		if err := os.Chtimes(peers+".new", time.Time{}, info.ModTime()); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(peers+".new", peers); err != nil {
			t.Fatal(err)
		}
		w.expect(10*time.Second, "id1@192.0.2.2")
		write(t, peers, peerFile(1, "192.0.2.33"))
		if err := os.Chtimes(peers, time.Time{}, info.ModTime()); err != nil {
			t.Fatal(err)
		}
		w.expect(1500*time.Millisecond, "id1@192.0.2.33")
	})
}

// If the clock of the file system is coarse, a write right after the first read may leave size
// and time unchanged.
func TestWatchNoticesAWriteWithinTheClockResolution(t *testing.T) {
	dir := writeDir(t, valid(nil))
	peers := filepath.Join(dir, "peers.yaml")
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, dir)
		defer w.end()
		w.expect(0, "id1@192.0.2.1")
		info, err := os.Stat(peers)
		if err != nil {
			t.Fatal(err)
		}
		write(t, peers, peerFile(1, "192.0.2.2"))
		if err := os.Chtimes(peers, time.Time{}, info.ModTime()); err != nil {
			t.Fatal(err)
		}
		w.expect(1500*time.Millisecond, "id1@192.0.2.2")
	})
}

func TestWatchFollowsTheKeyFile(t *testing.T) {
	keys := t.TempDir()
	key := filepath.Join(keys, "secret") // outside the directory of the configuration
	write(t, key, keyText('k'))
	dir := writeDir(t, valid(map[string]string{"gateway.yaml": strings.Replace(gatewayYAML, "private.key", key, 1)}))
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, dir)
		defer w.end()
		w.expect(0, "id1@192.0.2.1")
		write(t, key, keyText('l'))
		w.expect(1500*time.Millisecond, "id1@192.0.2.1")
		write(t, key, "")
		w.expect(1500*time.Millisecond, "error: gateway.yaml: Gateway: privateKeyFile: the content of "+key+" has 0 bytes; want 32 bytes in 44 base64 characters")
	})
}

func TestWatchFollowsTheNextKeyFile(t *testing.T) {
	dir := writeDir(t, valid(map[string]string{"gateway.yaml": gatewayYAML + "nextPrivateKeyFile: next.key\n", "next.key": keyText('n')}))
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, dir)
		defer w.end()
		w.expect(0, "id1@192.0.2.1")
		write(t, filepath.Join(dir, "next.key"), keyText('o'))
		w.expect(1500*time.Millisecond, "id1@192.0.2.1")
		write(t, filepath.Join(dir, "gateway.yaml"), gatewayYAML)
		w.expect(1500*time.Millisecond, "id1@192.0.2.1")
		write(t, filepath.Join(dir, "next.key"), keyText('p')) // no field names this file
		w.expect(time.Minute)
	})
}

func TestWatchNeverCallsBackAfterTheEndOfItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	Watch(ctx, writeDir(t, valid(nil)), func(Snapshot, error) { t.Error("called back") })
}

func TestWatchEndsWhileItWaitsForAWriter(t *testing.T) {
	dir := writeDir(t, valid(nil))
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, dir)
		w.expect(900*time.Millisecond, "id1@192.0.2.1")
		write(t, filepath.Join(dir, "peers.yaml"), peerFile(1, "192.0.2.2"))
		time.Sleep(200 * time.Millisecond) // Watch has noticed the change and waits for the writer to finish
		w.end()
		w.expect(time.Minute)
	})
}

func TestFilesChangedDuringReadAreReadAgain(t *testing.T) {
	dir := writeDir(t, valid(nil))
	synctest.Test(t, func(t *testing.T) {
		writes := 3
		read := func(dir string) (Snapshot, fingerprint, error) {
			snapshot, read, err := load(dir)
			if writes > 0 {
				writes--
				write(t, filepath.Join(dir, "peers.yaml"), peerFile(1, "192.0.2."+strings.Repeat("2", writes+1)))
			}
			return snapshot, read, err
		}
		snapshot, _, err := untilSettled(dir, read)
		if err != nil || snapshot.Gateway.Peers[0].Endpoint != "192.0.2.2" {
			t.Errorf("%+v, %v", snapshot.Gateway, err)
		}
		writes = 100
		if _, _, err := untilSettled(dir, read); err == nil || err.Error() != dir+": files keep changing while they are read" {
			t.Errorf("files that never rest: %v", err)
		}
	})
}
