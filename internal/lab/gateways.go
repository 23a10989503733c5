package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	startTimeout = time.Minute      // for the start of a gateway, if the caller's context has no deadline
	stopTimeout  = 20 * time.Second // from SIGTERM to SIGKILL
	tailLines    = 30               // lines of a gateway's log in an error
)

// gateway is a gateway process that this process started.
type gateway struct {
	cmd  *Cmd
	done chan struct{} // closed when the process has ended
	err  error         // result of Wait; valid after done is closed
}

// StartGateways runs "BINARY gateway --config DIR ARGS" on node 1 of every cluster, and waits until
// all gateways are ready. The error contains the last log lines of each gateway that is not ready.
// The gateways run until Down or StopGateways.
func (l *Lab) StartGateways(ctx context.Context, binary string, args ...string) error {
	errs := make([]error, len(l.Clusters))
	var group sync.WaitGroup
	for i, c := range l.Clusters {
		group.Go(func() { errs[i] = l.StartGateway(ctx, c, binary, args...) })
	}
	group.Wait()
	return errors.Join(errs...)
}

// StartGateway is StartGateways for one cluster. binary must be an absolute path, or the name of a
// program in PATH.
func (l *Lab) StartGateway(ctx context.Context, c *Cluster, binary string, args ...string) error {
	if err := l.startGateway(ctx, c, binary, args); err != nil {
		return fmt.Errorf("gateway of cluster %s: %w", c.Name, err)
	}
	return nil
}

func (l *Lab) startGateway(ctx context.Context, c *Cluster, binary string, args []string) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, startTimeout)
		defer cancel()
	}
	if pid, ok := l.GatewayProcess(c); ok {
		return fmt.Errorf("runs already, as process %d", pid)
	}
	if err := ensureGatewayFile(c); err != nil {
		return err
	}
	log, err := os.OpenFile(l.GatewayLog(c), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	begin, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	// The caller's context bounds only the wait, not the gateway's lifetime.
	g := &gateway{cmd: c.Gateway().Command(context.Background(), binary, append([]string{"gateway", "--config", c.ConfigDir}, args...)...), done: make(chan struct{})}
	g.cmd.Stdout, g.cmd.Stderr = log, log
	// The gateway gets its own session, so that Ctrl-C at the terminal does not reach it. Ctrl-C is
	// for the owner of the lab, which then stops the gateways in order.
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := g.cmd.Start(); err != nil {
		return err
	}
	go func() {
		g.err = g.cmd.Wait()
		close(g.done)
	}()
	l.mu.Lock()
	l.gateways[c] = g
	l.mu.Unlock()
	if err := writeFile(l.pidFile(c), []byte(strconv.Itoa(g.cmd.Process.Pid)), 0o644); err != nil {
		return err
	}
	if err := waitReady(ctx, c, g); err != nil {
		return fmt.Errorf("%w; its log %s ends:\n%s", err, l.GatewayLog(c), tail(l.GatewayLog(c), begin, tailLines))
	}
	return nil
}

func waitReady(ctx context.Context, c *Cluster, g *gateway) error {
	url := fmt.Sprintf("http://127.0.0.1:%d/readyz", metricsPort)
	var last error
	for {
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		_, err := c.Gateway().Get(attempt, url)
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		select {
		case <-g.done:
			return fmt.Errorf("ended before it was ready: %s", g.cmd.ProcessState)
		case <-ctx.Done():
			return fmt.Errorf("is not ready: %w", last)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// StopGateways ends all gateways in parallel by SIGTERM. If a gateway has not ended after 20 s, it
// kills the gateway by SIGKILL and returns an error. It ignores gateways that do not run.
func (l *Lab) StopGateways() error {
	errs := make([]error, len(l.Clusters))
	var group sync.WaitGroup
	for i, c := range l.Clusters {
		group.Go(func() { errs[i] = l.StopGateway(c) })
	}
	group.Wait()
	return errors.Join(errs...)
}

// StopGateway is StopGateways for one cluster. It also stops a gateway that another process
// started.
func (l *Lab) StopGateway(c *Cluster) error {
	return l.endGateway(c, unix.SIGTERM)
}

// KillGateway ends a cluster's gateway by SIGKILL, so that the gateway cannot clean up.
func (l *Lab) KillGateway(c *Cluster) error {
	return l.endGateway(c, unix.SIGKILL)
}

func (l *Lab) endGateway(c *Cluster, signal unix.Signal) error {
	pid, ok := l.GatewayProcess(c)
	if !ok {
		return nil
	}
	crowd := crowdOf(l.Name)
	crowd.signal(pid, signal)
	var err error
	for deadline := time.Now().Add(stopTimeout); crowd.has(pid); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			err = fmt.Errorf("gateway of cluster %s did not end within %v of SIGTERM; its log %s ends:\n%s",
				c.Name, stopTimeout, l.GatewayLog(c), l.GatewayTail(c, tailLines))
			crowd.signal(pid, unix.SIGKILL)
			deadline = deadline.Add(stopTimeout)
		}
	}
	l.mu.Lock()
	g := l.gateways[c]
	delete(l.gateways, c)
	l.mu.Unlock()
	if g != nil {
		<-g.done
		if err == nil && signal == unix.SIGTERM && !g.cmd.ProcessState.Success() {
			err = fmt.Errorf("gateway of cluster %s: %s after SIGTERM; its log %s ends:\n%s",
				c.Name, g.cmd.ProcessState, l.GatewayLog(c), l.GatewayTail(c, tailLines))
		}
	}
	if e := os.Remove(l.pidFile(c)); e != nil && !errors.Is(e, fs.ErrNotExist) {
		err = errors.Join(err, e)
	}
	return err
}

// GatewayProcess returns the process ID of a cluster's gateway, even if another process started
// it. It returns false if no gateway runs.
func (l *Lab) GatewayProcess(c *Cluster) (pid int, ok bool) {
	text, err := os.ReadFile(l.pidFile(c))
	if err != nil {
		return 0, false
	}
	pid, err = strconv.Atoi(string(text))
	// Check that the process belongs to the lab, because the kernel may have given its ID to
	// another process.
	return pid, err == nil && crowdOf(l.Name).has(pid)
}

func (l *Lab) pidFile(c *Cluster) string {
	return filepath.Join(l.Dir, logDir, "gateway-"+c.Name+".pid")
}

// GatewayLog returns the path of the file with the output of all runs of a cluster's gateway.
func (l *Lab) GatewayLog(c *Cluster) string {
	return filepath.Join(l.Dir, logDir, "gateway-"+c.Name+".log")
}

// GatewayTail returns the last lines of a gateway's log.
func (l *Lab) GatewayTail(c *Cluster, lines int) string { return tail(l.GatewayLog(c), 0, lines) }

// Metrics returns the response of the cluster's gateway at /metrics.
func (l *Lab) Metrics(ctx context.Context, c *Cluster) (string, error) {
	return c.Gateway().Get(ctx, fmt.Sprintf("http://127.0.0.1:%d/metrics", metricsPort))
}

// Metric returns the sum of all series of a metric of the cluster's gateway that have all the given
// labels, each written as in the exposition format (`direction="inbound"`). Without such a series
// it returns 0.
func (l *Lab) Metric(ctx context.Context, c *Cluster, name string, labels ...string) (float64, error) {
	text, err := l.Metrics(ctx, c)
	if err != nil {
		return 0, err
	}
	return SumMetric(text, name, labels)
}

// SumMetric is Metric for a given text in the exposition format.
func SumMetric(text, name string, labels []string) (float64, error) {
	sum := 0.0
lines:
	for line := range strings.Lines(text) {
		series, value, ok := cutLast(strings.TrimSpace(line), " ")
		metric, rest, _ := strings.Cut(series, "{")
		if !ok || metric != name {
			continue
		}
		have := "," + strings.TrimSuffix(rest, "}") + ","
		for _, label := range labels {
			if !strings.Contains(have, ","+label+",") {
				continue lines
			}
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("metric %s: %w", series, err)
		}
		sum += v
	}
	return sum, nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// tail returns the last lines of a file, indented. It ignores text before the offset begin.
func tail(path string, begin int64, lines int) string {
	file, err := os.Open(path)
	if err != nil {
		return "\t(" + err.Error() + ")"
	}
	defer file.Close()
	const most = 64 << 10
	if st, err := file.Stat(); err == nil && st.Size()-most > begin {
		begin = st.Size() - most
	}
	if _, err := file.Seek(begin, io.SeekStart); err != nil {
		return "\t(" + err.Error() + ")"
	}
	text, err := io.ReadAll(io.LimitReader(file, most))
	if err != nil {
		return "\t(" + err.Error() + ")"
	}
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	if len(all) == 1 && all[0] == "" {
		return "\t(nothing)"
	}
	return "\t" + strings.Join(all, "\n\t")
}
