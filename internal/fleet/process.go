package fleet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// gateways is the number of nodes in a cluster that run a gateway: one active and one standby.
const gateways = 2

// Resolver is the DNS server of all nodes.
const Resolver = "192.168.79.53"

// patience is the timeout for a component to start, and for a component to end. On an idle machine
// either takes seconds.
const patience = 90 * time.Second

// The ports of the components on their hosts.
const (
	managerPort       = 5876
	managerHealthPort = 5877
	ipamPort          = 6000
	gatewayPort       = 5872
	agentPort         = 5874
)

// Manager is the name of the manager's process. Gateway(i) and Agent(i) return the names of the
// others.
const Manager = "manager"

// Gateway returns the name of the gateway's process on node i, counted from 0.
func Gateway(i int) string { return fmt.Sprintf("gateway-%d", i+1) }

// Agent returns the name of the route agent's process on node i, counted from 0.
func Agent(i int) string { return fmt.Sprintf("route-agent-%d", i+1) }

func gatewayPod(i int) string { return Gateway(i) }

// GatewayHost returns the host where the gateway of node i runs: its Pod, or its node if it uses
// the host network.
func (c *Cluster) GatewayHost(i int) *lab.Host {
	if i < len(c.GatewayPods) {
		return c.GatewayPods[i].Host
	}
	return c.Nodes[i].Host
}

// GatewayAddr returns the address of the gateway on node i: its Pod's address, or the node's if
// the gateway uses the host network.
func (c *Cluster) GatewayAddr(i int) netip.Addr {
	if i < len(c.GatewayPods) {
		return c.GatewayPods[i].Addr
	}
	return c.Nodes[i].Addr
}

// A process is a component that runs, or that has stopped and that Start can start again.
type process struct {
	host *lab.Host
	args []string
	env  []string
	// ready and metrics are URLs inside the host.
	ready, metrics string
	// prelude is a shell command that runs before the component, in the component's mount
	// namespace. It may be empty.
	prelude string
	// caps are the capabilities of the component's container, in the notation of setpriv(1). They
	// are empty if the component has no container.
	caps string

	cmd  *lab.Cmd
	done chan struct{}
}

// url returns the URL of a page of a component on its own machine.
func url(port int, page string) string { return fmt.Sprintf("http://127.0.0.1:%d/%s", port, page) }

// startComponents starts manager, gateways and route agents with their own identities and waits
// until they are ready.
func (c *Cluster) startComponents(ctx context.Context) error {
	manager, err := c.identity(ctx, "isthmus-manager")
	if err != nil {
		return err
	}
	// Each node reports its networks and its DNS servers, and peers cannot use these. A fixed
	// resolv.conf makes the reports independent of this machine's DNS servers.
	resolvers := filepath.Join(c.dir, "resolv.conf")
	if err := os.WriteFile(resolvers, []byte("nameserver "+Resolver+"\n"), 0o600); err != nil {
		return err
	}
	add := func(name string, p *process) { c.processes[name] = p }
	add(Manager, &process{
		host: c.Control.Host,
		args: []string{"manager", "--kubeconfig", manager, "--namespace", Namespace,
			"--pod-cidr", c.PodCIDR.String(),
			"--ipam-address", fmt.Sprintf("127.0.0.1:%d", ipamPort), "--ipam-plain",
			"--ipam-allow", c.ipamAllow, "--services=" + strconv.FormatBool(c.services)},
		env:   []string{"POD_NAME=manager-1", "POD_UID=manager-1"},
		ready: url(managerHealthPort, "readyz"), metrics: url(managerPort, "metrics"),
	})
	for i, n := range c.Nodes {
		env := []string{"POD_IP=" + n.Addr.String(), "POD_NAMESPACE=" + Namespace, "NODE_NAME=" + n.Name}
		if i < gateways {
			gateway, err := c.podIdentity(ctx, deploy.GatewayServiceAccount, gatewayPod(i))
			if err != nil {
				return err
			}
			own, caps := len(c.GatewayPods) > 0, "+net_admin"
			if !own {
				caps += ",+sys_admin"
			}
			add(Gateway(i), &process{
				host: c.GatewayHost(i),
				args: []string{"gateway", "--kubeconfig", gateway, "--namespace", Namespace, "--host-network=" + strconv.FormatBool(!own),
					"--state-directory", c.StateDirectory(Gateway(i)), "--votes=" + strconv.FormatBool(c.votes && own),
					"--tunnels", strconv.Itoa(c.Tunnels)},
				env:   append(env[1:len(env):len(env)], "POD_IP="+c.GatewayAddr(i).String(), "POD_NAME="+gatewayPod(i)),
				caps:  caps,
				ready: url(gatewayPort, "readyz"), metrics: url(gatewayPort, "metrics"),
			})
		}
		agent, err := c.podIdentity(ctx, deploy.RouteAgentServiceAccount, Agent(i))
		if err != nil {
			return err
		}
		add(Agent(i), &process{
			host:  n.Host,
			args:  []string{"route-agent", "--kubeconfig", agent, "--state-directory", c.StateDirectory(Agent(i)), "--resolv-conf", resolvers},
			env:   append(env[:len(env):len(env)], "POD_NAME="+Agent(i)),
			ready: url(agentPort, "readyz"), metrics: url(agentPort, "metrics"),
		})
	}
	var group sync.WaitGroup
	errs := make([]error, 0, len(c.processes))
	var mu sync.Mutex
	for name := range c.processes {
		group.Go(func() {
			err := c.Start(ctx, name)
			mu.Lock()
			errs = append(errs, err)
			mu.Unlock()
		})
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return c.waitForReports(ctx)
}

// SetTunnels changes the gateways' number of tunnels. Each gateway uses the new number from its
// next start on. The Service does not change.
func (c *Cluster) SetTunnels(n int) {
	c.Tunnels = n
	for i := range gateways {
		if p := c.processes[Gateway(i)]; p != nil {
			p.args[len(p.args)-1] = strconv.Itoa(n) // the value of --tunnels
		}
	}
}

// SetPrelude sets a shell command that runs before the component, in the component's mount
// namespace, from the next start on. An empty command removes the prelude.
func (c *Cluster) SetPrelude(name, command string) { c.processes[name].prelude = command }

// Start starts a stopped component and waits until it is ready.
func (c *Cluster) Start(ctx context.Context, name string) error {
	if err := c.Launch(name); err != nil {
		return err
	}
	return c.waitReady(ctx, name, c.processes[name])
}

// inContainer is a shell script that runs a command as the kubelet runs the gateway's container.
// The command gets only the capabilities in the first argument, no privilege escalation, and a
// read-only /proc/sys. It must already have its own mount namespace.
const inContainer = `caps=$1; shift; mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys &&
exec setpriv --bounding-set="-all,$caps" --inh-caps=-all --no-new-privs "$@"`

// Launch starts a stopped component without waiting until it is ready.
func (c *Cluster) Launch(name string) error {
	p := c.processes[name]
	if p == nil {
		return fmt.Errorf("cluster %s has no %s", c.Name, name)
	}
	log, err := os.OpenFile(c.Log(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := p.host.Command(context.Background(), c.binary, p.args...)
	flags := uintptr(0)
	if p.caps != "" {
		cmd = p.host.Command(context.Background(), "/bin/sh", append([]string{"-c", inContainer, "sh", p.caps, c.binary}, p.args...)...)
		flags = syscall.CLONE_NEWNS
	}
	if p.prelude != "" {
		cmd = p.host.Command(context.Background(), "/bin/sh", append([]string{"-ec", p.prelude + `; exec "$@"`, "sh", c.binary}, p.args...)...)
		flags = syscall.CLONE_NEWNS
	}
	cmd.Env = append(os.Environ(), p.env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Unshareflags: flags}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("%s of cluster %s: %w", name, c.Name, err)
	}
	done := make(chan struct{})
	go func() {
		_ = cmd.Wait() // cmd.ProcessState has the result
		close(done)
	}()
	c.mu.Lock()
	p.cmd, p.done = cmd, done
	c.mu.Unlock()
	return nil
}

func (c *Cluster) waitReady(ctx context.Context, name string, p *process) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		_, err := p.host.Get(attempt, p.ready)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s of cluster %s ended before it was ready: %s\n%s", name, c.Name, p.cmd.ProcessState, c.Tail(name, 20))
		case <-ctx.Done():
			return fmt.Errorf("%s of cluster %s is not ready: %w\n%s", name, c.Name, err, c.Tail(name, 20))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Stop ends a component by SIGTERM and waits until it has exited.
func (c *Cluster) Stop(name string) error { return c.end(name, syscall.SIGTERM) }

// Kill ends a component by SIGKILL, so that it cannot clean up, and waits until it has exited.
func (c *Cluster) Kill(name string) error { return c.end(name, syscall.SIGKILL) }

// Pause suspends a component by SIGSTOP until Resume.
func (c *Cluster) Pause(name string) error { return c.signal(name, syscall.SIGSTOP) }

// Resume continues a component after Pause.
func (c *Cluster) Resume(name string) error { return c.signal(name, syscall.SIGCONT) }

func (c *Cluster) signal(name string, signal syscall.Signal) error {
	if !c.Running(name) {
		return fmt.Errorf("%s of cluster %s does not run", name, c.Name)
	}
	return c.processes[name].cmd.Process.Signal(signal)
}

// StateDirectory returns the state directory of a gateway or route agent.
func (c *Cluster) StateDirectory(name string) string { return filepath.Join(c.dir, name) }

// Running reports whether a component runs.
func (c *Cluster) Running(name string) bool {
	p := c.processes[name]
	if p == nil {
		return false
	}
	c.mu.Lock()
	started, done := p.cmd != nil, p.done
	c.mu.Unlock()
	if !started {
		return false
	}
	select {
	case <-done:
		return false
	default:
		return true
	}
}

func (c *Cluster) end(name string, signal syscall.Signal) error {
	if !c.Running(name) {
		return nil
	}
	p := c.processes[name]
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	_ = p.cmd.Process.Signal(syscall.SIGCONT) // the process may be paused
	select {
	case <-p.done:
		return nil
	case <-time.After(patience):
		_ = p.cmd.Process.Kill()
		<-p.done
		return fmt.Errorf("%s of cluster %s did not end within %v of %v\n%s", name, c.Name, patience, signal, c.Tail(name, 20))
	}
}

// stopAll ends all components. It ends gateways and agents first, because they have kernel and
// API objects to remove.
func (c *Cluster) stopAll() error {
	var group sync.WaitGroup
	var mu sync.Mutex
	var all error
	for name := range c.processes {
		group.Go(func() {
			err := c.Stop(name)
			mu.Lock()
			all = errors.Join(all, err)
			mu.Unlock()
		})
	}
	group.Wait()
	return all
}

// Log returns the path of the file with the output of all runs of a component.
func (c *Cluster) Log(name string) string { return filepath.Join(c.dir, name+".log") }

// Tail returns the last lines of a component's log.
func (c *Cluster) Tail(name string, lines int) string {
	text, err := os.ReadFile(c.Log(name))
	if err != nil {
		return "\t(" + err.Error() + ")"
	}
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return "\t" + strings.Join(all[max(0, len(all)-lines):], "\n\t")
}

// Components returns the names of all components of the cluster, sorted.
func (c *Cluster) Components() []string { return slices.Sorted(maps.Keys(c.processes)) }
