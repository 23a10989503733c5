package httpserve

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// asOther is the environment variable that makes this test program a client. The test runs the
// client as another user. The client prints the response that it gets.
const asOther = "HTTPSERVE_TEST_SOCKET"

func TestMain(m *testing.M) {
	if name := os.Getenv(asOther); name != "" {
		for range 3 {
			text, err := getOwner(context.Background(), name)
			fmt.Printf("%q %v", text, err)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func getOwner(ctx context.Context, name string) (string, error) {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return DialOwner(ctx, name)
	}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://x/", nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return string(text), err
}

func TestOnlyOwnerAndRootMayUseTheSocket(t *testing.T) {
	name := fmt.Sprintf("isthmus-test-%d", os.Getpid())
	var log bytes.Buffer
	s := New(slog.New(slog.NewTextHandler(&log, nil)))
	if err := s.ListenOwner("test", name, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "secret") })); err != nil {
		t.Fatal(err)
	}
	if err := New(slog.New(slog.DiscardHandler)).ListenOwner("test", name, http.NotFoundHandler()); err == nil {
		t.Error("a second socket of the same name was opened")
	}
	s.Serve()
	defer s.Close()
	if text, err := getOwner(t.Context(), name); err != nil || text != "secret" {
		t.Errorf("the owner gets %q, %v", text, err)
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root to be somebody else")
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The other user has no permission to enter the program's directory, so the program is run by
	// its file descriptor.
	f, err := os.Open(program)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.CommandContext(t.Context(), "/proc/self/fd/3")
	cmd.ExtraFiles = []*os.File{f}
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), asOther+"="+name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if strings.Contains(string(out), "secret") || !strings.HasPrefix(string(out), `"" Get`) {
		t.Errorf("another user gets %s", out)
	}
	s.Close()
	if n := strings.Count(log.String(), "uid=65534"); n != 1 {
		t.Errorf("the log names who was refused %d times in a minute: %s", n, &log)
	}
}

func TestDialOwnerRejectsSocketOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to be somebody else")
	}
	name := fmt.Sprintf("isthmus-test-stranger-%d", os.Getpid())
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: "@" + name}); err != nil {
		t.Fatal(err)
	}
	listened := make(chan error)
	go func() { // the kernel keeps the user of the thread that calls listen
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, 65534, 65534, 65534); errno != 0 {
			listened <- errno
			return
		}
		listened <- unix.Listen(fd, 1)
	}()
	if err := <-listened; err != nil {
		t.Fatal(err)
	}
	if c, err := DialOwner(t.Context(), name); !errors.Is(err, errStranger) {
		t.Errorf("DialOwner gives %v, %v; want errStranger", c, err)
	}
}
