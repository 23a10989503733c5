package uninstall

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/install"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// cleaning has the parameters of the Pods that clean the kernels of nodes.
type cleaning struct {
	Image          string                        `json:"image"`
	PullSecrets    []corev1.LocalObjectReference `json:"pullSecrets,omitempty"`
	PullPolicy     corev1.PullPolicy             `json:"pullPolicy,omitempty"`
	StateDirectory string                        `json:"stateDirectory"`
	HostGateways   bool                          `json:"hostGateways,omitempty"` // gateways were on the host network
}

// howToClean returns the parameters of the Pods that clean nodes. It reads them from the DaemonSet
// and the gateways' Deployment, and stores them, because a later run may find only one of these
// objects or none. If the DaemonSet is missing, nothing is stored and o.Image is empty, howToClean
// returns nil, because nothing shows that agents ran here.
func howToClean(ctx context.Context, c *cluster.Cluster, o Options) (*cleaning, error) {
	how := cleaning{Image: o.Image, StateDirectory: "/var/lib/isthmus"}
	key := client.ObjectKey{Namespace: c.Namespace, Name: uninstallConfigMap}
	var memory corev1.ConfigMap
	err := c.Client.Get(ctx, key, &memory)
	stored := err == nil
	if client.IgnoreNotFound(err) != nil {
		return nil, c.Explain("ConfigMap "+key.String(), err)
	}
	if stored {
		if err := json.Unmarshal([]byte(memory.Data[keyCleaning]), &how); err != nil {
			return nil, fmt.Errorf("%s: ConfigMap %s: field %s: %w; delete the ConfigMap and repeat the command", c, key, keyCleaning, err)
		}
	}
	key.Name = deploy.RouteAgentServiceAccount // the DaemonSet has this name, too
	var agents appsv1.DaemonSet
	err = c.Client.Get(ctx, key, &agents)
	switch {
	case err == nil:
		pod := agents.Spec.Template.Spec
		how.Image, how.PullPolicy, how.PullSecrets = pod.Containers[0].Image, pod.Containers[0].ImagePullPolicy, pod.ImagePullSecrets
		for _, v := range pod.Volumes {
			if v.HostPath != nil && v.Name == "state" {
				how.StateDirectory = v.HostPath.Path
			}
		}
		var gateways appsv1.Deployment
		key.Name = deploy.GatewayServiceAccount
		err := c.Client.Get(ctx, key, &gateways)
		if client.IgnoreNotFound(err) != nil {
			return nil, c.Explain("Deployment "+key.String(), err)
		}
		if err == nil {
			how.HostGateways = gateways.Spec.Template.Spec.HostNetwork
		}
		text, err := json.Marshal(how)
		if err != nil {
			return nil, err
		}
		_, err = c.Apply(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: uninstallConfigMap}, Data: map[string]string{keyCleaning: string(text)}})
		if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			err = nil // the namespace is being deleted and accepts no new objects
		}
		return &how, err
	case !apierrors.IsNotFound(err):
		return nil, c.Explain("DaemonSet "+key.String(), err)
	case stored:
		how.Image = cmp.Or(o.Image, how.Image)
		return &how, nil
	case o.Image != "": // the person has requested to clean the nodes
		how.HostGateways = true
		return &how, nil
	}
	o.Report(fmt.Sprintf("%s: there is no DaemonSet of route agents, so no node is cleaned; run this command with --image, or `isthmus route-agent --cleanup` on each node where an agent ran", c))
	return nil, nil
}

// labelCleans marks the Pods that clean nodes.
const labelCleans = "isthmus.net/cleans"

// cleanNodes runs a Pod on each node. The Pod removes everything that the components left in the
// kernel.
func cleanNodes(ctx context.Context, c *cluster.Cluster, how cleaning, o Options) error {
	if !o.BeforeHelm { // with BeforeHelm, this process itself runs in the namespace, so the namespace exists
		if err := repeatUntilDone(ctx, c, o, func() (string, error) {
			have, err := c.Get(ctx, corev1.SchemeGroupVersion.WithKind("Namespace"), "", c.Namespace)
			if err != nil {
				return "", err
			}
			if have != nil && have.GetDeletionTimestamp() != nil { // the namespace accepts no new Pods
				return "namespace " + c.Namespace + " is being deleted; waiting to create it again for the Pods that clean the nodes", nil
			}
			labels := map[string]string{"pod-security.kubernetes.io/enforce": "privileged"}
			if install.MadeByUs(have) {
				labels[cluster.LabelName] = cluster.ManagedBy
			}
			_, err = c.Apply(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace, Labels: labels}})
			return "", err
		}); err != nil {
			return err
		}
	}
	var nodes corev1.NodeList
	if err := c.Client.List(ctx, &nodes); err != nil {
		return c.Explain("Nodes", err)
	}
	todo := map[string]*corev1.Pod{}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if system := n.Labels[corev1.LabelOSStable]; system != "" && system != "linux" {
			continue
		}
		if o.Force && !isReady(n) {
			o.Report(fmt.Sprintf("%s: node %s is not ready, so it is not cleaned; reboot it, or run `isthmus route-agent --cleanup` there", c, n.Name))
			continue
		}
		todo[n.Name] = cleaningPod(c.Namespace, n.Name, how)
	}
	err := repeatUntilDone(ctx, c, o, func() (string, error) {
		var waiting []string
		for node, want := range todo {
			var p corev1.Pod
			err := c.Client.Get(ctx, client.ObjectKeyFromObject(want), &p)
			if apierrors.IsNotFound(err) && nodeDeleted(ctx, c, node) {
				delete(todo, node) // the node was deleted, and its kernel with it
				continue
			}
			if apierrors.IsNotFound(err) {
				p = *want.DeepCopy()
				err = c.Client.Create(ctx, &p)
			}
			switch {
			case apierrors.IsForbidden(err): // in a new namespace, the ServiceAccount is created after a short time
				waiting = append(waiting, node+" ("+safetext.Of(err.Error())+")")
			case err != nil:
				return "", c.Explain("Pod "+want.Namespace+"/"+want.Name, err)
			case p.Status.Phase == corev1.PodSucceeded:
				delete(todo, node)
				o.Report(fmt.Sprintf("%s: node %s is clean", c, node))
			default:
				waiting = append(waiting, node+cleaningProblem(&p))
			}
		}
		slices.Sort(waiting)
		if len(waiting) == 0 {
			return "", nil
		}
		return "waiting until nodes are clean: " + strings.Join(waiting, ", "), nil
	})
	if err != nil {
		return err
	}
	var done corev1.PodList
	if err := c.Client.List(ctx, &done, client.InNamespace(c.Namespace), client.HasLabels{labelCleans}); err != nil {
		return c.Explain("Pods in "+c.Namespace, err)
	}
	for i := range done.Items {
		if err := c.Client.Delete(ctx, &done.Items[i]); client.IgnoreNotFound(err) != nil {
			return c.Explain("delete Pod "+done.Items[i].Name, err)
		}
	}
	return nil
}

func cleaningProblem(p *corev1.Pod) string {
	for _, s := range p.Status.ContainerStatuses {
		if w := s.State.Waiting; w != nil && w.Reason != "ContainerCreating" {
			return " (" + safetext.Of(w.Reason) + ": " + safetext.Of(w.Message) + ")"
		}
	}
	return ""
}

// xtablesLock is the lock file of iptables-legacy. The Pods need it to remove the agents'
// rules.
const xtablesLock = "/run/xtables.lock"

// cleaningPod returns a Pod that ends when its node is clean. The Pod specifies its node and so
// bypasses the scheduler, in order to run on nodes that accept no other Pods.
func cleaningPod(namespace, node string, how cleaning) *corev1.Pod {
	sum := fnv.New64a()
	sum.Write([]byte(node))
	container := func(name string, capabilities []corev1.Capability, args ...string) corev1.Container {
		return corev1.Container{
			Name: name, Image: how.Image, ImagePullPolicy: how.PullPolicy, Args: args,
			TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
			SecurityContext: &corev1.SecurityContext{
				RunAsUser: new(int64(0)), AllowPrivilegeEscalation: new(false), ReadOnlyRootFilesystem: new(true),
				Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: capabilities},
			},
		}
	}
	agent := container("route-agent", []corev1.Capability{"NET_ADMIN"}, "route-agent", "--cleanup", "--state-directory=/var/lib/isthmus")
	agent.VolumeMounts = []corev1.VolumeMount{{Name: "state", MountPath: "/var/lib/isthmus"}, {Name: "xtables-lock", MountPath: xtablesLock, ReadOnly: true}}
	containers := []corev1.Container{agent}
	if how.HostGateways {
		containers = append(containers, container("gateway", []corev1.Capability{"NET_ADMIN", "SYS_ADMIN"}, "gateway", "--cleanup"))
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("isthmus-cleanup-%x", sum.Sum64()),
			Labels: map[string]string{cluster.LabelName: "cleanup", "app.kubernetes.io/part-of": "isthmus", labelCleans: "node"}},
		Spec: corev1.PodSpec{
			NodeName: node, HostNetwork: true, RestartPolicy: corev1.RestartPolicyOnFailure, AutomountServiceAccountToken: new(false),
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}}, ImagePullSecrets: how.PullSecrets,
			SecurityContext: &corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers:      containers,
			Volumes: []corev1.Volume{
				{Name: "state", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{
					Path: how.StateDirectory, Type: new(corev1.HostPathDirectoryOrCreate)}}},
				{Name: "xtables-lock", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{
					Path: xtablesLock, Type: new(corev1.HostPathFileOrCreate)}}},
			},
		},
	}
}

func isReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(condition corev1.NodeCondition) bool {
		return condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue
	})
}

// nodeReady reports whether a node is ready, according to its kubelet.
func nodeReady(ctx context.Context, c *cluster.Cluster, name string) bool {
	var n corev1.Node
	return c.Client.Get(ctx, client.ObjectKey{Name: name}, &n) == nil && isReady(&n)
}

func nodeDeleted(ctx context.Context, c *cluster.Cluster, name string) bool {
	return apierrors.IsNotFound(c.Client.Get(ctx, client.ObjectKey{Name: name}, &corev1.Node{}))
}
