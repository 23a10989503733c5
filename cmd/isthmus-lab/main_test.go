package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// isthmusLab runs the program with these arguments.
func isthmusLab(args ...string) (stdout, stderr string, code int) {
	var out, errs bytes.Buffer
	code = run(args, strings.NewReader(""), &out, &errs)
	return out.String(), errs.String(), code
}

func TestHelpNamesEveryCommand(t *testing.T) {
	out, _, code := isthmusLab()
	for _, name := range []string{"demo", "up", "down", "list", "show", "exec", "ping", "kube", "version"} {
		if !strings.Contains(out, "\n  "+name+" ") {
			t.Errorf("no %s in\n%s", name, out)
		}
	}
	if strings.Contains(out, "\n  serve ") || code != 0 {
		t.Errorf("code %d:\n%s", code, out)
	}
	if out, _, code := isthmusLab("version"); code != 0 || !strings.HasPrefix(out, "isthmus-lab ") {
		t.Errorf("code %d, %q", code, out)
	}
}

func TestLabCommandsNeedRoot(t *testing.T) {
	if os.Geteuid() == 0 {
		if err := syscall.Setresuid(-1, 65534, -1); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := syscall.Setresuid(-1, 0, -1); err != nil {
				t.Fatal(err)
			}
		}()
	}
	for _, args := range [][]string{{"up"}, {"down"}, {"list"}, {"show"}, {"exec", "a-pod1", "true"}, {"ping", "a-pod1", "a-pod2"}, {"demo"}} {
		out, errs, code := isthmusLab(args...)
		if want := "isthmus-lab " + args[0] + " needs root"; code != 2 || out != "" || !strings.Contains(errs, want) {
			t.Errorf("%q: code %d, stdout %q, stderr %q; want 2 and %q", args, code, out, errs, want)
		}
	}
}

func TestInvalidLabOptionsAreUsageErrors(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("without root the command says that first")
	}
	for _, args := range [][]string{{"--clusters", "-3"}, {"--clusters", "0"}, {"--nodes", "100"}, {"--tunnels", "17"}, {"--mtu", "20"}, {"--name", "../x"}} {
		out, errs, code := isthmusLab(append([]string{"up"}, args...)...)
		if code != 2 || out != "" || !strings.Contains(errs, "want ") {
			t.Errorf("up %q: code %d, stdout %q, stderr %q; want 2 and what is wanted", args, code, out, errs)
		}
	}
}

func TestLabFindsTheProgramByFlagOrBesideItself(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(self)
	if _, err := program(""); err == nil || !strings.Contains(err.Error(), "no program isthmus in "+dir) || !strings.Contains(err.Error(), "set --isthmus to its path") {
		t.Errorf("none is there: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "isthmus"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(filepath.Join(dir, "isthmus"))
	if got, err := program(""); got != filepath.Join(dir, "isthmus") || err != nil {
		t.Errorf("%q, %v; want that of %s", got, err, dir)
	}
	t.Chdir(t.TempDir())
	if err := os.WriteFile("mine", nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := program("./mine"); !filepath.IsAbs(got) || filepath.Base(got) != "mine" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := program("./none"); err == nil || !strings.Contains(err.Error(), "--isthmus: ") {
		t.Errorf("a program that is not there: %v", err)
	}
}
