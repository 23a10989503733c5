package routeagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// reportFile writes each report as a line into a file.
func reportFile(path string) func(context.Context, fabric.NodeNetworks) error {
	return func(_ context.Context, n fabric.NodeNetworks) error {
		b, err := json.Marshal(n)
		if err != nil {
			return err
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = f.Write(append(b, '\n'))
		return errors.Join(err, f.Close())
	}
}

// refusedFile writes the last reported resourceVersion into a file.
func refusedFile(path string) func(context.Context, int64) error {
	return func(_ context.Context, revision int64) error {
		return os.WriteFile(path, strconv.AppendInt(nil, revision, 10), 0o600)
	}
}

// untilItRefuses waits until the agent of a node has reported that it refuses all
// allocated networks.
func (c *cluster) untilItRefuses(n *lab.Node) {
	c.t.Helper()
	c.eventually(n, func() error {
		b, err := os.ReadFile(c.reportPath(n) + ".refused")
		if err == nil && string(b) != strconv.FormatInt(c.in.Revision, 10) {
			err = fmt.Errorf("tells that it refuses up to %s; want %d", b, c.in.Revision)
		}
		return err
	})
}

func (c *cluster) reportPath(n *lab.Node) string { return filepath.Join(c.state, n.Name+".told") }

// lastReport returns the last report of a node's agent, and the number of its reports.
func (c *cluster) lastReport(n *lab.Node) (last fabric.NodeNetworks, times int, err error) {
	b, err := os.ReadFile(c.reportPath(n))
	if err != nil {
		return last, 0, err
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return last, len(lines), json.Unmarshal([]byte(lines[len(lines)-1]), &last)
}

func (c *cluster) untilReported(n *lab.Node, what string, accept func(fabric.NodeNetworks) bool) {
	c.t.Helper()
	c.eventually(n, func() error {
		last, _, err := c.lastReport(n)
		if err == nil && !accept(last) {
			err = fmt.Errorf("not %s: %v", what, last)
		}
		return err
	})
}

func TestAgentReportsReachableForeignNetworks(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	c.in.Own = []netip.Prefix{localPods}
	c.writeIntent()
	n1, n2 := c.Nodes[0], c.Nodes[1]
	resolvers := "# the node's\nsearch example.com\nnameserver 192.168.79.53\nnameserver 127.0.0.53\nnameserver fe80::1%eth0\nnameserver 2001:db8::53\n"
	if err := os.WriteFile(filepath.Join(c.state, "resolv.conf"), []byte(resolvers), 0o600); err != nil {
		t.Fatal(err)
	}
	c.start(n1, n2)
	has := func(n fabric.NodeNetworks, texts ...string) bool {
		return !slices.ContainsFunc(texts, func(text string) bool { return !slices.Contains(n.Networks, netip.MustParsePrefix(text)) })
	}
	for _, n := range []*lab.Node{n1, n2} {
		c.untilItRefuses(n)
	}
	allocate(&c.in, remotePods, netip.MustParsePrefix("10.99.0.0/16"))
	c.writeIntent()
	c.untilItRefuses(n2)
	allocate(&c.in, remotePods, remoteExternal)
	c.writeIntent()
	c.untilItRefuses(n2)
	link := netip.PrefixFrom(n1.Addr, 24).Masked().String()
	for _, n := range []*lab.Node{n1, n2} {
		c.untilReported(n, "its link and what is on-prem", func(r fabric.NodeNetworks) bool { return has(r, link, "192.168.77.0/24") })
		last, _, _ := c.lastReport(n)
		for _, p := range last.Networks {
			if p.Overlaps(localPods) || p.Overlaps(remotePods) || p.Overlaps(remoteExternal) || p.Overlaps(netip.MustParsePrefix("240.0.0.0/8")) || p.Bits() == 0 {
				t.Errorf("%s tells %v, which is ours", n, p)
			}
		}
		if text := fmt.Sprint(last.Resolvers); text != "[192.168.79.53 2001:db8::53]" {
			t.Errorf("%s tells of the DNS servers %s", n, text)
		}
	}

	v6 := n2.Do(func() error { // the lab has only IPv4
		return errors.Join(os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("0"), 0),
			os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("0"), 0))
	}) == nil

	// Changes of one node's routes, addresses and links cause reports of that node, but none of the
	// other.
	_, before, err := c.lastReport(n1)
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range []struct {
		command, undo string
		want          []string
	}{
		{"ip route add 192.168.32.0/22 via " + n1.Addr.String() + " proto bird", "ip route del 192.168.32.0/22", []string{"192.168.32.0/22"}},
		{"ip route add blackhole 10.9.0.0/21", "ip route del blackhole 10.9.0.0/21", []string{"10.9.0.0/21"}},
		{"ip addr add 203.0.113.7/32 dev lo", "ip addr del 203.0.113.7/32 dev lo", []string{"203.0.113.7/32"}},
		{"ip -6 route add blackhole fd00:5::/48", "ip -6 route del blackhole fd00:5::/48", []string{"fd00:5::/48"}},
		{"ip addr add 192.0.2.9/26 dev lo", "ip addr del 192.0.2.9/26 dev lo", []string{"192.0.2.0/26"}}, // every address of the network is local
	} {
		if strings.Contains(change.command, "-6") && !v6 {
			t.Logf("without IPv6: %s", change.command)
			continue
		}
		c.run(n2.Host, "%s", change.command)
		c.untilReported(n2, change.command, func(r fabric.NodeNetworks) bool { return has(r, change.want...) })
		c.run(n2.Host, "%s", change.undo)
		c.untilReported(n2, change.undo, func(r fabric.NodeNetworks) bool {
			return !slices.ContainsFunc(change.want, func(text string) bool { return has(r, text) })
		})
	}
	c.run(n2.Host, "ip link add onprem type veth peer name farend")
	c.run(n2.Host, "ip link set farend up")
	c.run(n2.Host, "ip addr add 172.19.4.1/22 dev onprem")
	want := []string{"172.19.4.0/22"}
	if v6 {
		c.run(n2.Host, "ip -6 addr add 2001:db8:7::1/64 dev onprem nodad")
		want = append(want, "2001:db8:7::/64")
	}
	c.run(n2.Host, "ip link set onprem up")
	c.untilReported(n2, "the link", func(r fabric.NodeNetworks) bool { return has(r, want...) })
	c.run(n2.Host, "ip link set onprem down") // the address stays, but the network cannot be reached
	c.untilReported(n2, "the link that is down", func(r fabric.NodeNetworks) bool { return !has(r, "172.19.4.0/22") })
	if _, now, _ := c.lastReport(n1); now != before {
		t.Errorf("node 1 sent %d reports without a change", now-before)
	}

	// The report leaves out a default route in disguise, so that peers still get networks. The
	// status names the route.
	c.run(n2.Host, "ip route add 0.0.0.0/1 via %v", n1.Addr)
	c.eventually(n2, func() error {
		s, err := n2.Get(c.ctx, "http://"+statusAt+"/status")
		if err == nil && !strings.Contains(s, "Node "+n2.Name+": its route to 0.0.0.0/1 is wider than a /8") {
			err = errors.New(s)
		}
		return err
	})
	if last, _, _ := c.lastReport(n2); has(last, "0.0.0.0/1") {
		t.Errorf("node 2 tells %v", last)
	}
	// A new Node with the same name gets a report, too.
	_, before, _ = c.lastReport(n1)
	c.in.Nodes[0].Created++
	c.writeIntent()
	c.eventually(n1, func() error {
		if _, now, err := c.lastReport(n1); now == before {
			return fmt.Errorf("no report for the new Node: %w", err)
		}
		return nil
	})
}

// An agent whose reports cannot be stored shows that in its status, and forwards traffic.
func TestAgentThatCannotReportForwardsTrafficAndShowsTheError(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	n := c.Nodes[1]
	if err := os.Mkdir(c.reportPath(n), 0o700); err != nil { // so that the file cannot be written
		t.Fatal(err)
	}
	c.start(c.Nodes...)
	c.ping(c.pod(1).Host, remotePod)
	c.eventually(n, func() error {
		s, err := n.Get(c.ctx, "http://"+statusAt+"/status")
		if err == nil && (!strings.Contains(s, "is a directory") || !strings.Contains(s, `"ready": true`)) {
			err = errors.New(s)
		}
		return err
	})
	if err := os.Remove(c.reportPath(n)); err != nil {
		t.Fatal(err)
	}
	c.untilReported(n, "anything", func(r fabric.NodeNetworks) bool { return len(r.Networks) > 0 })
	if err := c.agents[n].end(unix.SIGTERM); err != nil {
		t.Error(err)
	}
}

func TestUnreachableAPIServerIsReportedInPlainWords(t *testing.T) {
	a := new(agent)
	a.lastResult.err = fmt.Errorf("NodeNetworks isthmus-system/n: %w", &url.Error{Op: "Patch", URL: "https://10.96.0.1/apis", Err: &net.OpError{Op: "dial", Net: "tcp", Err: unix.EHOSTUNREACH}})
	if got, want := a.status().Problems, "NodeNetworks isthmus-system/n: the API server does not answer: no route to host"; !slices.Contains(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
