package kubenodes

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/testbin"
)

// dnsImage is the name of CoreDNS's image on the nodes. The tag is the version in
// test/coredns/go.mod. `isthmus install` reads the version from the tag.
const dnsImage = "isthmus.test/coredns:1.15.0"

// dnsAddress is the address of the Service kube-dns. Kubelets write it into the pods'
// /etc/resolv.conf.
var dnsAddress = netip.MustParseAddr("10.96.0.10")

// CoreDNS builds CoreDNS from the module test/coredns in dir, and returns the archive of its
// image for Options.DNS. The build takes three minutes on two cores with an empty Go cache, and
// seconds with a warm one.
func CoreDNS(ctx context.Context, dir string) (archive string, err error) {
	root, err := testbin.Root()
	if err != nil {
		return "", err
	}
	program := filepath.Join(dir, "coredns")
	cmd := exec.CommandContext(ctx, "go", "build", "-C", filepath.Join(root, "test", "coredns"), "-trimpath", "-ldflags=-s -w", "-o", program, ".")
	// Use the default flags, because the Go cache is separate for each set of flags.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "GOOS="+runtime.GOOS, "GOARCH="+runtime.GOARCH)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build CoreDNS: %w\n%s", err, out)
	}
	archive = program + "-image.tar"
	return archive, writeImage(archive, dnsImage, "", program)
}

// startDNS deploys CoreDNS as kubeadm does, and waits until it answers. CoreDNS has no upstream
// server.
func (c *Cluster) startDNS(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := c.Apply(ctx, fmt.Sprintf(dnsManifests, dnsImage, dnsAddress)); err != nil {
		return err
	}
	var last error
	err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		var d appsv1.Deployment
		last = c.Client.Get(ctx, client.ObjectKey{Namespace: "kube-system", Name: "coredns"}, &d)
		if last == nil && (d.Status.ObservedGeneration < d.Generation || d.Status.AvailableReplicas < *d.Spec.Replicas) {
			last = fmt.Errorf("%d of %d Pods are available", d.Status.AvailableReplicas, *d.Spec.Replicas)
		}
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("cluster %s: CoreDNS: %w\n%s", c.Name, last, c.Explain())
	}
	return nil
}

// dnsManifests are kubeadm's manifests. In the Corefile, the plugins forward and loop are missing,
// and reload has a shorter interval.
const dnsManifests = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: coredns, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: "system:coredns"}
rules:
- {apiGroups: [""], resources: [endpoints, services, pods, namespaces], verbs: [list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: "system:coredns"}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:coredns"}
subjects: [{kind: ServiceAccount, name: coredns, namespace: kube-system}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: coredns, namespace: kube-system}
data:
  Corefile: |
    .:53 {
        errors
        health {
           lameduck 5s
        }
        ready
        kubernetes cluster.local in-addr.arpa ip6.arpa {
           pods insecure
           fallthrough in-addr.arpa ip6.arpa
           ttl 30
        }
        prometheus :9153
        cache 30 {
           disable success cluster.local
           disable denial cluster.local
        }
        reload 2s 1s
        loadbalance
    }
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: coredns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec:
  replicas: 2
  selector: {matchLabels: {k8s-app: kube-dns}}
  template:
    metadata: {labels: {k8s-app: kube-dns}}
    spec:
      serviceAccountName: coredns
      dnsPolicy: Default
      terminationGracePeriodSeconds: 0
      containers:
      - name: coredns
        image: %[1]s
        args: [-conf, /etc/coredns/Corefile]
        volumeMounts: [{name: config-volume, mountPath: /etc/coredns, readOnly: true}]
        ports: [{name: dns, containerPort: 53, protocol: UDP}, {name: dns-tcp, containerPort: 53, protocol: TCP}, {name: metrics, containerPort: 9153, protocol: TCP}]
        readinessProbe: {httpGet: {path: /ready, port: 8181, scheme: HTTP}, periodSeconds: 1}
      volumes:
      - {name: config-volume, configMap: {name: coredns, items: [{key: Corefile, path: Corefile}]}}
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec:
  selector: {k8s-app: kube-dns}
  clusterIP: %[2]s
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
`
