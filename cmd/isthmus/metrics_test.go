package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// tokenOf returns a token of a ServiceAccount, which it creates if necessary.
func (s *kubeSite) tokenOf(account string) string {
	s.t.Helper()
	sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: account}}
	token := &authenticationv1.TokenRequest{}
	if err := s.client.SubResource("token").Create(s.t.Context(), sa, token); err != nil {
		s.must(s.client.Create(s.t.Context(), sa))
		s.must(s.client.SubResource("token").Create(s.t.Context(), sa, token))
	}
	return token.Status.Token
}

// component runs a component on a host, with the rights of its ServiceAccount, until stop is
// called.
func (s *kubeSite) component(host *lab.Host, addr netip.Addr, account string, args ...string) (stop func()) {
	s.t.Helper()
	config, err := clientcmd.Load(s.server.Kubeconfig())
	s.must(err)
	for _, user := range config.AuthInfos {
		user.ClientCertificateData, user.ClientKeyData, user.Token = nil, nil, s.tokenOf(account)
	}
	kubeconfig := filepath.Join(s.t.TempDir(), "kubeconfig")
	s.must(clientcmd.WriteToFile(*config, kubeconfig))
	log, err := os.Create(filepath.Join(s.t.TempDir(), "log"))
	s.must(err)
	cmd := host.Command(context.Background(), "/proc/self/exe", append(args, "--kubeconfig", kubeconfig)...)
	cmd.Env = append(os.Environ(), beProgram+"=1", "POD_NAME="+replicaName(0), "POD_IP="+addr.String(), "POD_NAMESPACE="+deploy.Namespace, "NODE_NAME="+s.Nodes[0].Name)
	cmd.Stdout, cmd.Stderr = log, log
	s.must(cmd.Start())
	r := &replica{cmd: cmd, done: make(chan struct{}), log: log}
	go func() { _ = cmd.Wait(); close(r.done) }()
	s.t.Cleanup(func() {
		r.end(syscall.SIGTERM)
		if s.t.Failed() {
			text, _ := os.ReadFile(log.Name())
			s.t.Logf("%s:\n%s", args[0], text)
		}
		log.Close()
	})
	return func() { r.end(syscall.SIGTERM) }
}

// fetch sends a request from a host to a server with a self-signed certificate.
func fetch(from *lab.Host, url, token string) (code int, text string, err error) {
	req, err := http.NewRequest(http.MethodGet, url, http.NoBody)
	if err != nil {
		return 0, "", err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	client := from.Client()
	client.Timeout = 30 * time.Second
	client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{InsecureSkipVerify: true} // a scraper need not have the CA's certificate
	res, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return res.StatusCode, string(body), err
}

// Requests from another node stand for those of a pod in the host network, or of any other
// host.
func TestMetricsAndStatusAreNotReachableFromOtherHosts(t *testing.T) {
	if testing.Short() {
		t.Skip("needs an API server")
	}
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	if _, err := kubetest.Build(t.Context(), os.Stderr); err != nil {
		t.Fatal(err)
	}
	prefix := netip.MustParsePrefix
	l, err := lab.Up(t.Context(), lab.Spec{Name: lab.UniqueName("listen"), RPFilter: lab.RPFilterOff, Clusters: []lab.ClusterSpec{
		{Name: "a", PodCIDR: prefix("10.244.0.0/18"), ExternalCIDR: prefix("10.245.0.0/20"), Nodes: 2, PodsPerNode: 1, Control: true},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	s := newKubeSite(t, l.Clusters[0])
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.Nodes[0].Name}}
	s.must(s.client.Create(t.Context(), node))
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: s.Nodes[0].Addr.String()}}
	s.must(s.client.Status().Update(t.Context(), node))
	control, first, other := s.Control.Host, s.Nodes[0].Host, s.Nodes[1].Host
	components := []struct {
		host    *lab.Host
		addr    netip.Addr
		account string
		args    []string
		metrics int
		series  string // name of a metric that the component exports
	}{
		{control, s.Control.Addr, deploy.ManagerServiceAccount, []string{"manager", "--pod-cidr", "10.244.0.0/18"}, 5876, "isthmus_build_info"},
		{first, s.Nodes[0].Addr, deploy.GatewayServiceAccount, []string{"gateway", "--host-network"}, 5872, "isthmus_build_info"},
		{first, s.Nodes[0].Addr, deploy.RouteAgentServiceAccount, []string{"route-agent"}, 5874, "isthmus_build_info"},
	}
	urlFor := func(scheme string, addr netip.Addr, port int, path string) string {
		return fmt.Sprintf("%s://%v%s", scheme, netip.AddrPortFrom(addr, uint16(port)), path)
	}
	loopback := netip.MustParseAddr("127.0.0.1")
	status := func(t *testing.T) {
		t.Helper()
		s.eventually("isthmus status --gateway", func() error {
			cmd := first.Command(t.Context(), "/proc/self/exe", "status", "--gateway")
			cmd.Env = append(os.Environ(), beProgram+"=1")
			out, err := cmd.CombinedOutput()
			if err == nil && !strings.Contains(string(out), "no peers") {
				err = errors.New("without what it should say")
			}
			if err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
			return err
		})
	}

	t.Run("by default only from the machine itself", func(t *testing.T) {
		for _, c := range components {
			defer s.component(c.host, c.addr, c.account, c.args...)()
		}
		for _, c := range components {
			s.eventually(c.args[0], func() error {
				text, err := c.host.Get(t.Context(), urlFor("http", loopback, c.metrics, "/metrics"))
				if err == nil && !strings.Contains(text, c.series) {
					err = fmt.Errorf("no %s", c.series)
				}
				return err
			})
			for _, port := range []int{c.metrics, c.metrics + 1} { // the next port serves the status
				if c.host == control && port != c.metrics {
					continue // the manager serves its health at the next port, which others may reach
				}
				if conn, err := other.Dial(t.Context(), "tcp", net.JoinHostPort(c.addr.String(), fmt.Sprint(port))); err == nil {
					conn.Close()
					t.Errorf("%s: port %d is reached from another machine", c.args[0], port)
				}
			}
		}
		s.eventually("the kubelet reaches the manager's health", func() error {
			_, err := other.Get(t.Context(), urlFor("http", s.Control.Addr, 5877, "/readyz"))
			return err
		})
		s.eventually("the kubelet of the gateway's node", func() error {
			_, err := first.Get(t.Context(), urlFor("http", loopback, 5872, "/readyz"))
			return err
		})
		status(t)
	})

	t.Run("with --metrics-secure only for authorized clients", func(t *testing.T) {
		install := control.Command(t.Context(), "/proc/self/exe", "install", "--without-workloads", "--kubeconfig", filepath.Join(s.dir, "admin.kubeconfig"), "--metrics-auth")
		install.Env = append(os.Environ(), beProgram+"=1")
		if out, err := install.CombinedOutput(); err != nil || !strings.Contains(string(out), "isthmus-metrics-auth created") {
			t.Fatalf("install: %v\n%s", err, out)
		}
		scraper, stranger := s.tokenOf("scraper"), s.tokenOf("stranger")
		s.must(s.client.Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "scraper"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "isthmus-metrics-reader"},
			Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: deploy.Namespace, Name: "scraper"}},
		}))
		for _, c := range components {
			defer s.component(c.host, c.addr, c.account, append(c.args, "--metrics-secure", "--metrics-address", fmt.Sprintf(":%d", c.metrics))...)()
		}
		for _, c := range components {
			url := urlFor("https", c.addr, c.metrics, "/metrics")
			for _, want := range []struct {
				who, token string
				code       int
				text       string
			}{
				{"the scraper", scraper, http.StatusOK, c.series},
				{"nobody", "", http.StatusUnauthorized, "want a bearer token"},
				{"a wrong token", "wrong", http.StatusUnauthorized, "does not accept this token"},
				{"a token without the right", stranger, http.StatusForbidden, "may not get /metrics"},
			} {
				s.eventually(c.args[0]+" to "+want.who, func() error {
					code, text, err := fetch(other, url, want.token)
					if err == nil && (code != want.code || !strings.Contains(text, want.text)) {
						err = fmt.Errorf("%d %.300s", code, text)
					}
					return err
				})
			}
			if c.host == first {
				s.eventually("the kubelet", func() error {
					code, text, err := fetch(other, urlFor("https", c.addr, c.metrics, "/readyz"), "")
					if err == nil && code != http.StatusOK && c.metrics == 5872 { // the agent is not required to be ready
						err = fmt.Errorf("%d %s", code, text)
					}
					return err
				})
			}
		}
		status(t)
	})
}
