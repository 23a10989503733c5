package kubetest

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/leaktest"
)

// ownerEnv makes the test binary start a server and wait to be killed. Its value is the folder of
// the programs.
const ownerEnv = "ISTHMUS_KUBETEST_OWNER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(ownerEnv); dir != "" {
		s, err := Start(context.Background(), Options{Dir: dir})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(s.guard.shell.Process.Pid, s.dir)
		select {}
	}
	leaktest.Main(m)
}

// binaries returns the folder of the programs. It builds missing ones.
func binaries(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: starts real API servers")
	}
	dir, err := Build(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// begin starts a server that is stopped at the end of the test.
func begin(t *testing.T, opts Options) *Server {
	t.Helper()
	opts.Dir = binaries(t)
	started := time.Now()
	s, err := Start(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s ready after %v", opts.Name, time.Since(started).Round(time.Millisecond))
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(s.Logs(15))
		}
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// A user sends HTTPS requests to a server with a client certificate, a token, or no credentials.
type user struct {
	s      *Server
	client *http.Client
	token  string
}

func (s *Server) as(t *testing.T, cert, key []byte, token string) user {
	t.Helper()
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(s.CA()) {
		t.Fatal("CA is no certificate")
	}
	config := &tls.Config{RootCAs: roots}
	if cert != nil {
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: config, DialContext: s.opts.Dial}, Timeout: time.Minute}
	t.Cleanup(c.CloseIdleConnections)
	return user{s, c, token}
}

// asAdmin returns the user with the credentials in the kubeconfig.
func (s *Server) asAdmin(t *testing.T) user {
	t.Helper()
	field := func(name string) []byte {
		for line := range strings.Lines(string(s.Kubeconfig())) {
			if value, ok := strings.CutPrefix(strings.TrimSpace(line), name+": "); ok {
				b, err := base64.StdEncoding.DecodeString(value)
				if err != nil {
					t.Fatal(err)
				}
				return b
			}
		}
		t.Fatalf("kubeconfig has no %s:\n%s", name, s.Kubeconfig())
		return nil
	}
	if !bytes.Equal(field("certificate-authority-data"), s.CA()) || !strings.Contains(string(s.Kubeconfig()), "server: "+s.URL()+"\n") {
		t.Fatalf("kubeconfig is not of %s:\n%s", s.URL(), s.Kubeconfig())
	}
	return s.as(t, field("client-certificate-data"), field("client-key-data"), "")
}

type object = map[string]any

// do sends a request and returns the response's status code and object.
func (u user) do(t *testing.T, method, path string, body object) (code int, answer object) {
	t.Helper()
	code, answer, err := u.try(t.Context(), method, path, body)
	if err != nil {
		t.Fatal(err)
	}
	return code, answer
}

func (u user) try(ctx context.Context, method, path string, body object) (code int, answer object, err error) {
	var in io.Reader = http.NoBody
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return 0, nil, err
		}
		in = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, u.s.URL()+path, in)
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if u.token != "" {
		req.Header.Set("Authorization", "Bearer "+u.token)
	}
	resp, err := u.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	return resp.StatusCode, answer, json.NewDecoder(resp.Body).Decode(&answer)
}

// must sends a request that must succeed, and returns the object of the response.
func (u user) must(t *testing.T, method, path string, body object) object {
	t.Helper()
	code, answer := u.do(t, method, path, body)
	if code/100 != 2 {
		t.Fatalf("%s %s: %d %v", method, path, code, answer["message"])
	}
	return answer
}

// get follows a path of keys into an object. It returns nil if a key does not exist.
func get(o any, path ...string) any {
	for _, key := range path {
		m, ok := o.(object)
		if !ok {
			return nil
		}
		o = m[key]
	}
	return o
}

func named(name string) object { return object{"metadata": object{"name": name}} }

// eventually waits until a controller has made a condition true.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	started := time.Now()
	for !holds() {
		if time.Since(started) > 2*time.Minute {
			t.Fatalf("not within 2 minutes: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Logf("%s, after %v", what, time.Since(started).Round(time.Millisecond))
}

// whoami returns the user's name and groups according to the server.
func (u user) whoami(t *testing.T) string {
	t.Helper()
	answer := u.must(t, "POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews",
		object{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"})
	return fmt.Sprint(get(answer, "status", "userInfo", "username"), " ", get(answer, "status", "userInfo", "groups"))
}

func TestServersRunSideBySideIndependently(t *testing.T) {
	t.Parallel()
	binaries(t)
	cidrs := map[string]string{"a": "10.96.0.0/12", "b": "172.20.16.0/21"}
	servers := map[string]*Server{}
	var mu sync.Mutex
	t.Run("start", func(t *testing.T) {
		for name, cidr := range cidrs {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s, err := Start(context.Background(), Options{Name: name, Dir: binaries(t), ServiceCIDR: netip.MustParsePrefix(cidr)})
				if err != nil {
					t.Fatal(err)
				}
				mu.Lock()
				defer mu.Unlock()
				servers[name] = s
			})
		}
	})
	t.Cleanup(func() {
		for _, s := range servers {
			if err := s.Stop(); err != nil {
				t.Error(err)
			}
		}
	})
	if len(servers) != 2 {
		t.FailNow()
	}
	if servers["a"].URL() == servers["b"].URL() {
		t.Fatalf("both listen on %s", servers["a"].URL())
	}
	for name, s := range servers {
		admin := s.asAdmin(t)
		if version := admin.must(t, "GET", "/version", nil); version["gitVersion"] != "v1.36.3" {
			t.Errorf("%s calls itself %v", name, version)
		}
		admin.must(t, "POST", "/api/v1/namespaces", named("only-in-"+name))
		service := admin.must(t, "POST", "/api/v1/namespaces/default/services",
			object{"metadata": object{"name": "x"}, "spec": object{"ports": []any{object{"port": 80}}}})
		ip := fmt.Sprint(get(service, "spec", "clusterIP"))
		if addr, err := netip.ParseAddr(ip); err != nil || !netip.MustParsePrefix(cidrs[name]).Contains(addr) {
			t.Errorf("%s: a service got %s, which is not of %s", name, ip, cidrs[name])
		}
	}
	if code, _ := servers["a"].asAdmin(t).do(t, "GET", "/api/v1/namespaces/only-in-b", nil); code != http.StatusNotFound {
		t.Errorf("a answers %d about a namespace of b", code)
	}
	cert, key, err := servers["a"].ClientCert("mallory", "system:masters")
	if err != nil {
		t.Fatal(err)
	}
	if code, _ := servers["b"].as(t, cert, key, "").do(t, "GET", "/api/v1/namespaces", nil); code != http.StatusUnauthorized {
		t.Errorf("b answers %d to an administrator of a", code)
	}
}

func TestTheServerRequiresCredentials(t *testing.T) {
	t.Parallel()
	s := begin(t, Options{Name: "credentials"})
	cert, key, err := s.ClientCert("jane", "readers", "writers")
	if err != nil {
		t.Fatal(err)
	}
	const path = "/api/v1/namespaces/default/configmaps"
	for _, tc := range []struct {
		who  string
		user user
		code int
	}{
		{"the administrator", s.asAdmin(t), http.StatusCreated},
		{"a user without a role", s.as(t, cert, key, ""), http.StatusForbidden},
		{"no credentials (RBAC refuses system:anonymous, as in most clusters)", s.as(t, nil, nil, ""), http.StatusForbidden},
		{"a wrong token", s.as(t, nil, nil, "wrong"), http.StatusUnauthorized},
	} {
		if code, answer := tc.user.do(t, "POST", path, named("x")); code != tc.code {
			t.Errorf("%s: %d, want %d: %v", tc.who, code, tc.code, answer["message"])
		}
	}
	if got, want := s.as(t, cert, key, "").whoami(t), "jane [readers writers system:authenticated]"; got != want {
		t.Errorf("the certificate's user is %q, want %q", got, want)
	}
	if _, _, err := s.ClientCert("not\xffUTF-8"); err == nil {
		t.Error("a name that no certificate can have is not refused")
	}

	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := s.WriteKubeconfig(file); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("kubeconfig: %v, %v: want a file that only its owner reads", st, err)
	}
}

func TestControllersWorkInTheTestServer(t *testing.T) {
	t.Parallel()
	s := begin(t, Options{Name: "controllers", Controllers: true})
	admin := s.asAdmin(t)

	t.Run("deleting a namespace deletes its objects", func(t *testing.T) {
		admin.must(t, "POST", "/api/v1/namespaces", named("short"))
		admin.must(t, "POST", "/api/v1/namespaces/short/configmaps", named("x"))
		admin.must(t, "DELETE", "/api/v1/namespaces/short", nil)
		eventually(t, "namespace gone", func() bool {
			code, _ := admin.do(t, "GET", "/api/v1/namespaces/short", nil)
			return code == http.StatusNotFound
		})
		if code, _ := admin.do(t, "GET", "/api/v1/namespaces/short/configmaps/x", nil); code != http.StatusNotFound {
			t.Errorf("its object: %d", code)
		}
	})
	t.Run("an object is deleted with its owner", func(t *testing.T) {
		owner := admin.must(t, "POST", "/api/v1/namespaces/default/configmaps", named("owner"))
		owned := named("owned")
		owned["metadata"].(object)["ownerReferences"] = []any{
			object{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": get(owner, "metadata", "uid")}}
		admin.must(t, "POST", "/api/v1/namespaces/default/configmaps", owned)
		admin.must(t, "DELETE", "/api/v1/namespaces/default/configmaps/owner", nil)
		eventually(t, "owned object gone", func() bool {
			code, _ := admin.do(t, "GET", "/api/v1/namespaces/default/configmaps/owned", nil)
			return code == http.StatusNotFound
		})
	})
	t.Run("a service account has tokens that work until it is deleted", func(t *testing.T) {
		admin.must(t, "POST", "/api/v1/namespaces/default/serviceaccounts", named("robot"))
		request := admin.must(t, "POST", "/api/v1/namespaces/default/serviceaccounts/robot/token", object{"spec": object{}})
		secret := object{"metadata": object{"name": "robot", "annotations": object{"kubernetes.io/service-account.name": "robot"}},
			"type": "kubernetes.io/service-account-token"}
		admin.must(t, "POST", "/api/v1/namespaces/default/secrets", secret)
		var stored string
		eventually(t, "token in the secret", func() bool {
			stored, _ = get(admin.must(t, "GET", "/api/v1/namespaces/default/secrets/robot", nil), "data", "token").(string)
			return stored != ""
		})
		fromSecret, err := base64.StdEncoding.DecodeString(stored)
		if err != nil {
			t.Fatal(err)
		}
		robot := s.as(t, nil, nil, fmt.Sprint(get(request, "status", "token")))
		for _, u := range []user{robot, s.as(t, nil, nil, string(fromSecret))} {
			if got := u.whoami(t); !strings.HasPrefix(got, "system:serviceaccount:default:robot ") {
				t.Errorf("the token's user is %q", got)
			}
		}
		admin.must(t, "DELETE", "/api/v1/namespaces/default/serviceaccounts/robot", nil)
		eventually(t, "token refused", func() bool {
			code, _ := robot.do(t, "GET", "/api", nil)
			return code == http.StatusUnauthorized
		})
	})
	t.Run("an approved certificate request yields a valid certificate", func(t *testing.T) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		der, err := x509.CreateCertificateRequest(rand.Reader,
			&x509.CertificateRequest{Subject: pkix.Name{CommonName: "remote", Organization: []string{"peers"}}}, key)
		if err != nil {
			t.Fatal(err)
		}
		keyDER, err := x509.MarshalECPrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		const requests = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
		request := admin.must(t, "POST", requests, object{"metadata": object{"name": "remote"}, "spec": object{
			"request":    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			"signerName": "kubernetes.io/kube-apiserver-client", "usages": []string{"client auth"}}})
		request["status"] = object{"conditions": []any{object{"type": "Approved", "status": "True", "reason": "Test"}}}
		admin.must(t, "PUT", requests+"/remote/approval", request)
		var cert string
		eventually(t, "certificate issued", func() bool {
			cert, _ = get(admin.must(t, "GET", requests+"/remote", nil), "status", "certificate").(string)
			return cert != ""
		})
		certPEM, err := base64.StdEncoding.DecodeString(cert)
		if err != nil {
			t.Fatal(err)
		}
		remote := s.as(t, certPEM, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER}), "")
		if got := remote.whoami(t); got != "remote [peers system:authenticated]" {
			t.Errorf("the certificate's user is %q", got)
		}
	})
	t.Run("a quota is enforced", func(t *testing.T) {
		admin.must(t, "POST", "/api/v1/namespaces", named("tight"))
		admin.must(t, "POST", "/api/v1/namespaces/tight/resourcequotas",
			object{"metadata": object{"name": "q"}, "spec": object{"hard": object{"count/configmaps": "1"}}})
		eventually(t, "quota used", func() bool {
			return get(admin.must(t, "GET", "/api/v1/namespaces/tight/resourcequotas/q", nil), "status", "used") != nil
		})
		created := 0
		eventually(t, "no room for more", func() bool { // until admission has received the quota, it may admit all or none
			code, _ := admin.do(t, "POST", "/api/v1/namespaces/tight/configmaps", named(fmt.Sprint("map", created)))
			if code == http.StatusCreated {
				created++
			}
			return code == http.StatusForbidden && created > 0
		})
	})
	t.Run("a ClusterRole aggregates the rules that its selector matches", func(t *testing.T) {
		const roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
		label := object{"isthmus.test/gather": "yes"}
		admin.must(t, "POST", roles, object{"metadata": object{"name": "sum"},
			"aggregationRule": object{"clusterRoleSelectors": []any{object{"matchLabels": label}}}, "rules": []any{}})
		admin.must(t, "POST", roles, object{"metadata": object{"name": "part", "labels": label},
			"rules": []any{object{"apiGroups": []string{""}, "resources": []string{"nodes"}, "verbs": []string{"get"}}}})
		eventually(t, "rules gathered", func() bool {
			rules, _ := admin.must(t, "GET", roles+"/sum", nil)["rules"].([]any)
			return len(rules) == 1
		})
	})
}

func TestAFrozenServerAnswersNothingUntilThawed(t *testing.T) {
	t.Parallel()
	s := begin(t, Options{Name: "frozen"})
	admin := s.asAdmin(t)
	if err := s.Freeze(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if code, _, err := admin.try(ctx, "GET", "/version", nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("frozen: %d, %v", code, err)
	}
	if err := s.Thaw(); err != nil {
		t.Fatal(err)
	}
	admin.must(t, "GET", "/version", nil)
}

func TestRestartKeepsAddressAndObjectsEvenIfFrozen(t *testing.T) {
	t.Parallel()
	s := begin(t, Options{Name: "restart", Controllers: true})
	admin := s.asAdmin(t)
	admin.must(t, "POST", "/api/v1/namespaces", named("kept"))
	url, before := s.URL(), s.api.cmd.Process.Pid
	for range 2 {
		if err := s.Freeze(); err != nil {
			t.Fatal(err)
		}
		started := time.Now()
		if err := s.RestartAPIServer(t.Context()); err != nil {
			t.Fatal(err)
		}
		t.Logf("ready again after %v", time.Since(started).Round(time.Millisecond))
		admin.client.CloseIdleConnections()
		admin.must(t, "GET", "/api/v1/namespaces/kept", nil)
	}
	if s.URL() != url || s.api.cmd.Process.Pid == before {
		t.Errorf("URL %s, was %s; process %d, was %d", s.URL(), url, s.api.cmd.Process.Pid, before)
	}
	admin.must(t, "DELETE", "/api/v1/namespaces/kept", nil)
	eventually(t, "controllers found the new server", func() bool {
		code, _ := admin.do(t, "GET", "/api/v1/namespaces/kept", nil)
		return code == http.StatusNotFound
	})
}

// assertEnded waits until the process group and the folder of a server no longer exist.
func assertEnded(t *testing.T, group int, dir string) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		group, dir := syscall.Kill(-group, 0), statError(dir)
		if errors.Is(group, syscall.ESRCH) && errors.Is(dir, os.ErrNotExist) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left behind: signal to the processes: %v, folder: %v", group, dir)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func statError(path string) error {
	_, err := os.Stat(path)
	return err
}

func TestStopLeavesNoProcessFileOrPort(t *testing.T) {
	t.Parallel()
	s := begin(t, Options{Name: "stop", Controllers: true})
	group, dir, url := s.guard.shell.Process.Pid, s.dir, strings.TrimPrefix(s.URL(), "https://")
	if logs := s.Logs(3); strings.Count(logs, "=== ") != 3 || strings.Count(logs, "\n") < 6 {
		t.Errorf("logs of three programs, three lines each:\n%s", logs)
	}
	if err := s.Freeze(); err != nil { // Stop must also end a frozen server
		t.Fatal(err)
	}
	started := time.Now()
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	t.Logf("stopped after %v", time.Since(started).Round(time.Millisecond))
	if err := syscall.Kill(-group, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("processes are left: %v", err)
	}
	if err := statError(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("folder: %v", err)
	}
	l, err := net.Listen("tcp", url)
	if err != nil {
		t.Fatalf("the port is not free: %v", err)
	}
	l.Close()
	for what, err := range map[string]error{"Freeze": s.Freeze(), "Thaw": s.Thaw(), "Restart": s.RestartAPIServer(t.Context())} {
		if err == nil {
			t.Errorf("%s of a stopped server is no error", what)
		}
	}
	if err := s.Stop(); err != nil || s.Logs(1) != "" {
		t.Errorf("a second Stop: %v", err)
	}
}

func TestServerIsRemovedIfItsOwnerIsKilled(t *testing.T) {
	t.Parallel()
	owner := exec.Command(os.Args[0])
	owner.Env = append(os.Environ(), ownerEnv+"="+binaries(t))
	owner.Stderr = os.Stderr
	out, err := owner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	defer owner.Wait()
	defer owner.Process.Kill()
	var group int
	var dir string
	if _, err := fmt.Fscan(out, &group, &dir); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(-group, 0); err != nil {
		t.Fatalf("no processes: %v", err)
	}
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	assertEnded(t, group, dir)
}

func TestFailedStartReportsReasonAndLeavesNothing(t *testing.T) {
	dir := binaries(t)
	t.Setenv("TMPDIR", t.TempDir())
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, tc := range []struct {
		name string
		ctx  context.Context
		opts Options
		want string
	}{
		{"port taken", t.Context(), Options{APIPort: uint16(taken.Addr().(*net.TCPAddr).Port)}, "address already in use"},
		{"foreign address", t.Context(), Options{Host: netip.MustParseAddr("192.0.2.1")}, "assign requested address"},
		{"interrupted", ended, Options{}, "context canceled"},
		{"no programs", t.Context(), Options{Dir: t.TempDir()}, "etcd: no such file"},
		{"starter fails", t.Context(), Options{Starter: func(*exec.Cmd) error { return errors.New("no namespace") }}, "start etcd: no namespace"},
		{"starter starts nothing", t.Context(), Options{Starter: func(*exec.Cmd) error { return nil }}, "Starter did not start it"},
		{"name", t.Context(), Options{Name: "a: b"}, `option Name: "a: b"`},
		{"zone", t.Context(), Options{Host: netip.MustParseAddr("fe80::1%eth0")}, "option Host"},
		{"any address", t.Context(), Options{Host: netip.IPv4Unspecified()}, "option Host"},
		{"ServiceCIDR too large", t.Context(), Options{ServiceCIDR: netip.MustParsePrefix("10.0.0.0/11")}, "option ServiceCIDR: 10.0.0.0/11"},
		{"ServiceCIDR too small", t.Context(), Options{ServiceCIDR: netip.MustParsePrefix("10.0.0.0/30")}, "option ServiceCIDR"},
		{"host bits", t.Context(), Options{ServiceCIDR: netip.MustParsePrefix("10.0.0.1/24")}, "without host bits"},
		{"other family", t.Context(), Options{ServiceCIDR: netip.MustParsePrefix("fd00::/112")}, "family"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.opts.Dir == "" {
				tc.opts.Dir = dir
			}
			s, err := Start(tc.ctx, tc.opts)
			if err == nil {
				s.Stop()
				t.Fatal("it started")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v\nwant: %s", err, tc.want)
			}
			left, err := filepath.Glob(filepath.Join(os.Getenv("TMPDIR"), "kubetest-*"))
			if err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

// A netns is a network namespace of this test with one address. Functions sent to the channel run
// on a thread in the namespace.
type netns chan func()

func newNetns(t *testing.T, addr string) netns {
	t.Helper()
	ns, ready := make(netns), make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread and its namespace end with the goroutine
		ready <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(addr)
			if err != nil {
				return err
			}
			return errors.Join(netlink.LinkSetUp(lo), netlink.AddrAdd(lo, a))
		}()
		for f := range ns {
			f()
		}
	}()
	t.Cleanup(func() { close(ns) })
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	return ns
}

func (n netns) start(cmd *exec.Cmd) error {
	err := make(chan error)
	n <- func() { err <- cmd.Start() }
	return <-err
}

func (n netns) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	done := make(chan struct{})
	n <- func() { conn, err = new(net.Dialer).DialContext(ctx, network, address); close(done) }
	<-done
	return conn, err
}

func TestServersInNetworkNamespacesMayHaveTheSameAddress(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("not root: makes network namespaces")
	}
	for _, name := range []string{"a", "b"} {
		ns := newNetns(t, "192.0.2.10/32")
		s := begin(t, Options{Name: name, Host: netip.MustParseAddr("192.0.2.10"), ServiceCIDR: netip.MustParsePrefix("10.7.0.0/24"),
			Starter: ns.start, Dial: ns.dial, Controllers: true})
		if s.URL() != "https://192.0.2.10:6443" {
			t.Errorf("%s is at %s", name, s.URL())
		}
		if code, _, err := s.as(t, nil, nil, "").try(t.Context(), "GET", "/version", nil); err != nil || code != http.StatusOK {
			t.Errorf("%s: %d, %v", name, code, err)
		}
		admin := s.asAdmin(t)
		eventually(t, name+": the service kubernetes has the address as its endpoint", func() bool {
			_, slice := admin.do(t, "GET", "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes", nil)
			endpoints, _ := slice["endpoints"].([]any)
			return len(endpoints) == 1 && slices.Equal(get(endpoints[0], "addresses").([]any), []any{"192.0.2.10"})
		})
	}
}

func TestAServerListensOnIPv6(t *testing.T) {
	t.Parallel()
	s := begin(t, Options{Name: "six", Host: netip.IPv6Loopback()})
	admin := s.asAdmin(t)
	eventually(t, "the service kubernetes has the first address", func() bool {
		_, service := admin.do(t, "GET", "/api/v1/namespaces/default/services/kubernetes", nil)
		return get(service, "spec", "clusterIP") == "fd00:96::1"
	})
}
