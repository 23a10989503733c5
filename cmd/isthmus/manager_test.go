package main

import (
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/cli"
)

func TestManagerNamesTheInvalidFlag(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"--pod-cidr 10.244.0.0", `--pod-cidr "10.244.0.0": want a network`},
		{"--pod-cidr 10.244.0.1/16", `--pod-cidr "10.244.0.1/16": has host bits set; want 10.244.0.0/16`},
		{"--service-cidr 10.96.0.0/33", "--service-cidr"},
		{"--pod-cidr 10.0.0.0/8 --service-cidr 10.96.0.0/12", "--service-cidr 10.96.0.0/12: overlaps --pod-cidr, 10.0.0.0/8"},
		{"--pod-cidr 10.1.0.0/16 --external-cidr 10.1.128.0/17", "--external-cidr"},
		{"--pools 10.0.0.0/8,nonsense", `--pools "nonsense"`},
		{"--reserved 192.168.1.1/24", "--reserved"},
		{"--cluster-id a/b", "--cluster-id"},
		{"--ipam-address 6000 --ipam-plain", `--ipam-address "6000"`},
		{"--ipam-address :6000", "want --ipam-tls-cert, --ipam-tls-key and --ipam-client-ca, to authenticate the callers, or --ipam-plain"},
		{"--ipam-address :6000 --ipam-tls-cert a --ipam-tls-key b", "want --ipam-tls-cert"},
		{"--ipam-address :6000 --ipam-tls-cert a --ipam-tls-key b --ipam-client-ca c", "certificate a with key b"},
		{"--ipam-address :6000 --ipam-plain --ipam-client-ca c", "want only one of them"},
		{"--ipam-plain", "need --ipam-address"},
		{"--ipam-address :6000 --ipam-plain --ipam-service x", "--ipam-service: $POD_IP"},
		{"--ipam-address :6000 --ipam-plain --ipam-allow 10.96.0.1", `--ipam-allow "10.96.0.1": want a network`},
		{"--metrics-address :99999", "--metrics-address"},
		{"--pprof-address :6060", "--pprof-address"},
		{"--metrics-cert-dir /x", "--metrics-cert-dir needs --metrics-secure"},
		{"--metrics-secure --metrics-cert-dir testdata/there-is-none", "--metrics-cert-dir: certificate in testdata/there-is-none"},
		{"--log-level loud", "--log-level"},
		{"--leader-elect=perhaps", "--leader-elect"},
		{"surplus", "surplus"},
	} {
		_, stderr, code := isthmus("", append([]string{"manager"}, strings.Fields(c.args)...)...)
		if code != cli.Wrong || !strings.Contains(stderr, c.want) {
			t.Errorf("%s: exit %d, %q; want exit %d and %q", c.args, code, stderr, cli.Wrong, c.want)
		}
	}
}

func TestManagerWithoutAClusterReportsTheError(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	_, stderr, code := isthmus("", "manager", "--kubeconfig", "testdata/there-is-none")
	if code != cli.Problem || !strings.Contains(stderr, "path to the API server") {
		t.Errorf("exit %d, %q", code, stderr)
	}
}
