// Package cluster gives commands access to one cluster: the client, the identity of the
// installation, the API server's clock, and errors that a person can act on. Commands are
// functions in other packages that accept a Cluster.
package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// RequestTimeout is the timeout of each request. An API server that does not answer in that
// time counts as unreachable.
const RequestTimeout = 10 * time.Second

// ErrUnreachable is returned when the API server of a cluster does not answer, or does not accept
// the credentials.
var ErrUnreachable = errors.New("unreachable")

// Access selects a cluster, and determines how a person reaches it.
type Access struct {
	// Kubeconfig is the path of a file. The default is $KUBECONFIG, ~/.kube/config, or the Pod's
	// ServiceAccount.
	Kubeconfig string
	// Context is the name of a context in that file. The default is the current context.
	Context string
	// Namespace is the namespace of the installation. The default is deploy.Namespace.
	Namespace string
	// As and AsGroups are the user and groups to impersonate. By default, requests are made as the
	// user of the context.
	As       string
	AsGroups []string
	// Timeout is the timeout of each request. The default is RequestTimeout.
	Timeout time.Duration
	// Server is the URL at which the other cluster's manager reaches this cluster's API server. The
	// default is the URL in the kubeconfig.
	Server string
}

// A Cluster is one cluster and the access to it. Its methods may be called concurrently.
type Cluster struct {
	// Identity is the identity of the installation. Identify sets it.
	Identity v1alpha1.ClusterIdentity
	// Namespace is the namespace of the installation.
	Namespace string

	Context      string // for messages while the cluster's name is unknown
	Server       string // URL of the API server for the peer's manager
	ServerChosen bool   // Server comes from Access.Server
	UID          string // UID of the namespace kube-system, which no two clusters share

	Config *rest.Config  // authenticates as the person who runs the command; never changed
	Client client.Client // authenticates as the person who runs the command

	clock *serverClock // updated by the responses to Client
}

// Of returns a Cluster that uses an existing client.
func Of(c client.Client, namespace string) *Cluster {
	return &Cluster{Namespace: namespace, Client: c, clock: new(serverClock)}
}

// Connect prepares the access to a cluster. It sends no request, so its errors concern only the
// kubeconfig.
func Connect(a Access) (*Cluster, error) {
	log.SetLogger(logr.Discard()) // without a logger the client library prints a warning on standard error
	config, name, err := load(a)
	if err != nil {
		return nil, err
	}
	config.Timeout = cmp.Or(a.Timeout, RequestTimeout)
	config.QPS = -1 // no limit: a person is waiting, and there are few requests
	config.WarningHandler = rest.NoWarnings{}
	c := &Cluster{Namespace: cmp.Or(a.Namespace, deploy.Namespace), Context: name, Server: cmp.Or(a.Server, config.Host), ServerChosen: a.Server != "", Config: config, clock: new(serverClock)}
	if u, err := url.Parse(c.Server); err != nil || u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("%s: API server %s: want a URL such as https://192.0.2.1:6443", c, safetext.Of(c.Server))
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme, isthmus.AddToScheme, mcs.Install} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	clocked := rest.CopyConfig(config)
	clocked.Wrap(c.clock.listening)
	if c.Client, err = client.New(clocked, client.Options{Scheme: scheme}); err != nil {
		return nil, fmt.Errorf("%s: %w", c, err)
	}
	return c, nil
}

func load(a Access) (config *rest.Config, name string, err error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = a.Kubeconfig
	kubeconfig := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: a.Context, AuthInfo: clientcmdapi.AuthInfo{Impersonate: a.As, ImpersonateGroups: a.AsGroups}})
	raw, err := kubeconfig.RawConfig()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, "", fmt.Errorf("kubeconfig %s: no such file", a.Kubeconfig)
	case err != nil:
		return nil, "", fmt.Errorf("kubeconfig: %w", err)
	}
	name = cmp.Or(a.Context, raw.CurrentContext, "this cluster")
	if a.Context != "" && raw.Contexts[a.Context] == nil {
		return nil, "", fmt.Errorf("kubeconfig: no context %s", safetext.Of(a.Context))
	}
	config, err = kubeconfig.ClientConfig()
	if all := slices.Sorted(maps.Keys(raw.Contexts)); clientcmd.IsEmptyConfig(err) && len(all) > 0 { // the file has contexts, but none of them is current
		return nil, "", fmt.Errorf("kubeconfig: no current context; want --context with one of %s", safetext.Of(strings.Join(all, ", ")))
	}
	if clientcmd.IsEmptyConfig(err) || errors.Is(err, rest.ErrNotInCluster) {
		return nil, "", errors.New("no kubeconfig: want --kubeconfig, $KUBECONFIG or ~/.kube/config")
	}
	if err != nil {
		return nil, "", fmt.Errorf("context %s: %w", safetext.Of(name), err)
	}
	return config, name, nil
}

// HasKubeconfig reports whether there is a default cluster: a kubeconfig where kubectl looks
// for one, or the ServiceAccount of our own Pod.
func HasKubeconfig() bool {
	for _, file := range clientcmd.NewDefaultClientConfigLoadingRules().Precedence {
		if _, err := os.Stat(file); err == nil {
			return true
		}
	}
	return os.Getenv("KUBERNETES_SERVICE_HOST") != ""
}

// String returns the name of the cluster for messages.
func (c *Cluster) String() string {
	return safetext.Of(cmp.Or(c.Identity.ClusterName, c.Context))
}

// The ConfigMap with the identity of the cluster, in Liqo's format. Commands find it by its label.
const (
	IdentityConfigMap  = "isthmus-cluster"
	LabelName          = "app.kubernetes.io/name"
	IdentityLabelValue = "clusterid-configmap"
	KeyClusterID       = "CLUSTER_ID"
	KeyClusterName     = "CLUSTER_NAME"
)

// Identify reads the identity of the cluster. If Isthmus is not installed, the error contains
// the command to install it, unless the cluster runs Liqo.
func (c *Cluster) Identify(ctx context.Context) error {
	if err := c.ReadUID(ctx); err != nil {
		return err
	}
	if err := c.refuseLiqo(); err != nil {
		return err
	}
	identity, _, err := c.ReadIdentity(ctx)
	if err != nil {
		return err
	}
	if identity == nil {
		return c.notInstalled(ctx)
	}
	if err := CheckIdentity(*identity); err != nil {
		return fmt.Errorf("%s: ConfigMap with the identity of the cluster in namespace %s: %w", c, c.Namespace, err)
	}
	c.Identity = *identity
	return nil
}

// notInstalled returns an error, with the remedy, for a cluster without an identity. If Peerings
// still exist, the namespace of the installation was deleted. Then the error has the commands that
// restore or remove the installation.
func (c *Cluster) notInstalled(ctx context.Context) error {
	var peerings isthmus.PeeringList
	when, more := "", ""
	var namespace corev1.Namespace
	if c.Client.Get(ctx, client.ObjectKey{Name: c.Namespace}, &namespace) == nil && !namespace.DeletionTimestamp.IsZero() {
		when = "it is being deleted; once it is gone, "
	}
	if c.Client.List(ctx, &peerings) == nil && len(peerings.Items) > 0 {
		more = fmt.Sprintf(" with the same flags as before; then its %d Peerings work again. To remove Isthmus instead, run `isthmus uninstall --context %s --image IMAGE`", len(peerings.Items), c.Context)
	}
	return fmt.Errorf("%s: namespace %s has no ConfigMap with the identity of the cluster: %srun `isthmus install --context %s --cluster-name NAME`%s",
		c, c.Namespace, when, c.Context, more)
}

// ReadUID reads the UID of kube-system, which no two clusters share.
func (c *Cluster) ReadUID(ctx context.Context) error {
	var system corev1.Namespace
	if err := c.Client.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, &system); err != nil {
		return c.Explain("namespace kube-system", err)
	}
	c.UID = string(system.UID)
	return nil
}

// ReadIdentity returns the identity in the ConfigMap and the ConfigMap's name. The identity is
// nil if there is no ConfigMap. If the ConfigMap has no ID, the ID is the UID of kube-system,
// which ReadUID must have read before.
func (c *Cluster) ReadIdentity(ctx context.Context) (*v1alpha1.ClusterIdentity, string, error) {
	var list corev1.ConfigMapList
	if err := c.Client.List(ctx, &list, client.InNamespace(c.Namespace), client.MatchingLabels{LabelName: IdentityLabelValue}); err != nil {
		return nil, "", c.Explain("ConfigMaps in namespace "+c.Namespace, err)
	}
	switch len(list.Items) {
	case 0:
		return nil, "", nil
	case 1:
		data := list.Items[0].Data
		return &v1alpha1.ClusterIdentity{ClusterID: cmp.Or(data[KeyClusterID], c.UID), ClusterName: data[KeyClusterName]}, list.Items[0].Name, nil
	}
	return nil, "", fmt.Errorf("%s: namespace %s has %d ConfigMaps labelled %s=%s; want one", c, c.Namespace, len(list.Items), LabelName, IdentityLabelValue)
}

var (
	clusterID   = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
	clusterName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,42}[a-z0-9])?$`) // the longest name derived from it is the namespace liqo-tenant-NAME-123456, with at most 63 characters
)

// CheckIdentity returns an error if names of objects could not contain the name or the ID.
func CheckIdentity(i v1alpha1.ClusterIdentity) error {
	if !clusterName.MatchString(i.ClusterName) {
		return fmt.Errorf("cluster name %s: want at most 44 lower-case letters, digits and '-', because names of namespaces contain it", safetext.Of(i.ClusterName))
	}
	if !clusterID.MatchString(i.ClusterID) {
		return fmt.Errorf("cluster ID %s: want at most 63 letters, digits, '-', '_' and '.', such as a UUID", safetext.Of(i.ClusterID))
	}
	return nil
}

// Explain translates an error of the API server into a message for people. subject is the name of
// the object or step.
func (c *Cluster) Explain(subject string, err error) error {
	switch {
	case err == nil:
		return nil
	case meta.IsNoMatchError(err):
		return fmt.Errorf("%s: %s: the custom resource definitions are not installed; run `isthmus install --context %s`", c, subject, c.Context)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%s: %s: %w: the API server does not accept the credentials of the kubeconfig", c, subject, ErrUnreachable)
	case apierrors.ReasonForError(err) == metav1.StatusReasonUnknown && !errors.Is(err, context.Canceled):
		// There was no response from the API server.
		return fmt.Errorf("%s: %s: %w: %w", c, subject, ErrUnreachable, kubeerr.Plain("API server "+safetext.Of(c.Config.Host), err))
	}
	return fmt.Errorf("%s: %s: %w", c, subject, err)
}

// Distinct returns an error if a and b are the same cluster, or if peers could not distinguish
// them.
func Distinct(a, b *Cluster) error {
	switch {
	case a.UID == b.UID:
		return fmt.Errorf("%s and %s are the same cluster (its namespace kube-system has the UID %s): want two", a.Context, b.Context, a.UID)
	case a.Identity.ClusterID == b.Identity.ClusterID:
		return fmt.Errorf("%s and %s have the same cluster ID %s: install one of them with another --cluster-id", a, b, safetext.Of(a.Identity.ClusterID))
	}
	return nil
}
