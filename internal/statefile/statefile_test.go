package statefile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

type value struct {
	Text string `json:"text"`
}

func TestAStateFileRoundTripsAndIsPrivate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made", "here")
	var got value
	if err := Read(dir, "f", 100, &got); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a file: %v", err)
	}
	if err := Remove(dir, "f"); err != nil {
		t.Errorf("removing what is not there: %v", err)
	}
	for _, text := range []string{"first", "second"} {
		if err := Write(dir, "f", 100, value{text}); err != nil {
			t.Fatal(err)
		}
		if err := Read(dir, "f", 100, &got); err != nil || got.Text != text {
			t.Errorf("%+v, %v; want %s", got, err, text)
		}
	}
	for path, want := range map[string]os.FileMode{dir: 0o700 | os.ModeDir, filepath.Join(dir, "f"): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v; want %v", path, info.Mode(), err, want)
		}
	}
	// A killed writer, or another program, has left a file where Write makes the next one.
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, ".f.new")); err != nil {
		t.Fatal(err)
	}
	if err := Write(dir, "f", 100, value{"third"}); err != nil {
		t.Fatal(err)
	}
	if err := Read(dir, "f", 100, &got); err != nil || got.Text != "third" {
		t.Errorf("%+v, %v", got, err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v; want one file", entries, err)
	}
	if err := Write(dir, "f", 20, value{"more than that"}); err == nil || !strings.Contains(err.Error(), "want at most 20") {
		t.Errorf("too much: %v", err)
	}
	if err := Read(dir, "f", 100, &got); err != nil || got.Text != "third" {
		t.Errorf("%+v, %v", got, err)
	}
	if err := Remove(dir, "f", "g"); err != nil {
		t.Error(err)
	}
	if err := Read(dir, "f", 100, &got); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after its removal: %v", err)
	}
}

func TestFilesAccessibleToOtherUsersAreRefused(t *testing.T) {
	good := `{"text":"x"}`
	for name, tc := range map[string]struct {
		make func(path string) error
		want string
	}{
		"readable by others": {func(p string) error { return os.WriteFile(p, []byte(good), 0o644) }, "mode 0644; want 0600"},
		"writable by a group": {func(p string) error {
			return errors.Join(os.WriteFile(p, []byte(good), 0o600), os.Chmod(p, 0o620))
		}, "mode 0620; want 0600"},
		"another's": {func(p string) error {
			return errors.Join(os.WriteFile(p, []byte(good), 0o600), os.Chown(p, 65534, 65534))
		}, "belongs to another user"},
		"a FIFO":      {func(p string) error { return syscall.Mkfifo(p, 0o600) }, "want a regular file"},
		"a directory": {func(p string) error { return os.Mkdir(p, 0o700) }, "want a regular file"},
		"a link": {func(p string) error {
			return errors.Join(os.WriteFile(p+"1", []byte(good), 0o600), os.Symlink(p+"1", p))
		}, "too many levels of symbolic links"},
		"too large": {func(p string) error { return os.WriteFile(p, []byte(good+strings.Repeat(" ", 100)), 0o600) }, "larger than 100 octets"},
		"no JSON":   {func(p string) error { return os.WriteFile(p, []byte(good[1:]), 0o600) }, "invalid character"},
		"empty":     {func(p string) error { return os.WriteFile(p, nil, 0o600) }, "unexpected end of JSON input"},
	} {
		if name == "another's" && os.Geteuid() != 0 {
			continue // only root can give a file to another user
		}
		dir := t.TempDir()
		if err := tc.make(filepath.Join(dir, "f")); err != nil {
			t.Fatal(err)
		}
		var got value
		if err := Read(dir, "f", 100, &got); err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %v; want %q and the path", name, err, tc.want)
		}
	}
}
