// Package kubetest starts real Kubernetes API servers for tests and the demo. It runs etcd,
// kube-apiserver and, on request, the controllers that tests rely on (namespaces, garbage
// collection, service accounts and their tokens, quotas, certificate requests, aggregated roles).
// Servers can run side by side. Each is ready in a few seconds and leaves nothing behind.
//
//	dir, err := kubetest.Build(ctx, os.Stderr)               // once, minutes; afterwards milliseconds
//	s, err := kubetest.Start(ctx, kubetest.Options{Name: "a", Dir: dir})
//	defer s.Stop()
//	c, err := s.Client()
//
// There are no nodes: Pod objects exist, but no containers run, unless package kubenodes adds
// kubelets.
package kubetest

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// readyTimeout is the timeout of a start if the context has no earlier deadline. At a load of ten,
// a start takes half a minute. It takes longer if tests with a lower nice value run at the same
// time, as in CI.
const readyTimeout = 5 * time.Minute

// controllers lists the controllers that delete objects, create tokens and process requests. A
// cluster without nodes needs no controllers that create pods or manage nodes.
const controllers = "namespace-controller,garbage-collector-controller,resourcequota-controller,serviceaccount-controller," +
	"serviceaccount-token-controller,certificatesigningrequest-signing-controller," +
	"certificatesigningrequest-approving-controller,clusterrole-aggregation-controller"

// Options configure a server. The zero value is a server on a free port of 127.0.0.1 without
// controllers.
type Options struct {
	// Name is the name of the cluster, the context and the user in the kubeconfig. Default:
	// "kubetest".
	Name string
	// Dir is the folder with the programs. Default: the result of Build, which reports its progress
	// on standard error.
	Dir string
	// Host is the address to listen on and to advertise. Default: 127.0.0.1.
	Host netip.Addr
	// APIPort is the port to listen on. The default is a free port. With a Starter, the default is
	// 6443, because this package cannot search for a free port in the network namespace that the
	// Starter may use.
	APIPort uint16
	// ServiceCIDR is the network of cluster IPs, in the family of Host, with at most 2^20
	// addresses. Default: 10.96.0.0/12, or fd00:96::/108 if Host is IPv6.
	ServiceCIDR netip.Prefix
	// Controllers also starts the controller manager. Without it, the deletion of namespaces never
	// completes, and owner references, ServiceAccounts of new namespaces and quotas have no effect.
	Controllers bool
	// Nodes must be true if there are kubelets. Then a scheduler and all controllers run, and the
	// API server may connect to kubelets. Nodes needs the programs of BuildNodes.
	Nodes bool
	// APIServerArgs are additional arguments of kube-apiserver, such as those of an audit log.
	// Paths in them must be absolute.
	APIServerArgs []string
	// Starter starts a prepared command, for example inside a network namespace. It must not change
	// SysProcAttr, Dir, Stdout and Stderr. Default: cmd.Start.
	Starter func(cmd *exec.Cmd) error
	// Dial connects from this process to the server. It is necessary if Starter starts the server
	// in another network namespace. Default: net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// A Server is a running control plane. Its methods may be called concurrently, even after Stop.
type Server struct {
	opts Options
	dir  string // private folder of this server: data, keys, logs
	ca   *authority

	admin      []byte // content of the administrator's kubeconfig
	tokenKey   *ecdsa.PrivateKey
	client     *http.Client
	guard      *guard
	port       *reservation // nil if the caller chose the port
	etcd       *process
	controller *process // nil without Controllers
	scheduler  *process // nil without Nodes

	mu  sync.Mutex
	api *process // replaced by RestartAPIServer
}

// Start starts a server and returns when it and the requested controllers are ready. ctx bounds
// only the start. The caller must call Stop. An error contains the last messages of the program
// that failed.
func Start(ctx context.Context, opts Options) (s *Server, err error) {
	if err := opts.complete(); err != nil {
		return nil, err
	}
	if opts.Dir == "" {
		if opts.Dir, err = Build(ctx, os.Stderr); err != nil {
			return nil, err
		}
	}
	if opts.Dir, err = filepath.Abs(opts.Dir); err != nil { // the programs run in other folders
		return nil, err
	}
	if err := missing(opts.Dir, opts.programs()); err != nil {
		return nil, fmt.Errorf("folder of programs: %w", err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready within %v", readyTimeout))
	defer cancel()
	s = &Server{opts: opts}
	if err := s.start(ctx); err != nil {
		err = fmt.Errorf("API server %s: %w", opts.Name, err)
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

var validName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$`)

func (o *Options) programs() []string {
	if o.Nodes {
		return withNodes.programs
	}
	return controlPlane.programs
}

// complete fills in the defaults. It returns an error for options that the programs would reject
// later, with a less clear message.
func (o *Options) complete() error {
	if o.Name == "" {
		o.Name = "kubetest"
	}
	o.Controllers = o.Controllers || o.Nodes
	if !validName.MatchString(o.Name) {
		return fmt.Errorf("option Name: %q is not of the form %s", o.Name, validName)
	}
	if !o.Host.IsValid() {
		o.Host = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	if o.Host = o.Host.Unmap(); o.Host.IsUnspecified() || o.Host.IsMulticast() || o.Host.Zone() != "" {
		return fmt.Errorf("option Host: %s is not one unicast address that a certificate can name", o.Host)
	}
	if o.APIPort == 0 && o.Starter != nil {
		o.APIPort = 6443
	}
	if o.ServiceCIDR == (netip.Prefix{}) {
		o.ServiceCIDR = netip.MustParsePrefix("10.96.0.0/12")
		if o.Host.Is6() {
			o.ServiceCIDR = netip.MustParsePrefix("fd00:96::/108")
		}
	}
	cidr := o.ServiceCIDR
	if hostBits := cidr.Addr().BitLen() - cidr.Bits(); !cidr.IsValid() || cidr != cidr.Masked() || hostBits < 3 || hostBits > 20 {
		return fmt.Errorf("option ServiceCIDR: %s has to be a network of 2^3 to 2^20 addresses without host bits", cidr)
	}
	if cidr.Addr().Is4() != o.Host.Is4() {
		return fmt.Errorf("option ServiceCIDR: %s is not of the same family as the host %s", cidr, o.Host)
	}
	if o.Dial == nil {
		o.Dial = new(net.Dialer).DialContext
	}
	return nil
}

// start implements Start. After an error, the caller calls Stop, which removes everything that
// start has created.
func (s *Server) start(ctx context.Context) (err error) {
	if s.dir, err = os.MkdirTemp("", "kubetest-"+s.opts.Name+"-"); err != nil {
		return err
	}
	if s.guard, err = newGuard(s.dir); err != nil {
		return err
	}
	if s.opts.APIPort == 0 {
		if s.port, err = reserve(s.opts.Host); err != nil {
			return fmt.Errorf("find a free port of %s: %w", s.opts.Host, err)
		}
		s.opts.APIPort = s.port.number
	}
	if err := s.credentials(); err != nil {
		return err
	}
	if err := s.startEtcd(); err != nil {
		return err
	}
	if err := s.startAPI(); err != nil {
		return err
	}
	if err := s.await(ctx, readyz); err != nil {
		return err
	}
	if !s.opts.Controllers {
		return nil
	}
	if s.opts.Nodes {
		if s.scheduler, err = s.run("kube-scheduler", "--kubeconfig=admin.kubeconfig", "--leader-elect=false", "--secure-port=0"); err != nil {
			return err
		}
	}
	// Start the controllers after the API server is ready, because the controller manager exits if
	// it cannot reach the API server for ten seconds.
	if err := s.startControllers(); err != nil {
		return err
	}
	return s.await(ctx, "/api/v1/namespaces/default/serviceaccounts/default") // a controller creates this object
}

// credentials creates all keys, certificates and kubeconfigs, and the client of this package.
func (s *Server) credentials() (err error) {
	if s.ca, err = newAuthority("kubernetes"); err != nil {
		return err
	}
	firstService := s.opts.ServiceCIDR.Addr().Next() // address of the service "kubernetes"
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	serverCert, serverKey, err := s.ca.server(s.opts.Host, loopback, netip.IPv6Loopback(), firstService)
	if err != nil {
		return err
	}
	adminCert, adminKey, err := s.ca.client("kubernetes-admin", []string{"system:masters"})
	if err != nil {
		return err
	}
	var tokenKey []byte
	if s.tokenKey, tokenKey, err = newKey(); err != nil {
		return err
	}
	s.admin = kubeconfig(s.opts.Name, s.URL(), s.ca.certPEM, adminCert, adminKey)
	for name, content := range map[string][]byte{
		"ca.crt": s.ca.certPEM, "ca.key": s.ca.keyPEM, "server.crt": serverCert, "server.key": serverKey,
		"tokens.key": tokenKey, "admin.kubeconfig": s.admin, "admin.crt": adminCert, "admin.key": adminKey,
	} {
		if err := os.WriteFile(filepath.Join(s.dir, name), content, 0o600); err != nil {
			return err
		}
	}

	pair, err := tls.X509KeyPair(adminCert, adminKey)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AddCert(s.ca.cert)
	s.client = &http.Client{
		Timeout: 5 * time.Second,
		Transport: &http.Transport{
			DialContext:     s.opts.Dial,
			TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12},
		},
	}
	return nil
}

// startEtcd starts etcd on a Unix socket. A Unix socket needs no free port, is reachable from every
// network namespace, and belongs to this server alone. etcd requires an advertised address with a
// port, but a cluster with one member never uses this address.
func (s *Server) startEtcd() (err error) {
	const unused = "http://127.0.0.1:2380"
	s.etcd, err = s.run("etcd",
		"--name=etcd", "--data-dir=etcd", "--unsafe-no-fsync",
		"--listen-client-urls=unix://etcd.sock", "--advertise-client-urls="+unused,
		"--listen-peer-urls=unix://peer.sock", "--initial-advertise-peer-urls="+unused, "--initial-cluster=etcd="+unused,
		"--election-timeout=500", // in ms; below the default, so that the only member elects itself half a second earlier
		"--log-level=warn")
	return err
}

func (s *Server) startAPI() error {
	endpoints, disabled := "lease", ""
	if s.opts.Host.IsLoopback() {
		// With "lease", the API server would log an error about its loopback address every ten
		// seconds.
		endpoints = "none"
	}
	if !s.opts.Controllers {
		// Without controllers, the admission plugin ServiceAccount would reject all pods, because
		// no ServiceAccount is created.
		disabled = "ServiceAccount"
	}
	args := []string{
		"--etcd-servers=unix://etcd.sock",
		"--bind-address=" + s.opts.Host.String(), fmt.Sprintf("--secure-port=%d", s.opts.APIPort),
		"--advertise-address=" + s.opts.Host.String(), "--endpoint-reconciler-type=" + endpoints,
		"--tls-cert-file=server.crt", "--tls-private-key-file=server.key", "--client-ca-file=ca.crt",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=tokens.key", "--service-account-signing-key-file=tokens.key",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--disable-admission-plugins=" + disabled,
		"--service-cluster-ip-range=" + s.opts.ServiceCIDR.String(), "--allow-privileged=true",
	}
	if s.port != nil {
		args = append(args, "--permit-port-sharing")
	}
	if s.opts.Nodes {
		args = append(args, "--kubelet-client-certificate=admin.crt", "--kubelet-client-key=admin.key",
			"--kubelet-preferred-address-types=InternalIP")
	}
	api, err := s.run("kube-apiserver", append(args, s.opts.APIServerArgs...)...)
	if err != nil {
		return err
	}
	s.api = api
	return nil
}

func (s *Server) startControllers() (err error) {
	which := controllers
	if s.opts.Nodes {
		which = "*"
	}
	s.controller, err = s.run("kube-controller-manager",
		"--kubeconfig=admin.kubeconfig", "--leader-elect=false", "--secure-port=0", "--controllers="+which,
		"--service-account-private-key-file=tokens.key", "--root-ca-file=ca.crt",
		"--cluster-signing-cert-file=ca.crt", "--cluster-signing-key-file=ca.key",
		"--use-service-account-credentials="+strconv.FormatBool(s.opts.Nodes),
		"--kube-api-qps=100", "--kube-api-burst=200") // tests delete many namespaces at once
	return err
}

func (s *Server) run(name string, args ...string) (*process, error) {
	return s.guard.start(s.opts.Starter, s.dir, filepath.Join(s.opts.Dir, name), args...)
}

const readyz = "/readyz"

// await returns when a GET of path returns status 200. It returns an error if a program has ended.
func (s *Server) await(ctx context.Context, path string) error {
	for {
		problem := s.get(ctx, path)
		if problem == nil {
			return nil
		}
		for _, p := range []*process{s.etcd, s.api, s.controller, s.scheduler} {
			if p != nil && p.hasEnded() {
				return fmt.Errorf("%s ended: %w\n%s", filepath.Base(p.cmd.Path), p.err, p.tail(20))
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w\n%s", context.Cause(ctx), problem, s.api.tail(20))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (s *Server) get(ctx context.Context, path string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL()+path, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s: %s", path, resp.Status, body)
	}
	return nil
}

// URL returns the API server's address, https://HOST:PORT.
func (s *Server) URL() string {
	return "https://" + netip.AddrPortFrom(s.opts.Host, s.opts.APIPort).String()
}

// CA returns the certificate of the authority for the server and for all clients, in PEM.
func (s *Server) CA() []byte { return bytes.Clone(s.ca.certPEM) }

// ClientCert returns a new client certificate for the user and the groups, and its key, in PEM.
func (s *Server) ClientCert(user string, groups ...string) (cert, key []byte, err error) {
	return s.ca.client(user, groups)
}

// Kubeconfig returns a kubeconfig with all permissions, as YAML. Its only context is called Name.
func (s *Server) Kubeconfig() []byte { return bytes.Clone(s.admin) }

// WriteKubeconfig writes Kubeconfig to a file that only its owner can read.
func (s *Server) WriteKubeconfig(path string) error { return os.WriteFile(path, s.admin, 0o600) }

func kubeconfig(name, url string, ca, cert, key []byte) []byte {
	b64 := base64.StdEncoding.EncodeToString
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: %[1]s
clusters:
- name: %[1]s
  cluster:
    server: %[2]s
    certificate-authority-data: %[3]s
users:
- name: %[1]s
  user:
    client-certificate-data: %[4]s
    client-key-data: %[5]s
contexts:
- name: %[1]s
  context:
    cluster: %[1]s
    user: %[1]s
`, name, url, b64(ca), b64(cert), b64(key))
}

// Etcd returns the path of etcd's Unix socket (gRPC, and JSON below /v3). Benchmarks use it to
// write a hundred thousand objects in a few seconds.
func (s *Server) Etcd() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return filepath.Join(s.dir, "etcd.sock")
}

// Logs returns the last lines of each program's log.
func (s *Server) Logs(lines int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var b strings.Builder
	for _, p := range []*process{s.etcd, s.api, s.controller, s.scheduler} {
		if p != nil {
			fmt.Fprintf(&b, "=== %s of %s\n%s\n", filepath.Base(p.cmd.Path), s.opts.Name, p.tail(lines))
		}
	}
	return b.String()
}

// Stop kills all programs and removes all files. No graceful shutdown is necessary, because no data
// is kept. etcd ends last, because other programs would wait for it. A second call does nothing.
func (s *Server) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, p := range []*process{s.scheduler, s.controller, s.api, s.etcd} {
		if p != nil {
			errs = append(errs, p.kill())
		}
	}
	if s.guard != nil {
		s.guard.end()
	}
	if s.client != nil {
		s.client.CloseIdleConnections()
	}
	if s.port != nil {
		s.port.release()
	}
	if s.dir != "" {
		errs = append(errs, os.RemoveAll(s.dir)) // the guard process, if there was one, has already removed the folder
	}
	s.scheduler, s.controller, s.api, s.etcd, s.guard, s.port, s.dir = nil, nil, nil, nil, nil, nil, ""
	return errors.Join(errs...)
}
