package main

import (
	"cmp"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/manager"
	"github.com/isthmus-net/isthmus/manager/ipamrpc"
)

// managerFlags are the manager's flags. Flags that complete must parse are stored as text.
type managerFlags struct {
	options                            manager.Options
	podCIDR, serviceCIDR, externalCIDR string
	pools, reserved, ipamAllow         []string
	ipamCert, ipamKey, ipamClientCA    string
	secure                             metricsFlags
	profileAddress                     string
	level                              string
}

func newManagerCommand() *cobra.Command {
	var f managerFlags
	cmd := &cobra.Command{
		Use:   "manager",
		Short: "Run the control plane of this cluster",
		Long: `Run the control plane of this cluster. For each Peering the manager
- publishes a NetworkConfig to the peer's API server;
- chooses networks for the peer that overlap nothing in this cluster, and answers the
  peer's NetworkConfig with them;
- writes the TunnelEndpoint and NatMapping for gateways and route agents.

The status of the Peering reports the progress.

Values without a flag are detected: the cluster's ID and name from the ConfigMap
that "isthmus install" (or Liqo) writes, the PodCIDR from kubeadm's configuration,
the ServiceCIDR from the API server, the gateway's address and key from its Service
and Secret. The status of each Peering names a value that cannot be detected.

Several managers may run; one of them is active. The manager needs no privileges.
$POD_NAME is its name in the Lease; with $POD_UID (metadata.uid) a restarted container
takes its own Lease over at once.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.complete(); err != nil {
				return err
			}
			log := logger(cmd, f.level)
			f.options.Log = log
			var err error
			if f.options.MetricsSecure, err = f.secure.secure(f.options.Kubeconfig, log); err != nil {
				return err
			}
			servers, err := serveProfiles(f.profileAddress, log)
			if err != nil {
				return err
			}
			defer servers.Close()
			return manager.Run(cmd.Context(), f.options)
		},
	}
	flags, o := cmd.Flags(), &f.options
	flags.StringVar(&o.Kubeconfig, "kubeconfig", "", "kubeconfig file (default: the Pod's ServiceAccount)")
	flags.StringVar(&o.Namespace, "namespace", "", "namespace of the installation (default: $POD_NAMESPACE, else "+deploy.Namespace+")")
	flags.StringVar(&o.Cluster.ClusterID, "cluster-id", "", "ID of this cluster (default: the one in the ConfigMap that isthmus install writes, else the UID of kube-system)")
	flags.StringVar(&o.Cluster.ClusterName, "cluster-name", "", "name of this cluster, which is part of object names (default: that of the ConfigMap)")
	flags.StringVar(&f.podCIDR, "pod-cidr", "", "network of all pods of this cluster (default: from kubeadm's configuration)")
	flags.StringVar(&f.serviceCIDR, "service-cidr", "", "network of the Services (default: from the API server)")
	flags.StringVar(&f.externalCIDR, "external-cidr", "", "network whose addresses peers use for endpoints that are not pods (default: a free /20, or a free network of the PodCIDR's size if that is smaller)")
	flags.StringSliceVar(&f.pools, "pools", nil, "pools of addresses for the remapped networks of peers (default: 10.0.0.0/8,192.168.0.0/16,172.16.0.0/12,100.64.0.0/10)")
	flags.StringSliceVar(&f.reserved, "reserved", nil, "more networks that are never allocated to peers, besides this cluster's own and those that its nodes reach")
	flags.BoolVar(&o.Services, "services", false, "share Services with peers according to their Peerings; needs rights and the CRDs of the Multi-Cluster Services API")
	flags.BoolVar(&o.LeaderElect, "leader-elect", true, "elect one active manager among several")
	flags.StringVar(&o.IPAM.Address, "ipam-address", "", "TCP address of Liqo's gRPC service ipam, such as :6000, which Liqo's virtual kubelets need (default: none)")
	flags.StringVar(&f.ipamCert, "ipam-tls-cert", "", "file with the certificate of the service at --ipam-address, in PEM")
	flags.StringVar(&f.ipamKey, "ipam-tls-key", "", "file with the private key of the service at --ipam-address, in PEM")
	flags.StringVar(&f.ipamClientCA, "ipam-client-ca", "", "file with the certificate authority of the clients of --ipam-address")
	flags.BoolVar(&o.IPAM.Plain, "ipam-plain", false, "serve every client of --ipam-address without TLS, as Liqo does; restrict clients by a NetworkPolicy such as deploy/networkpolicy/ipam.yaml")
	flags.StringVar(&o.IPAMService, "ipam-service", "", "Service without a selector; the active manager writes its $POD_IP into the Service's EndpointSlice (default: none)")
	flags.StringSliceVar(&f.ipamAllow, "ipam-allow", nil, "networks of nodes, Services or other peers for whose addresses the service at --ipam-address may create mappings (default: none)")
	flags.StringVar(&o.MetricsAddress, "metrics-address", "127.0.0.1:5876", "TCP address of /metrics; empty disables it")
	f.secure.add(flags)
	flags.StringVar(&o.HealthAddress, "health-address", ":5877", "TCP address of /healthz and /readyz; empty disables it")
	flags.StringVar(&f.profileAddress, "pprof-address", "", "loopback TCP address of /debug/pprof, such as 127.0.0.1:6060; empty disables it")
	cli.AddChoiceFlag(cmd, &f.level, "log-level", "info", "minimum level of log lines", "debug", "info", "warn", "error")
	return cmd
}

// complete validates the flags, and reads defaults from the environment.
func (f *managerFlags) complete() (err error) {
	o := &f.options
	o.Name, o.Instance, o.Version = os.Getenv("POD_NAME"), os.Getenv("POD_UID"), cli.Version()
	o.Namespace = cmp.Or(o.Namespace, os.Getenv("POD_NAMESPACE"), deploy.Namespace)
	if id := o.Cluster.ClusterID; id != "" {
		if wrong := fabric.CheckClusterID(id); wrong != "" {
			return cli.Usage("--cluster-id: %s", wrong)
		}
	}
	n := &o.Plan
	for _, one := range []struct {
		flag, text string
		into       *netip.Prefix
	}{{"pod-cidr", f.podCIDR, &n.PodCIDR}, {"service-cidr", f.serviceCIDR, &n.ServiceCIDR}, {"external-cidr", f.externalCIDR, &n.ExternalCIDR}} {
		if one.text == "" {
			continue
		}
		if *one.into, err = network(one.flag, one.text); err != nil {
			return err
		}
	}
	if n.Pools, err = networks("pools", f.pools); err != nil {
		return err
	}
	if n.Reserved, err = networks("reserved", f.reserved); err != nil {
		return err
	}
	if err := apart("service-cidr", n.ServiceCIDR, "pod-cidr", n.PodCIDR); err != nil {
		return err
	}
	if err := apart("external-cidr", n.ExternalCIDR, "pod-cidr", n.PodCIDR); err != nil {
		return err
	}
	if err := apart("external-cidr", n.ExternalCIDR, "service-cidr", n.ServiceCIDR); err != nil {
		return err
	}
	if o.IPAM.Allow, err = networks("ipam-allow", f.ipamAllow); err != nil {
		return err
	}
	if err := f.completeIPAM(); err != nil {
		return err
	}
	for _, a := range []struct{ flag, address string }{
		{"ipam-address", o.IPAM.Address}, {"metrics-address", o.MetricsAddress}, {"health-address", o.HealthAddress},
	} {
		if a.address == "" {
			continue
		}
		_, port, err := net.SplitHostPort(a.address)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		if err != nil {
			return cli.Usage("--%s %q: want an address and a port such as 127.0.0.1:5876, or only :5876", a.flag, a.address)
		}
	}
	if err := f.secure.complete(); err != nil {
		return err
	}
	return checkProfileAddress(f.profileAddress)
}

// completeIPAM validates the flags of the IPAM, and reads its certificates. The IPAM needs client
// certificates unless --ipam-plain is set.
func (f *managerFlags) completeIPAM() (err error) {
	if f.options.IPAMService != "" {
		if f.options.PodIP, err = netip.ParseAddr(os.Getenv("POD_IP")); err != nil {
			return cli.Usage("--ipam-service: $POD_IP %q: want an address of this Pod", os.Getenv("POD_IP"))
		}
	}
	o, files := &f.options.IPAM, f.ipamCert != "" || f.ipamKey != "" || f.ipamClientCA != ""
	switch {
	case o.Address == "" && (files || o.Plain || len(o.Allow) > 0 || f.options.IPAMService != ""):
		return cli.Usage("--ipam-plain, --ipam-allow, --ipam-service and the certificates of the IPAM need --ipam-address")
	case o.Address == "" || o.Plain && !files:
		return nil
	case o.Plain:
		return cli.Usage("--ipam-plain and certificates of the IPAM: want only one of them")
	case f.ipamCert == "" || f.ipamKey == "" || f.ipamClientCA == "":
		return cli.Usage("--ipam-address: want --ipam-tls-cert, --ipam-tls-key and --ipam-client-ca, to authenticate the callers, or --ipam-plain")
	}
	if o.TLS, err = ipamrpc.TLS(f.ipamCert, f.ipamKey, f.ipamClientCA); err != nil {
		return cli.Usage("--ipam-tls-cert, --ipam-tls-key, --ipam-client-ca: %v", err)
	}
	return nil
}

func networks(flag string, texts []string) (all []netip.Prefix, err error) {
	for _, text := range texts {
		p, err := network(flag, strings.TrimSpace(text))
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

func network(flag, text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		return p, cli.Usage("--%s %q: want a network such as 10.244.0.0/16", flag, text)
	case p != p.Masked():
		return p, cli.Usage("--%s %q: has host bits set; want %v", flag, text, p.Masked())
	}
	return p, nil
}

func apart(flag string, p netip.Prefix, otherFlag string, other netip.Prefix) error {
	if p.IsValid() && other.IsValid() && p.Overlaps(other) {
		return cli.Usage("--%s %v: overlaps --%s, %v; want networks that do not overlap", flag, p, otherFlag, other)
	}
	return nil
}
