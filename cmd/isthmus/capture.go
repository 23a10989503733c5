package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/gateway/capture"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/httpserve"
)

func newCaptureCommand() *cobra.Command {
	options := capture.DefaultOptions()
	var file, direction string
	var places, drops []string
	cmd := &cobra.Command{
		Use:   "capture [END [END [tcp|udp|icmp]]]",
		Short: "Write packets of the gateway to a file, before and after NAT, inside and outside the tunnel (root)",
		Long: `Write the packets of the gateway on this machine, or in this Pod, to a pcapng file for
Wireshark, tshark or tcpdump. The file has an interface for each of four places:
before-nat, after-nat, tunnel and underlay. A packet can appear at several of them. The
comment of a packet names its peer, the rule that rewrote it, or the reason of its drop
(docs/capture.md).

END is an address, an address with a port, a port such as :53, or any. A packet matches
by its addresses before or after NAT, in either direction. Without END all packets match.

Only headers are written. --snaplen writes more octets, including the data of pods. The
capture ends after --duration, --packets or --bytes, or when it is interrupted. It never
delays traffic: if the reader is too slow, the file lacks packets. Their number is in the
file and the summary. Only one capture can run at a time.

You need root or the gateway's own user; in a cluster, the right to exec into the Pod
of the active gateway. The gateway logs the user and the filter of each capture.`,
		Example: `  isthmus capture -w peerings.pcapng --peer beta
  isthmus capture 10.244.1.10 10.246.1.20:80 tcp | tshark -r - -T fields -e frame.interface_name -e frame.comment
  isthmus capture --dropped --duration 10m -w drops.pcapng
  kubectl exec -n isthmus-system POD -- isthmus capture > gateway.pcapng`,
		Args: cobra.MaximumNArgs(3),
		ValidArgsFunction: func(_ *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
			if len(args) != 2 { // only the third argument, the protocol, can be completed
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return withPrefix(capture.Protocols, begin)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			query := options.Query()
			query["place"], query["drop"] = places, drops
			if direction != "" {
				query.Set("direction", direction)
			}
			for i, s := range args {
				if i == 2 {
					query.Set("protocol", s)
				} else {
					query.Add("end", s)
				}
			}
			if _, err := capture.Parse(query); err != nil {
				return cli.Usage("%w", err)
			}
			out := cmd.OutOrStdout()
			if file != "-" {
				f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
				if err != nil {
					return cli.Unreachable(err)
				}
				defer f.Close()
				out = f
			} else if isTerminal(out) {
				return cli.Usage("standard output is a terminal; want --write FILE, or a pipe such as | tshark -r -")
			}
			summary, err := captureTo(cmd.Context(), out, query.Encode())
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "%d packets, %d missed because the reader was too slow; ended: %s\n", summary.Packets, summary.Missed, summary.Ended)
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVarP(&file, "write", "w", "-", "file to write, readable only by its owner; - means standard output")
	f.StringVar(&options.Peer, "peer", "", "only packets of the peer with this name or cluster ID")
	cli.AddChoiceFlag(cmd, &direction, "direction", "", "only packets in this direction: out is towards the tunnel, in is from the tunnel (default both)", "out", "in")
	f.StringSliceVar(&places, "at", nil, "places: "+strings.Join(capture.PlaceNames(), ", ")+" (default all)")
	f.BoolVar(&options.Dropped, "dropped", false, "only dropped packets")
	f.StringSliceVar(&drops, "drop", nil, "only packets dropped for these reasons, such as no_flow (label reason of isthmus_drops_total)")
	f.IntVar(&options.Snap, "snaplen", 0, "octets of each packet to write; 0 means its headers, more includes the data of pods")
	f.IntVarP(&options.Packets, "packets", "c", options.Packets, "end after this many packets")
	f.Int64Var(&options.Bytes, "bytes", options.Bytes, "end before the file has more octets than this")
	f.DurationVar(&options.Duration, "duration", options.Duration, "end after this time, at most "+capture.MaxDuration.String())
	complete := func(flag string, all []string) {
		_ = cmd.RegisterFlagCompletionFunc(flag, func(_ *cobra.Command, _ []string, begin string) ([]string, cobra.ShellCompDirective) {
			return withPrefix(all, begin)
		}) // fails only if the flag does not exist
	}
	complete("at", capture.PlaceNames())
	complete("drop", capture.DropNames())
	return cmd
}

// captureTo writes a capture to out until the capture or ctx ends. When ctx ends, the gateway still
// completes the file.
func captureTo(ctx context.Context, out io.Writer, query string) (s capture.Summary, err error) {
	var conn net.Conn
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (c net.Conn, err error) {
		conn, err = httpserve.DialOwner(ctx, gateway.CaptureSocket)
		return conn, err
	}}}
	resp, err := client.Get("http://gateway/capture?" + query)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		err = errors.New("nothing listens there; check that the gateway runs in this network namespace")
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, io.EOF), errors.Is(err, syscall.EPIPE):
		err = errors.New("the gateway refuses this user; want root, or the user that the gateway runs as")
	}
	if err != nil {
		return s, cli.Unreachable(fmt.Errorf("gateway at @%s: %w", gateway.CaptureSocket, err))
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // the response is the gateway's error message
		return s, cli.Unreachable(fmt.Errorf("gateway: %s", strings.TrimSpace(string(text))))
	}
	stop := context.AfterFunc(ctx, func() {
		if c, ok := conn.(*net.UnixConn); ok {
			_ = c.CloseWrite() // makes the gateway end the capture; the rest of the file can still be read
		}
	})
	defer stop()
	if _, err := io.Copy(out, resp.Body); err != nil {
		return s, cli.Unreachable(fmt.Errorf("capture: %w", err))
	}
	if err := json.Unmarshal([]byte(resp.Trailer.Get(gateway.CaptureSummary)), &s); err != nil {
		return s, cli.Unreachable(fmt.Errorf("the gateway ended during the capture: %w", err))
	}
	return s, nil
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
