package file

import (
	"context"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"time"
)

// Timing of Watch.
const (
	pollInterval   = time.Second
	settleInterval = 200 * time.Millisecond // after this time without a change, the writer has probably finished
	settleLimit    = 10 * time.Second       // after this time, the files are read although they still change
)

// Watch calls callback with the content of the directory: once at the start, and again whenever the
// result of Load changes, whether it is a Snapshot or an error. Watch returns when ctx ends, and
// never calls callback after that. Calls of callback never overlap.
//
// Watch polls once a second, because polling works with every file system. It also works with a
// mounted ConfigMap, where an update replaces one symbolic link for all files and breaks inotify
// watches on the files. Watch compares name, inode, size and modification time. Once all four have
// been stable for 200 ms, it reads the files, so that it rarely reads a half-written file. It
// reports a change within about 1.5 s.
func Watch(ctx context.Context, dir string, callback func(Snapshot, error)) {
	var (
		last    Snapshot
		lastErr string
		first   = true
		loaded  fingerprint
		confirm bool // read the files once more: a file may have changed again within the resolution of its timestamp
		poll    = time.NewTicker(pollInterval)
	)
	defer poll.Stop()
	for {
		now := fingerprintOf(dir, loaded.keys)
		changed := !now.equal(loaded)
		if changed && !first && !settle(ctx, dir, now) {
			return
		}
		if changed || confirm {
			snapshot, read, err := loadSettled(dir)
			if ctx.Err() != nil {
				return
			}
			text := ""
			if err != nil {
				text = err.Error()
			}
			differs := first || text != lastErr || err == nil && !reflect.DeepEqual(snapshot, last)
			confirm = !read.equal(loaded)
			last, lastErr, loaded, first = snapshot, text, read, false
			if differs {
				callback(snapshot, err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-poll.C:
		}
	}
}

// settle waits until the directory has been stable for a while; it returns false if ctx ends first.
func settle(ctx context.Context, dir string, before fingerprint) bool {
	for range settleLimit / settleInterval {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(settleInterval):
		}
		now := fingerprintOf(dir, before.keys)
		if now.equal(before) {
			break
		}
		before = now
	}
	return true
}

// fingerprint detects changes of files without reading them.
type fingerprint struct {
	err   string   // reason why the directory cannot be listed; empty: it can be listed
	keys  []string // paths of the private key files found so far
	files []stamp
}

type stamp struct {
	name string
	info os.FileInfo // nil: the file does not exist
}

func fingerprintOf(dir string, keys []string) fingerprint {
	names, err := list(dir)
	if err != nil {
		return fingerprint{err: err.Error()}
	}
	f := fingerprint{keys: keys, files: make([]stamp, 0, len(names)+len(keys))}
	for _, name := range names {
		info, _ := os.Stat(filepath.Join(dir, name))
		f.files = append(f.files, stamp{name, info})
	}
	for _, key := range keys {
		info, _ := os.Stat(key)
		f.files = append(f.files, stamp{key, info})
	}
	return f
}

func (f fingerprint) equal(g fingerprint) bool {
	if f.err != g.err || !slices.Equal(f.keys, g.keys) || len(f.files) != len(g.files) {
		return false
	}
	for i := range f.files {
		a, b := f.files[i], g.files[i]
		if a.name != b.name || (a.info == nil) != (b.info == nil) {
			return false
		}
		if a.info != nil && !(os.SameFile(a.info, b.info) && a.info.Size() == b.info.Size() &&
			a.info.ModTime().Equal(b.info.ModTime()) && a.info.Mode() == b.info.Mode()) {
			return false
		}
	}
	return true
}
