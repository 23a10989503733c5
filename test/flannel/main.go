// Command flannel is flanneld with the backends vxlan and host-gw, made of flannel's own packages.
// It has flannel's lease in the Node object, its devices and routes, its masquerading and its
// accept rules. It lacks the backends for clouds, whose modules are not available everywhere, and
// the check for the module br_netfilter.
//
// It is a separate module, so that its versions of the Kubernetes clients do not conflict with
// ours.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/flannel-io/flannel/pkg/backend"
	_ "github.com/flannel-io/flannel/pkg/backend/hostgw"
	_ "github.com/flannel-io/flannel/pkg/backend/vxlan"
	"github.com/flannel-io/flannel/pkg/ip"
	"github.com/flannel-io/flannel/pkg/ipmatch"
	"github.com/flannel-io/flannel/pkg/subnet/kube"
	"github.com/flannel-io/flannel/pkg/trafficmngr/iptables"
)

// resync is flannel's default, in seconds.
const resync = 5

func main() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server")
	config := flag.String("net-config-path", "", "file with the network's configuration")
	file := flag.String("subnet-file", "", "file that says that all is set")
	device := flag.String("iface", "eth0", "device by which the nodes reach each other")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *kubeconfig, *config, *file, *device); err != nil {
		fmt.Fprintln(os.Stderr, "flannel:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, kubeconfig, file, subnetFile, device string) error {
	manager, err := kube.NewSubnetManager(ctx, "", kubeconfig, "flannel.alpha.coreos.com", file, false)
	if err != nil {
		return fmt.Errorf("subnet manager: %w", err)
	}
	config, err := manager.GetNetworkConfig(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	stack, err := ipmatch.GetIPFamily(config.EnableIPv4, config.EnableIPv6)
	if err != nil {
		return err
	}
	by, err := ipmatch.LookupExtIface(device, "", "", stack, ipmatch.PublicIPOpts{})
	if err != nil {
		return fmt.Errorf("device %s: %w", device, err)
	}
	kind, err := backend.NewManager(ctx, manager, by).GetBackend(config.BackendType)
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	network, err := kind.RegisterNetwork(ctx, &group, config)
	if err != nil {
		return fmt.Errorf("register the network: %w", err)
	}
	rules := &iptables.IPTablesManager{}
	if err := rules.Init(ctx); err != nil {
		return err
	}
	err = rules.SetupAndEnsureMasqRules(ctx, config.Network, ip.IP4Net{}, ip.IP4Net{}, config.IPv6Network, ip.IP6Net{}, ip.IP6Net{}, network.Lease(), resync, false)
	if err != nil {
		return fmt.Errorf("masquerading: %w", err)
	}
	rules.SetupAndEnsureForwardRules(ctx, config.Network, config.IPv6Network, resync)
	if err := manager.HandleSubnetFile(subnetFile, config, true, network.Lease().Subnet, network.Lease().IPv6Subnet, network.MTU()); err != nil {
		return err
	}
	group.Go(func() { network.Run(ctx) })
	err = manager.CompleteLease(ctx, network.Lease(), &group)
	group.Wait()
	return err
}
