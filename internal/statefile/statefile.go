// Package statefile stores small files with data that a component needs before it can reach the API
// server. The files are in a directory of the component, and only the component's user can read or
// write them.
package statefile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// Read parses the JSON of a file into v. It returns an error if the file has more than limit octets
// or is not regular. It also returns an error if another user owns the file or may read or write
// it, because that user could control the component. If there is no file, the error is
// fs.ErrNotExist.
func Read(directory, name string, limit int64, v any) error {
	path := filepath.Join(directory, name)
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0) // must not block on a FIFO
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	stat, _ := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is %v; want a regular file", path, info.Mode())
	case stat == nil || int(stat.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to another user; want user %d", path, os.Geteuid())
	case info.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("%s has mode %04o; want 0600", path, info.Mode().Perm())
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return err
	}
	if int64(len(b)) > limit {
		return fmt.Errorf("%s: larger than %d octets", path, limit)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// Write replaces a file by the JSON of v in one step: a reader finds the old or the new content,
// even after a power failure. It returns an error if the JSON has more than limit octets. It
// creates a missing directory. Only one writer may write a file at a time.
func Write(directory, name string, limit int64, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if b = append(b, '\n'); int64(len(b)) > limit {
		return fmt.Errorf("%s: %d octets; want at most %d", filepath.Join(directory, name), len(b), limit)
	}
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return err
	}
	path := filepath.Join(directory, name)
	// A writer that was killed may have left this file behind.
	next := filepath.Join(directory, "."+name+".new")
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(next))
	}
	if err := os.Rename(next, path); err != nil {
		return err
	}
	return flush(directory)
}

// Remove removes files in the given order. A missing file is no error.
func Remove(directory string, names ...string) error {
	for _, name := range names {
		if err := os.Remove(filepath.Join(directory, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := flush(directory); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// flush makes renames and removals in a directory durable.
func flush(directory string) error {
	d, err := os.Open(directory)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
