package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/install"
)

func newInstallCommand() *cobra.Command {
	var access cluster.Access
	var o install.Options
	var f installFlags
	var show, showValues, configureDNS bool
	cmd := &cobra.Command{
		Use:   "install --cluster-name NAME",
		Short: "Install Isthmus in a cluster, or upgrade it",
		Long: `Install Isthmus in a cluster: the custom resource definitions, a namespace, a
ServiceAccount with the least rights for each component, a ConfigMap with the ID and name
that peers use for the cluster, and the components. The command detects the pods' network,
prints the source of this value, and waits until the components run.

The command applies the Helm chart of Isthmus. --values and --set take values of the
chart, and the other flags are shorthands for some of these values. The cluster stores the
values. A repeated command without flags therefore changes nothing, or upgrades an older
installation. Custom resource definitions of a newer release are not changed. --print
prints the manifests and needs no cluster.`,
		Example: "  isthmus install --context paris --cluster-name paris --gateway-service LoadBalancer\n" +
			"  isthmus install --cluster-name paris --print > isthmus.yaml",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if showValues {
				_, err := fmt.Fprint(cmd.OutOrStdout(), deploy.ChartValues)
				return err
			}
			values, err := f.values(cmd)
			if err != nil {
				return err
			}
			o.Values, o.Version = values, cli.ImageTag()
			if cmd.Flags().Changed("configure-dns") {
				o.ConfigureDNS = &configureDNS
			}
			if show {
				text, err := o.Manifests(access.Namespace)
				fmt.Fprint(cmd.OutOrStdout(), text)
				return err
			}
			c, err := connect(access)
			if err != nil {
				return err
			}
			o.Report = reporter(cmd)
			if err := install.Run(cmd.Context(), c, o); err != nil {
				return clusterError(err)
			}
			peer := "isthmus peer --context " + cmp.Or(access.Context, "THIS") + " --remote-context OTHER"
			what := "installed; peer it with another cluster: " + peer
			if f.services {
				what = "installed; peer it with another cluster, and share the Services that a namespace exports: " + peer + " --services NAMESPACE"
			}
			if o.Wait == 0 {
				what = "applied, without waiting for the components; check them with isthmus status"
			}
			o.Report(fmt.Sprintf("%s: %s", c, what))
			return nil
		},
	}
	addAccessFlags(cmd, &access, "", "")
	cmd.Flags().StringVar(&o.Identity.ClusterName, "cluster-name", "", "name of the cluster at its peers (required at the first installation)")
	cmd.Flags().StringVar(&o.Identity.ClusterID, "cluster-id", "", "unique ID of the cluster (default the UID of its namespace kube-system)")
	f.add(cmd)
	cmd.Flags().BoolVar(&o.Force, "force", false, "accept a --pod-cidr that contains neither a Pod nor a node's podCIDR")
	cmd.Flags().BoolVar(&o.Forget, "reset-values", false, "ignore the stored values of earlier installations")
	cmd.Flags().BoolVar(&configureDNS, "configure-dns", false, "with --services: add the zone clusterset.local to the Corefile of CoreDNS, and exempt the zone from the negative cache; =false undoes this")
	cmd.Flags().DurationVar(&o.Wait, "timeout", 5*time.Minute, "how long to wait until the components run; 0: do not wait")
	cmd.Flags().BoolVar(&show, "print", false, "print the manifests and apply nothing")
	cmd.Flags().BoolVar(&showValues, "print-values", false, "print the values of the chart with their descriptions")
	return cmd
}

// installFlags are flags that set values of the chart.
type installFlags struct {
	file                       string
	set                        []string
	image, service, podCIDR    string
	port                       int32
	tunnels                    int
	metricsAuth, onHostNetwork bool
	withoutWorkloads, services bool
}

func (f *installFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.file, "values", "", "YAML file with values of the chart")
	flags.StringArrayVar(&f.set, "set", nil, "a value of the chart, such as gateway.replicas=3; overrides --values")
	flags.StringVar(&f.image, "image", "", "image of the components (default "+defaultRepository+" with the tag of this program's version)")
	cli.AddChoiceFlag(cmd, &f.service, "gateway-service", string(corev1.ServiceTypeNodePort), "type of the gateway's Service; none: no Service", "none", string(corev1.ServiceTypeNodePort), string(corev1.ServiceTypeLoadBalancer))
	flags.Int32Var(&f.port, "gateway-port", 5871, "UDP port of the gateway and its Service")
	flags.IntVar(&f.tunnels, "tunnels", 1, "tunnels to one peer, on UDP ports from --gateway-port upwards")
	flags.StringVar(&f.podCIDR, "pod-cidr", "", "network of all pods (default: detected)")
	flags.BoolVar(&f.onHostNetwork, "host-network", false, "run the gateways in their nodes' network")
	flags.BoolVar(&f.withoutWorkloads, "without-workloads", false, "do not install the components, because they run elsewhere; the gateway's Service is then installed only if --gateway-service is set")
	flags.BoolVar(&f.services, "services", false, "export and import Services through the Multi-Cluster Services API, with names in clusterset.local; isthmus peer --services chooses the namespaces (docs/services.md)")
	flags.BoolVar(&f.metricsAuth, "metrics-auth", false, "serve metrics only to clients with the ClusterRole isthmus-metrics-reader; gives the components the rights to check this")
}

// defaultRepository is the repository with the images of releases.
const defaultRepository = "ghcr.io/isthmus-net/isthmus"

// values returns the chart values for the flags that the user has set.
func (f *installFlags) values(cmd *cobra.Command) (chart.Values, error) {
	changed := cmd.Flags().Changed
	values := chart.Values{}
	if f.file != "" {
		text, err := os.ReadFile(f.file)
		if err != nil {
			return nil, cli.Usage("--values: %w", err)
		}
		if values, err = chart.ParseValues(text); err != nil {
			return nil, cli.Usage("--values %s: %w", f.file, err)
		}
	}
	for _, one := range f.set {
		key, text, ok := strings.Cut(one, "=")
		var value any
		if err := yaml.Unmarshal([]byte(text), &value); !ok || key == "" || err != nil {
			return nil, cli.Usage("--set %q: want a value such as gateway.replicas=3", one)
		}
		if value == nil {
			value = ""
		}
		chart.Set(values, value, strings.Split(key, ".")...)
	}
	if f.port < 1 || f.port > 65535 {
		return nil, cli.Usage("--gateway-port %d: want 1 to 65535", f.port)
	}
	if last := int(f.port) + f.tunnels - 1; f.tunnels < 1 || f.tunnels > fabric.MaxTunnels || last > 65535 {
		return nil, cli.Usage("--tunnels %d: want 1 to %d, on UDP ports from --gateway-port up to 65535", f.tunnels, fabric.MaxTunnels)
	}
	if f.podCIDR != "" {
		if _, err := network("pod-cidr", f.podCIDR); err != nil {
			return nil, err
		}
	}
	for _, short := range []struct {
		flag  string
		value any
		path  []string
	}{
		{"gateway-port", float64(f.port), []string{"gateway", "port"}},
		{"tunnels", float64(f.tunnels), []string{"gateway", "tunnels"}},
		{"pod-cidr", f.podCIDR, []string{"networks", "podCIDR"}},
		{"host-network", f.onHostNetwork, []string{"gateway", "hostNetwork"}},
		{"metrics-auth", f.metricsAuth, []string{"metrics", "enabled"}},
		{"services", f.services, []string{"services", "enabled"}},
		{"without-workloads", !f.withoutWorkloads, []string{"workloads"}},
	} {
		if changed(short.flag) {
			chart.Set(values, short.value, short.path...)
		}
	}
	if changed("gateway-service") {
		chart.Set(values, strings.TrimPrefix(f.service, "none"), "gateway", "service", "type")
	}
	if f.image != "" {
		repository, digest, byDigest := strings.Cut(f.image, "@")
		tag := ""
		if i := strings.LastIndexByte(repository, ':'); i > strings.LastIndexByte(repository, '/') {
			repository, tag = repository[:i], repository[i+1:]
		}
		if repository == "" || !byDigest && tag == "" {
			return nil, cli.Usage("--image %q: want a name with a tag or a digest, such as %s:v1.0.0", f.image, defaultRepository)
		}
		for key, value := range map[string]string{"repository": repository, "tag": tag, "digest": digest} { // set single keys, because the map also has the pull policy
			chart.Set(values, value, "image", key)
		}
	}
	return values, nil
}

// addAccessFlags adds the flags that select a cluster, with the names that kubectl uses. The
// flags for the other cluster have the prefix "remote-".
func addAccessFlags(cmd *cobra.Command, a *cluster.Access, prefix, whose string) {
	flags := cmd.Flags()
	file, current, timeout, short := "that of --kubeconfig", "the current one of --"+prefix+"kubeconfig", "that of --request-timeout", ""
	if prefix == "" {
		file, current, timeout, short = "$KUBECONFIG or ~/.kube/config", "the current one", "10s", "n"
	}
	flags.StringVar(&a.Kubeconfig, prefix+"kubeconfig", "", "kubeconfig file"+whose+" (default "+file+")")
	flags.StringVar(&a.Context, prefix+"context", "", "context"+whose+" in the kubeconfig (default "+current+")")
	flags.StringVarP(&a.Namespace, prefix+"namespace", short, deploy.Namespace, "namespace of the installation"+whose)
	flags.StringVar(&a.As, prefix+"as", "", "user to impersonate"+strings.Replace(whose, " of ", " in ", 1)+", such as system:serviceaccount:NAMESPACE:NAME")
	flags.StringArrayVar(&a.AsGroups, prefix+"as-group", nil, "group to impersonate"+strings.Replace(whose, " of ", " in ", 1)+"; may be repeated")
	flags.Var((*requestTimeout)(&a.Timeout), prefix+"request-timeout", "timeout of one request to the API server"+whose+", such as 30s (default "+timeout+")")
	completeAccess(cmd, a, prefix)
}

// requestTimeout is the value of --request-timeout. As for kubectl, a number without a unit
// means seconds.
type requestTimeout time.Duration

func (d *requestTimeout) Type() string { return "duration" }

func (d *requestTimeout) String() string {
	if *d == 0 {
		return "" // so that the help shows no default
	}
	return time.Duration(*d).String()
}

func (d *requestTimeout) Set(text string) error {
	if seconds, err := strconv.ParseUint(text, 10, 31); err == nil {
		*d = requestTimeout(time.Duration(seconds) * time.Second)
		return nil
	}
	parsed, err := time.ParseDuration(text)
	if err != nil || parsed < 0 {
		return errors.New("want a duration such as 30s, or a number of seconds")
	}
	*d = requestTimeout(parsed)
	return nil
}

// local and remote have the values of the flags for the two clusters. If no flag sets the
// kubeconfig or the timeout of remote, otherCluster copies that of local. It reports whether a flag
// selects the other cluster.
func otherCluster(local, remote *cluster.Access) bool {
	named := remote.Context != "" || remote.Kubeconfig != ""
	if named && remote.Kubeconfig == "" {
		remote.Kubeconfig = local.Kubeconfig
	}
	if remote.Timeout == 0 {
		remote.Timeout = local.Timeout
	}
	return named
}

func connect(a cluster.Access) (*cluster.Cluster, error) {
	klog.SetLogger(logr.Discard()) // our own error replaces klog's message about an unreachable server
	c, err := cluster.Connect(a)
	if err != nil {
		return nil, cli.Unreachable(err)
	}
	return c, nil
}

// If err is about an unreachable cluster, clusterError adds the exit code for that.
func clusterError(err error) error {
	if errors.Is(err, cluster.ErrUnreachable) && !errors.Is(err, cluster.ErrNotReady) {
		return cli.Unreachable(err)
	}
	return err
}

func reporter(cmd *cobra.Command) func(string) {
	return func(line string) { fmt.Fprintln(cmd.OutOrStdout(), line) }
}
