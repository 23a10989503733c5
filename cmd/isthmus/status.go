package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/source/file"
)

func newStatusCommand() *cobra.Command {
	var address string
	var output cli.Output
	var flows int
	var access cluster.Access
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the peerings of a cluster, or the peers of the gateway on this machine",
		Long: `With a kubeconfig, show the peerings of the cluster: the networks by which the clusters
see each other, the address of the peer's gateway, and problems. The command finds
managers and gateways by the Leases that they renew, and route agents by the Pods on all
nodes. The exit code is 1 if a peering is not ready, or if a component that peerings need
does not work.

With --gateway, or without access to a cluster, show the peers of the gateway on this
machine: their addresses, when each was last heard, and dropped packets. For a standby,
show the state of its copy of the NAT flows instead. The exit code is 1 if a peer does not
answer or the configuration is not in force.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if aboutCluster(cmd) {
				return clusterStatus(cmd, access, output)
			}
			path := "/status"
			if flows > 0 {
				path += "?flows=" + strconv.Itoa(flows)
			}
			raw, err := request(cmd.Context(), address, path)
			if err != nil {
				return err
			}
			var s gateway.Status
			if err := json.Unmarshal(raw, &s); err != nil {
				return cli.Unreachable(fmt.Errorf("answer of %s: %w", address, err))
			}
			out := cmd.OutOrStdout()
			if output.ForPrograms() {
				err = output.PrintJSON(out, raw)
			} else {
				err = printStatus(out, s, output == "wide")
			}
			if err != nil {
				return err
			}
			if fine, _ := s.Healthy(); !fine {
				return cli.ErrProblem
			}
			return nil
		},
	}
	addAccessFlags(cmd, &access, "", "")
	cli.AddOutputFlag(cmd, &output, "wide prints more columns; json and yaml are for programs", "wide")
	cmd.Flags().Bool("gateway", false, "use the gateway on this machine, not the cluster")
	addAddressFlag(cmd, &address)
	cmd.Flags().IntVar(&flows, "flows", 0, "show the gateway, and up to this many of its NAT flows")
	return cmd
}

func addAddressFlag(cmd *cobra.Command, address *string) {
	cmd.Flags().StringVar(address, "address", file.DefaultStatusAddress, "status address of the gateway (--status-address)")
}

// request gets a path from the running gateway.
func request(ctx context.Context, address, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		return nil, cli.Usage("--address %q: want host:port, such as %s", address, file.DefaultStatusAddress)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // without a proxy, because the gateway is on this machine
	resp, err := client.Do(req)
	if err != nil {
		if u := (*url.Error)(nil); errors.As(err, &u) {
			err = u.Err
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			err = fmt.Errorf("nothing listens there; check that the gateway runs in this network namespace")
		}
		return nil, cli.Unreachable(fmt.Errorf("gateway at %s: %w", address, err))
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return nil, cli.Unreachable(fmt.Errorf("gateway at %s: %w", address, err))
	}
	if resp.StatusCode != http.StatusOK {
		return nil, cli.Unreachable(fmt.Errorf("gateway at %s: %s", address, strings.TrimSpace(string(body))))
	}
	return body, nil
}

// printStatus prints the status for people.
func printStatus(w io.Writer, s gateway.Status, wide bool) error {
	mtu := strconv.Itoa(s.MTU)
	if s.MTUAuto {
		mtu += " (auto)"
	}
	fmt.Fprintf(w, "cluster %s, listening on %d/udp, MTU %s, %d of %d NAT sessions, configuration %d\n",
		nameAndID(s.ClusterName, s.ClusterID), s.ListenPort, mtu, s.Sessions.Flows, s.Sessions.Limit, s.Config.Generation)
	if wide {
		fmt.Fprintf(w, "version %s, UDP offload %s, public key %s, namespace %s\n", s.Version, onOff(s.UDPOffload), s.PublicKey, s.Namespace)
	}
	if m := s.Mandate; m != nil {
		fmt.Fprintf(w, "active for %s, epoch %d", age(time.Since(m.Since).Seconds()), m.Epoch)
		if why := m.String(); why != "" {
			fmt.Fprintf(w, ": %s", why)
		}
		fmt.Fprintln(w)
	}
	for _, e := range s.Config.Errors {
		fmt.Fprintf(w, "the newest configuration is not in force: %s\n", e)
	}
	for _, e := range s.Config.Problems {
		fmt.Fprintf(w, "not applied, retrying: %s\n", e)
	}
	for _, e := range s.Config.Refused {
		fmt.Fprintf(w, "left out: %s\n", e)
	}
	if !s.Ready {
		fmt.Fprintln(w, "not ready")
	}
	fmt.Fprintln(w)
	if len(s.Peers) == 0 {
		fmt.Fprintln(w, "no peers")
	} else {
		if err := printPeers(w, s, wide); err != nil {
			return err
		}
	}
	for _, p := range s.Peers {
		switch {
		case p.Reason != "" && p.Reason != v1alpha1.CauseConnected:
			fmt.Fprintf(w, "%s: %s: %s\n", nameOrID(p.Name, p.ID), p.Reason, p.Message)
		case p.Problem != "":
			fmt.Fprintf(w, "%s: %s\n", nameOrID(p.Name, p.ID), p.Problem)
		}
		if p.Down {
			fmt.Fprintf(w, "%s: no WireGuard session for some time, so packets to it are dropped\n", nameOrID(p.Name, p.ID))
		}
		for _, t := range p.Tunnels {
			if !t.InUse && t.State != check.Connecting && p.State == check.Connected {
				fmt.Fprintf(w, "%s: tunnel %d is not used, because its connection check gets no answer; open its UDP port in both clusters\n",
					nameOrID(p.Name, p.ID), t.Tunnel)
			}
		}
	}
	if err := printDrops(w, s, wide); err != nil {
		return err
	}
	for _, o := range s.Waiting {
		fmt.Fprintf(w, "%s is not used, because its cluster is not a peer yet\n", o)
	}
	return printFlows(w, s)
}

func printPeers(w io.Writer, s gateway.Status, wide bool) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "PEER\tSTATE\tENDPOINT\tHANDSHAKE\tRTT\tLOSS\tRX\tTX\tITS PODS HERE\tOUR PODS THERE\tDROPS")
	for _, p := range s.Peers {
		endpoint := p.Endpoint
		switch {
		case endpoint == "":
			endpoint = p.Configured + " (unresolved)"
		case p.Hidden:
			endpoint = p.Configured + " (source hidden)"
		}
		handshake, rtt := "never", "-"
		if p.LastHandshake != nil {
			handshake = age(p.HandshakeAge)
		}
		if p.RTT > 0 {
			rtt = milliseconds(p.RTT)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%.0f%%\t%s\t%s\t%s\t%s\t%d",
			nameOrID(p.Name, p.ID), p.State, endpoint, handshake, rtt, p.Loss*100, size(p.Receive.Bytes), size(p.Transmit.Bytes),
			p.Rules.RemotePodsHere, p.Rules.LocalPodsThere, total(p.Drops))
		fmt.Fprintln(t)
	}
	if wide { // separate tables, so that each fits on a screen
		fmt.Fprintln(t, "\nPEER\tID\tMTU\tTUNNELS\tMAPPED\tSESSIONS\tRX PACKETS\tTX PACKETS")
		for _, p := range s.Peers {
			fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%d\t%d\t%d\t%d\n", nameOrID(p.Name, p.ID), p.ID, p.MTU, tunnels(p), len(p.Rules.Endpoints), p.Sessions, p.Receive.Packets, p.Transmit.Packets)
		}
		fmt.Fprintln(t, "\nPEER\tITS PODS\tOUR PODS\tITS EXTERNAL HERE\tOUR EXTERNAL THERE")
		for _, p := range s.Peers {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", nameOrID(p.Name, p.ID), p.Rules.RemotePods, p.Rules.LocalPods, p.Rules.RemoteExternal, p.Rules.LocalExternal)
		}
	}
	return t.Flush()
}

// dropsShown is the maximum age of the drops in the output, so that a repaired fault disappears.
// With -o wide, the output has all drops.
const dropsShown = 10 * time.Minute

func printDrops(w io.Writer, s gateway.Status, wide bool) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	rows := 0
	print := func(peer string, drops []gateway.DropStatus) {
		for _, d := range drops {
			last := "-"
			if d.LastSeen != nil {
				ago := time.Since(*d.LastSeen)
				if ago > dropsShown && !wide {
					continue
				}
				last = age(max(0, ago.Seconds())) + " ago"
			}
			if rows++; rows == 1 {
				fmt.Fprintln(t, "\nDROPPED\tLAST\tPEER\tDIRECTION\tREASON")
			}
			fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%s\t%s\n", d.Packets, last, peer, d.Direction, d.Reason, d.Text)
		}
	}
	for _, p := range s.Peers {
		print(nameOrID(p.Name, p.ID), p.Drops)
	}
	print("-", s.Drops)
	return t.Flush()
}

func printFlows(w io.Writer, s gateway.Status) error {
	if len(s.Flows) == 0 {
		return nil
	}
	names := make(map[string]string)
	for _, p := range s.Peers {
		names[p.ID] = nameOrID(p.Name, p.ID)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\nPEER\tKIND\tPROTOCOL\tOURS\tAS SEEN THERE\tTHEIRS\tSTATE\tIDLE\tEXPIRES")
	for _, f := range s.Flows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", names[f.Peer], f.Kind, f.Protocol, f.Local, f.Mapped, f.Remote, f.State, age(f.Idle), age(f.Expires))
	}
	return t.Flush()
}

func nameOrID(name, id string) string {
	if name != "" {
		return name
	}
	return id
}

func nameAndID(name, id string) string {
	if name == "" {
		return id
	}
	return name + " (" + id + ")"
}

func total(drops []gateway.DropStatus) (n uint64) {
	for _, d := range drops {
		n += d.Packets
	}
	return n
}

func age(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd", int(d.Hours())/24)
}

func milliseconds(seconds float64) string {
	switch ms := seconds * 1000; {
	case ms < 1:
		return fmt.Sprintf("%.2fms", ms)
	case ms < 10:
		return fmt.Sprintf("%.1fms", ms)
	default:
		return fmt.Sprintf("%.0fms", ms)
	}
}

func size(bytes uint64) string {
	if bytes < 1024 {
		return fmt.Sprintf("%d B", bytes)
	}
	v, unit := float64(bytes)/1024, 0
	for v >= 1024 && unit < 4 {
		v, unit = v/1024, unit+1
	}
	return fmt.Sprintf("%.1f %ciB", v, "KMGTP"[unit])
}

// tunnels returns the number of tunnels that carry flows, and the total number.
func tunnels(p gateway.PeerStatus) string {
	if len(p.Tunnels) == 0 {
		return "1/1"
	}
	used := 0
	for _, t := range p.Tunnels {
		if t.InUse {
			used++
		}
	}
	return fmt.Sprintf("%d/%d", used, len(p.Tunnels))
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}
