// Package scripts runs each script of this directory in a separate lab, with the real isthmus
// program and real packets. The scripts need root.
//
// Besides the commands of testscript there are
//
//	lab up [-nodes=N] [-mtu=N] [-rpfilter=loose] [-tunnels=N,...] CLUSTER[=PODCIDR[,EXTERNALCIDR]]...
//	                            make the script's lab; $CONFIG_x is the gateway's directory of cluster x, $LOG_x its log,
//	                            $ID_x the cluster's ID, $LAB the lab's name; -tunnels has the number of tunnels of each
//	                            cluster's gateway
//	lab join A B [POD@A EXT@A POD@B EXT@B]
//	                            peer two clusters, with B's networks as A sees them, then A's as B sees them; "-": the network
//	                            that Liqo would choose
//	lab unjoin A B
//	lab map A                   map the server outside cluster A for all peers
//	lab down
//	gateway start|stop|kill [A...]
//	                            "start" passes arguments with a dash on to the gateways
//	[!] ping [-size=N] [-ttl=N] FROM TO
//	                            TO is an address, or a host, which is pinged at the address that FROM's cluster sees. With "!"
//	                            no answer may come for half a second. With "!" and a flag, an ICMP error has to come; it is
//	                            printed to standard error
//	udp [-size=N] FROM TO AT    send a datagram from FROM to TO, and the same back from AT, the host that receives it
//	burst FROM TO AT SIZE       send 1,000 datagrams of SIZE octets in superpackets of UDP_SEGMENT; AT, the host that receives
//	                            them, has to get each datagram whole and in order
//	[!] http FROM TO            standard output: the answer of TO's web server ("b-pod1 sees 10.246.0.11")
//	download FROM TO BYTES
//	session open|check FROM TO  one TCP connection that stays open during other commands
//	on HOST PROGRAM ARG...      run a program inside a host; $ISTHMUS is the path of isthmus, for programs that run it
//	metric A OP VALUE NAME [LABEL...]
//	                            wait until the sum of those series NAME of A's gateway that have all the labels
//	                            (reason="no_flow") compares to VALUE in this way; OP: == != < > <= >=
//	addr VARIABLE FROM TO       set a variable to the address by which FROM's cluster reaches host TO
//	edit FILE OLD NEW           replace the text OLD, which must exist
//	logged A REGEXP             wait until A's gateway has logged a matching line
package scripts

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/testbin"
)

// patience is the maximum time for which a command waits for its result, because the machine may be
// busy.
const patience = 90 * time.Second

func TestScripts(t *testing.T) {
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	t.Setenv("GOTMPDIR", t.TempDir()) // testscript does not remove its directory
	bin := t.TempDir()
	if err := testbin.Build(bin, "isthmus", "isthmus-lab"); err != nil {
		t.Fatal(err)
	}
	kube, err := kubetest.Build(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir:                 ".",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("PATH", bin+string(filepath.ListSeparator)+e.Getenv("PATH"))
			s := &script{name: lab.UniqueName("script"), binary: filepath.Join(bin, "isthmus")}
			e.Setenv("LAB", s.name)
			e.Setenv("ISTHMUS", s.binary)
			e.Setenv("ISTHMUS_KUBE", kube)
			e.Values[scriptKey{}] = s
			e.Defer(s.end)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"lab":      command((*script).lab),
			"gateway":  command((*script).gateway),
			"ping":     command((*script).ping),
			"udp":      command((*script).udp),
			"burst":    command((*script).burst),
			"http":     command((*script).http),
			"download": command((*script).download),
			"session":  command((*script).tcp),
			"on":       command((*script).on),
			"metric":   command((*script).metric),
			"addr":     command((*script).addr),
			"edit":     command((*script).edit),
			"logged":   command((*script).logged),
		},
	})
}

type scriptKey struct{}

// A script is the state of one running script.
type script struct {
	name    string
	binary  string
	l       *lab.Lab
	session *session
}

var errUsage = errors.New("usage: see the comment of package scripts")

// command makes a testscript command from a method. With "!" the method has to fail, but errUsage
// is always an error.
func command(do func(*script, *testscript.TestScript, bool, []string) error) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		s := ts.Value(scriptKey{}).(*script)
		err := do(s, ts, neg, args)
		switch {
		case errors.Is(err, errUsage):
			ts.Fatalf("%v: %v", args, err)
		case err == nil && neg:
			ts.Fatalf("unexpected success")
		case err != nil && !neg:
			s.explain(ts)
			ts.Fatalf("%v", err)
		case err != nil:
			ts.Logf("[%v]", err)
		}
	}
}

// explain logs the ends of the gateways' logs.
func (s *script) explain(ts *testscript.TestScript) {
	if s.l == nil {
		return
	}
	for _, c := range s.l.Clusters {
		ts.Logf("[log of the gateway of cluster %s]\n%s", c, s.l.GatewayTail(c, 15))
	}
}

func (s *script) end() {
	if s.session != nil {
		s.session.conn.Close()
	}
	if s.l == nil {
		return
	}
	if err := s.l.Down(); err != nil {
		panic(err) // the test cannot be failed from here
	}
}

func (s *script) cluster(name string) (*lab.Cluster, error) {
	if s.l == nil {
		return nil, errors.New("no lab is up")
	}
	if c := s.l.Cluster(name); c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("there is no cluster %q", name)
}

// ends returns the host from which a command starts, and the address to which it goes.
func (s *script) ends(from, to string) (*lab.Host, netip.Addr, error) {
	if s.l == nil {
		return nil, netip.Addr{}, errors.New("no lab is up")
	}
	host, err := s.l.Host(from)
	if err != nil {
		return nil, netip.Addr{}, err
	}
	addr, err := s.l.Lookup(host, to)
	return host, addr, err
}

func (s *script) lab(ts *testscript.TestScript, _ bool, args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	what, args := args[0], args[1:]
	if what == "up" {
		return s.up(ts, args)
	}
	if s.l == nil {
		return errors.New("no lab is up")
	}
	if what == "down" {
		return s.l.Down()
	}
	var clusters []*lab.Cluster
	var networks []netip.Prefix
	for _, a := range args {
		if c := s.l.Cluster(a); c != nil {
			clusters = append(clusters, c)
			continue
		}
		var p netip.Prefix
		if a != "-" {
			var err error
			if p, err = netip.ParsePrefix(a); err != nil {
				return err
			}
		}
		networks = append(networks, p)
	}
	switch {
	case what == "map" && len(clusters) == 1:
		return s.l.Map(clusters[0], clusters[0].OnPrem.Addr)
	case what == "unjoin" && len(clusters) == 2:
		return s.l.Unjoin(clusters[0], clusters[1])
	case what == "join" && len(clusters) == 2 && len(networks) == 0:
		return s.l.Join(clusters[0], clusters[1], lab.JoinOptions{})
	case what == "join" && len(clusters) == 2 && len(networks) == 4:
		return s.l.Join(clusters[0], clusters[1], lab.JoinOptions{
			AtA: lab.View{Pod: networks[0], External: networks[1]},
			AtB: lab.View{Pod: networks[2], External: networks[3]},
		})
	}
	return errUsage
}

func (s *script) up(ts *testscript.TestScript, args []string) error {
	spec := lab.Spec{Name: s.name}
	flags := flag.NewFlagSet("lab up", flag.ContinueOnError)
	flags.SetOutput(ts.Stderr())
	nodes := flags.Int("nodes", 1, "")
	tunnels := flags.String("tunnels", "", "")
	flags.IntVar(&spec.MTU, "mtu", 0, "")
	flags.StringVar((*string)(&spec.RPFilter), "rpfilter", "", "")
	if flags.Parse(args) != nil || flags.NArg() == 0 || s.l != nil {
		return errUsage
	}
	for _, a := range flags.Args() {
		name, networks, _ := strings.Cut(a, "=")
		c := lab.ClusterSpec{Name: name, Nodes: *nodes}
		var n string
		n, *tunnels, _ = strings.Cut(*tunnels, ",")
		c.Tunnels, _ = strconv.Atoi(n)
		pod, external, _ := strings.Cut(networks, ",")
		for text, network := range map[string]*netip.Prefix{pod: &c.PodCIDR, external: &c.ExternalCIDR} {
			if text == "" {
				continue
			}
			var err error
			if *network, err = netip.ParsePrefix(text); err != nil {
				return err
			}
		}
		spec.Clusters = append(spec.Clusters, c)
	}
	l, err := lab.Up(context.Background(), spec)
	if err != nil {
		return err
	}
	s.l = l
	for _, c := range l.Clusters {
		ts.Setenv("CONFIG_"+c.Name, c.ConfigDir)
		ts.Setenv("LOG_"+c.Name, l.GatewayLog(c))
		ts.Setenv("ID_"+c.Name, c.ID)
	}
	return l.ServeHosts()
}

func (s *script) gateway(_ *testscript.TestScript, _ bool, args []string) error {
	if len(args) == 0 || s.l == nil {
		return errUsage
	}
	clusters := s.l.Clusters
	var flags, names []string
	for _, a := range args[1:] {
		if strings.HasPrefix(a, "-") {
			flags = append(flags, a)
		} else {
			names = append(names, a)
		}
	}
	if len(names) > 0 {
		clusters = nil
		for _, name := range names {
			c, err := s.cluster(name)
			if err != nil {
				return err
			}
			clusters = append(clusters, c)
		}
	}
	var errs []error
	for _, c := range clusters {
		switch args[0] {
		case "start":
			errs = append(errs, s.l.StartGateway(context.Background(), c, s.binary, flags...))
		case "stop":
			errs = append(errs, s.l.StopGateway(c))
		case "kill":
			errs = append(errs, s.l.KillGateway(c))
		default:
			return errUsage
		}
	}
	return errors.Join(errs...)
}

func (s *script) ping(ts *testscript.TestScript, neg bool, args []string) error {
	flags := flag.NewFlagSet("ping", flag.ContinueOnError)
	flags.SetOutput(ts.Stderr())
	size, ttl := flags.Int("size", 0, ""), flags.Int("ttl", 0, "")
	if flags.Parse(args) != nil || flags.NArg() != 2 {
		return errUsage
	}
	from, to, err := s.ends(flags.Arg(0), flags.Arg(1))
	if err != nil {
		return err
	}
	o := lab.PingOptions{Size: *size, TTL: *ttl, Wait: 500 * time.Millisecond}
	if neg && *size+*ttl > 0 {
		o.Wait = patience
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		_, err = from.PingWith(context.Background(), to, o)
		o.Wait = max(o.Wait, min(2*o.Wait, 10*time.Second)) // wait longer for the next answer
		if err == nil || neg || time.Now().After(deadline) {
			if err != nil {
				fmt.Fprintln(ts.Stderr(), err)
			}
			return err
		}
	}
}

func (s *script) udp(ts *testscript.TestScript, _ bool, args []string) error {
	flags := flag.NewFlagSet("udp", flag.ContinueOnError)
	flags.SetOutput(ts.Stderr())
	size := flags.Int("size", 56, "")
	if flags.Parse(args) != nil || flags.NArg() != 3 {
		return errUsage
	}
	from, to, err := s.ends(flags.Arg(0), flags.Arg(1))
	if err != nil {
		return err
	}
	at, err := s.l.Host(flags.Arg(2))
	if err != nil {
		return err
	}
	server, err := at.ListenPacket("udp", ":7")
	if err != nil {
		return err
	}
	defer server.Close()
	go func() {
		buf := make([]byte, 1<<16)
		for {
			n, caller, err := server.ReadFrom(buf)
			if err != nil {
				return
			}
			if _, err := server.WriteTo(buf[:n], caller); err != nil {
				return
			}
		}
	}()
	client, err := from.Dial(context.Background(), "udp", netip.AddrPortFrom(to, 7).String())
	if err != nil {
		return err
	}
	defer client.Close()
	sent, got := bytes.Repeat([]byte("isthmus."), *size/8+1)[:*size], make([]byte, 1<<16)
	wait := 500 * time.Millisecond
	for deadline := time.Now().Add(patience); ; wait = min(wait+wait/2, 5*time.Second) {
		if err := client.SetReadDeadline(time.Now().Add(wait)); err != nil {
			return err
		}
		_, err := client.Write(sent) // fails if an ICMP error about the previous datagram has arrived
		n := 0
		if err == nil {
			n, err = client.Read(got)
		}
		if err == nil && !bytes.Equal(sent, got[:n]) {
			return fmt.Errorf("%d octets came back of %d, or others", n, len(sent))
		}
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

func (s *script) http(ts *testscript.TestScript, neg bool, args []string) error {
	if len(args) != 2 {
		return errUsage
	}
	from, to, err := s.ends(args[0], args[1])
	if err != nil {
		return err
	}
	wait := patience
	if neg {
		wait = time.Second
	}
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	body, err := from.Get(ctx, fmt.Sprintf("http://%v/", netip.AddrPortFrom(to, 80)))
	fmt.Fprint(ts.Stdout(), body)
	return err
}

func (s *script) download(ts *testscript.TestScript, _ bool, args []string) error {
	if len(args) != 3 {
		return errUsage
	}
	n, err := strconv.ParseInt(args[2], 10, 64)
	if err != nil {
		return errUsage
	}
	from, to, err := s.ends(args[0], args[1])
	if err != nil {
		return err
	}
	t, err := from.Download(context.Background(), to, n, 5*time.Minute)
	if err != nil {
		return err
	}
	if t.Bytes != n {
		return fmt.Errorf("%d octets of %d in %v", t.Bytes, n, t.Duration)
	}
	ts.Logf("[%.0f Mbit/s]", t.BitsPerSecond()/1e6)
	return nil
}

// A session is a TCP connection whose other end echoes lines.
type session struct {
	conn net.Conn
	in   *bufio.Reader
}

func (s *script) openSession(from *lab.Host, at *lab.Host, to netip.Addr) error {
	listener, err := at.Listen("tcp4", ":7")
	if err != nil {
		return err
	}
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		for in := bufio.NewReader(conn); ; {
			line, err := in.ReadString('\n')
			if err != nil {
				return
			}
			if _, err := conn.Write([]byte(line)); err != nil {
				return
			}
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := from.Dial(ctx, "tcp4", netip.AddrPortFrom(to, 7).String())
	if err != nil {
		return err
	}
	s.session = &session{conn, bufio.NewReader(conn)}
	return s.session.check()
}

func (c *session) check() error {
	line := fmt.Sprintln(time.Now())
	if err := c.conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := c.conn.Write([]byte(line)); err != nil {
		return err
	}
	got, err := c.in.ReadString('\n')
	if err == nil && got != line {
		err = fmt.Errorf("the echo of %q is %q", line, got)
	}
	return err
}

func (s *script) tcp(_ *testscript.TestScript, _ bool, args []string) error {
	switch {
	case len(args) == 3 && args[0] == "open" && s.session == nil:
		from, to, err := s.ends(args[1], args[2])
		if err != nil {
			return err
		}
		at, err := s.l.Host(args[2])
		if err != nil {
			return err
		}
		return s.openSession(from, at, to)
	case len(args) == 1 && args[0] == "check" && s.session != nil:
		return s.session.check()
	}
	return errUsage
}

func (s *script) on(ts *testscript.TestScript, _ bool, args []string) error {
	if len(args) < 2 || s.l == nil {
		return errUsage
	}
	host, err := s.l.Host(args[0])
	if err != nil {
		return err
	}
	program := args[1]
	if program == "isthmus" {
		program = s.binary
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := host.Command(ctx, program, args[2:]...)
	cmd.Stdout, cmd.Stderr = ts.Stdout(), ts.Stderr()
	return cmd.Run()
}

func (s *script) metric(_ *testscript.TestScript, _ bool, args []string) error {
	if len(args) < 4 {
		return errUsage
	}
	c, err := s.cluster(args[0])
	if err != nil {
		return err
	}
	want, err := strconv.ParseFloat(args[2], 64)
	if err != nil {
		return errUsage
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		got, err := s.l.Metric(ctx, c, args[3], args[4:]...)
		cancel()
		if err == nil {
			ok, known := map[string]bool{
				"==": got == want, "!=": got != want, "<": got < want, ">": got > want, "<=": got <= want, ">=": got >= want,
			}[args[1]]
			if !known {
				return errUsage
			}
			if ok {
				return nil
			}
			err = fmt.Errorf("%v is %v; want %s %v", args[3:], got, args[1], want)
		}
		if time.Now().After(deadline) {
			return err
		}
	}
}

func (s *script) addr(ts *testscript.TestScript, _ bool, args []string) error {
	if len(args) != 3 {
		return errUsage
	}
	_, addr, err := s.ends(args[1], args[2])
	if err != nil {
		return err
	}
	ts.Setenv(args[0], addr.String())
	return nil
}

func (s *script) edit(ts *testscript.TestScript, _ bool, args []string) error {
	if len(args) != 3 {
		return errUsage
	}
	path := ts.MkAbs(args[0])
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if !strings.Contains(string(text), args[1]) {
		return fmt.Errorf("%s does not contain %q:\n%s", path, args[1], text)
	}
	return os.WriteFile(path, []byte(strings.ReplaceAll(string(text), args[1], args[2])), 0o644)
}

func (s *script) logged(_ *testscript.TestScript, _ bool, args []string) error {
	if len(args) != 2 {
		return errUsage
	}
	c, err := s.cluster(args[0])
	if err != nil {
		return err
	}
	pattern, err := regexp.Compile(args[1])
	if err != nil {
		return err
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		text, err := os.ReadFile(s.l.GatewayLog(c))
		if err == nil && pattern.Match(text) {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.Join(fmt.Errorf("the gateway of cluster %s did not log %s", c, pattern), err)
		}
	}
}
