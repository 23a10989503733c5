package fleet

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

const wireGuardPort = 5871

// AuditLog returns the path of the API server's audit log, with one event per line. The file exists
// if Options.Audit is set.
func (c *Cluster) AuditLog() string { return filepath.Join(c.dir, "audit.log") }

const auditPolicy = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
"rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}]}`

// startServer starts the control plane on the cluster's own machine.
func (c *Cluster) startServer(ctx context.Context, kube string, audit bool) error {
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return err
	}
	var args []string
	if audit {
		policy := filepath.Join(c.dir, "audit-policy.json")
		if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
			return err
		}
		args = []string{"--audit-policy-file=" + policy, "--audit-log-path=" + c.AuditLog()}
	}
	return c.Serve(ctx, kubetest.Options{Dir: kube, Controllers: true, APIServerArgs: args})
}

// restartServer starts a new control plane without the objects of the previous one. Afterwards the
// sniffer queries the new one.
func (c *Cluster) restartServer(ctx context.Context, o Options) error {
	c.remotes.mu.Lock() // keeps the sniffer from querying the previous server
	defer c.remotes.mu.Unlock()
	c.remotes.networks = nil
	return c.startServer(ctx, o.Kube, o.Audit)
}

// describe creates the objects that kubelets and administrators create in a real cluster.
func (c *Cluster) describe(ctx context.Context) error {
	for _, n := range c.Nodes {
		var spec corev1.NodeSpec
		if n.PodCIDR.IsValid() {
			spec = corev1.NodeSpec{PodCIDR: n.PodCIDR.String(), PodCIDRs: []string{n.PodCIDR.String()}}
		}
		node := &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: n.Name},
			Spec:       spec,
			Status: corev1.NodeStatus{
				Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: n.Addr.String()}},
				Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
			},
		}
		if err := c.create(ctx, node); err != nil {
			return err
		}
	}
	for _, namespace := range []string{metav1.NamespaceDefault, Namespace} {
		if err := c.waitForServiceAccount(ctx, namespace); err != nil {
			return err
		}
	}
	for _, p := range c.Pods {
		if err := c.create(ctx, pod(metav1.NamespaceDefault, p.Name, p.Node.Name, p.Addr, p.Node.Addr)); err != nil {
			return err
		}
	}
	for i := range c.Nodes[:min(len(c.Nodes), gateways)] {
		if err := c.createGateway(ctx, i); err != nil {
			return err
		}
	}
	for i, n := range c.Nodes {
		agent := pod(Namespace, Agent(i), n.Name, n.Addr, n.Addr)
		agent.Spec.HostNetwork, agent.Spec.ServiceAccountName = true, deploy.RouteAgentServiceAccount
		if err := c.create(ctx, agent); err != nil {
			return err
		}
	}
	var ports []corev1.ServicePort
	for i := range c.Tunnels {
		port := wireGuardPort + int32(i)
		ports = append(ports, corev1.ServicePort{
			Name: v1alpha1.TunnelPortName(i), Protocol: corev1.ProtocolUDP, Port: port, TargetPort: intstr.FromInt32(port)})
	}
	return c.create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: "isthmus-gateway", Namespace: Namespace,
			Labels:      map[string]string{v1alpha1.LabelGateway: "true"},
			Annotations: map[string]string{v1alpha1.AnnotationOverridePort: strconv.Itoa(wireGuardPort)},
		},
		Spec: corev1.ServiceSpec{
			Type:     corev1.ServiceTypeNodePort,
			Selector: map[string]string{v1alpha1.LabelGateway: v1alpha1.GatewayActive},
			Ports:    ports,

			PublishNotReadyAddresses: true,
		},
	})
}

// createGateway creates the Pod object of the gateway on node i.
func (c *Cluster) createGateway(ctx context.Context, i int) error {
	n := c.Nodes[i]
	gateway := pod(Namespace, gatewayPod(i), n.Name, c.GatewayAddr(i), n.Addr)
	gateway.Labels = map[string]string{"app.kubernetes.io/name": "gateway", "app.kubernetes.io/component": "networking"}
	gateway.Spec.HostNetwork, gateway.Spec.ServiceAccountName = len(c.GatewayPods) == 0, deploy.GatewayServiceAccount
	return c.create(ctx, gateway)
}

// DeleteGateway ends the gateway on node i and deletes its Pod object.
func (c *Cluster) DeleteGateway(ctx context.Context, i int) error {
	if err := c.Stop(Gateway(i)); err != nil {
		return err
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: gatewayPod(i)}}
	return c.Client.Delete(ctx, pod, client.GracePeriodSeconds(0))
}

// AddGateway recreates the Pod object of the gateway on node i, and starts the gateway.
func (c *Cluster) AddGateway(ctx context.Context, i int) error {
	if err := c.createGateway(ctx, i); err != nil {
		return err
	}
	if _, err := c.podIdentity(ctx, deploy.GatewayServiceAccount, gatewayPod(i)); err != nil {
		return err
	}
	return c.Start(ctx, Gateway(i))
}

func pod(namespace, name, node string, addr, host netip.Addr) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{
			NodeName:                     node,
			AutomountServiceAccountToken: new(bool),
			Containers:                   []corev1.Container{{Name: "main", Image: "isthmus"}},
		},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, HostIP: host.String(),
			PodIP: addr.String(), PodIPs: []corev1.PodIP{{IP: addr.String()}},
		},
	}
}

// create creates an object with its status.
func (c *Cluster) create(ctx context.Context, o client.Object) error {
	kind := fmt.Sprintf("%T %s", o, client.ObjectKeyFromObject(o))
	with := o.DeepCopyObject().(client.Object)
	if err := c.Client.Create(ctx, o); apierrors.IsAlreadyExists(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("%s: %w", kind, err)
	}
	switch with.(type) {
	case *corev1.Node, *corev1.Pod:
		with.SetResourceVersion("") // Kubelets may have changed the object meanwhile
		with.SetUID(o.GetUID())
		if err := c.Client.Status().Update(ctx, with); err != nil {
			return fmt.Errorf("status of %s: %w", kind, err)
		}
	}
	return nil
}

// waitForServiceAccount waits for a namespace's ServiceAccount "default". Without it, the API
// server admits no Pod.
func (c *Cluster) waitForServiceAccount(ctx context.Context, namespace string) error {
	return wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		err := c.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: "default"}, &corev1.ServiceAccount{})
		return err == nil, client.IgnoreNotFound(err)
	})
}

// identity writes a kubeconfig with a token of a ServiceAccount and returns its path.
func (c *Cluster) identity(ctx context.Context, account string) (string, error) {
	return c.tokenFor(ctx, account, account, nil)
}

// podIdentity writes a kubeconfig for a Pod and returns its path. Like a token that a kubelet
// requests, the token is bound to the Pod, and so identifies the Pod and its node to the API
// server.
func (c *Cluster) podIdentity(ctx context.Context, account, name string) (string, error) {
	var pod corev1.Pod
	if err := c.Client.Get(ctx, client.ObjectKey{Namespace: Namespace, Name: name}, &pod); err != nil {
		return "", fmt.Errorf("pod %s: %w", name, err)
	}
	return c.tokenFor(ctx, account, name, &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID})
}

func (c *Cluster) tokenFor(ctx context.Context, account, file string, bound *authenticationv1.BoundObjectReference) (string, error) {
	const life = int64(24 * time.Hour / time.Second) // the token is never renewed, because no kubelet runs
	token := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: bound, ExpirationSeconds: new(life)}}
	sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: account}}
	if err := c.Client.SubResource("token").Create(ctx, sa, token); err != nil {
		return "", fmt.Errorf("token of ServiceAccount %s: %w", account, err)
	}
	config, err := clientcmd.Load(c.Server.Kubeconfig())
	if err != nil {
		return "", err
	}
	for _, user := range config.AuthInfos {
		user.ClientCertificateData, user.ClientKeyData, user.Token = nil, nil, token.Status.Token
	}
	path := filepath.Join(c.dir, file+".kubeconfig")
	return path, clientcmd.WriteToFile(*config, path)
}

// waitForReports waits until every node has reported the networks to which it has routes. After
// that, the manager allocates no network that a node already uses.
func (c *Cluster) waitForReports(ctx context.Context) error {
	var missing []string
	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		missing = nil
		for _, n := range c.Nodes {
			if err := c.Client.Get(ctx, client.ObjectKey{Namespace: Namespace, Name: n.Name}, &isthmus.NodeNetworks{}); err != nil {
				missing = append(missing, err.Error())
			}
		}
		return len(missing) == 0, nil
	})
	if err != nil {
		return fmt.Errorf("reports of the nodes: %w: %s", err, strings.Join(missing, "; "))
	}
	return nil
}
