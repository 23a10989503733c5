package interop

import (
	"bufio"
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/test/internal/hosts"
)

// A wgDevice is a device of Debian's wireguard-go. It is configured by wireguard-go's own
// protocol (https://www.wireguard.com/xplatform/) through a Unix socket.
type wgDevice struct {
	t      *testing.T
	name   string
	socket string
}

// startWireGuardGo starts the daemon in a namespace. The device's name is also the name of a
// socket in a directory that all namespaces share, so it includes the ID of this process.
func startWireGuardGo(t *testing.T, h *hosts.Host) *wgDevice {
	t.Helper()
	name := fmt.Sprintf("ist%d", os.Getpid())
	d := &wgDevice{t: t, name: name, socket: filepath.Join("/var/run/wireguard", name+".sock")}
	var log bytes.Buffer
	cmd := exec.Command("wireguard-go", "--foreground", name)
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.Env = append(os.Environ(), "LOG_LEVEL=verbose", "WG_PROCESS_FOREGROUND=1")
	h.Start(cmd)
	ended := make(chan struct{})
	go func() {
		cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-ended
		os.Remove(d.socket)
		if t.Failed() {
			t.Logf("wireguard-go said:\n%s", tail(log.String(), 40))
		}
	})
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if c, err := net.Dial("unix", d.socket); err == nil {
			c.Close()
			return d
		}
		select {
		case <-ended:
			t.Fatalf("wireguard-go ended: %s", &log)
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("wireguard-go opened no socket %s", d.socket)
		}
	}
}

// talk sends one request and returns the answer without its errno line. errno must be 0.
func (d *wgDevice) talk(request string) (answer []string) {
	d.t.Helper()
	c, err := net.Dial("unix", d.socket)
	if err != nil {
		d.t.Fatal(err)
	}
	defer c.Close()
	if _, err := fmt.Fprintf(c, "%s\n", request); err != nil {
		d.t.Fatal(err)
	}
	for s := bufio.NewScanner(c); s.Scan() && s.Text() != ""; {
		if errno, is := strings.CutPrefix(s.Text(), "errno="); !is {
			answer = append(answer, s.Text())
		} else if errno != "0" {
			d.t.Fatalf("wireguard-go answers errno %s to\n%s", errno, request)
		}
	}
	return answer
}

// configure sets the device's key and its only peer.
func (d *wgDevice) configure(key *ecdh.PrivateKey, port uint16, peer *ecdh.PublicKey, endpoint netip.AddrPort, allowed ...netip.Prefix) {
	d.t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "set=1\nprivate_key=%s\nlisten_port=%d\n", hex.EncodeToString(key.Bytes()), port)
	fmt.Fprintf(&b, "public_key=%s\nreplace_allowed_ips=true\nendpoint=%s\n", hex.EncodeToString(peer.Bytes()), endpoint)
	for _, p := range allowed {
		fmt.Fprintf(&b, "allowed_ip=%s\n", p)
	}
	d.talk(b.String())
}

// value returns a value of the device's state, or "" if it is not set.
func (d *wgDevice) value(key string) string {
	d.t.Helper()
	for _, line := range d.talk("get=1\n") {
		if v, ok := strings.CutPrefix(line, key+"="); ok {
			return v
		}
	}
	return ""
}

func newKey(t *testing.T) *ecdh.PrivateKey {
	t.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// text returns a key in the form that wg(8) and Kubernetes objects use.
func text(key []byte) string { return base64.StdEncoding.EncodeToString(key) }

func tail(s string, lines int) string {
	all := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
