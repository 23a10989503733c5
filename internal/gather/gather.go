// Package gather collects the state of a cluster in one archive for a bug report, for `isthmus
// gather`: objects, status and diagnosis, logs, metrics, and the components' own pages. It
// removes secrets. The archive lists everything that could not be read, with the reason.
//
//	API server ─┬─ objects, logs ──────────────┐
//	            └─ kubelet ─ ports of the Pods ┴─► files ─► redact ─► tar, gzip
package gather

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/inspect"
	"github.com/isthmus-net/isthmus/internal/podport"
	"github.com/isthmus-net/isthmus/internal/postquantum"
	"github.com/isthmus-net/isthmus/internal/redact"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

const (
	// maxLog is the maximum size of one container's log. maxAnswer is the maximum size of one page
	// of a component. Both are in octets.
	maxLog, maxAnswer = 2 << 20, 32 << 20
	// maxAgents is the maximum number of route agents whose logs and pages are read. Agents
	// that are not ready are read first. A cluster may have thousands of agents.
	maxAgents = 30
	// concurrentQueries is the number of Pods that are queried concurrently.
	concurrentQueries = 8
	// patience is the timeout of one query.
	patience = 20 * time.Second
)

// Options control what to gather.
type Options struct {
	Version  string       // version of this program
	LogLines int64        // number of last lines of each container's log
	Report   func(string) // called with a line for each step
}

// Missing names something that could not be read, with the reason.
type Missing struct{ What, Why string }

// gathering is the state of one run.
type gathering struct {
	Options
	cluster *cluster.Cluster
	begin   time.Time

	mu      sync.Mutex
	files   map[string][]byte
	missing []Missing
	redact  redact.Redactor
}

// Write gathers from a cluster and writes the archive, a tar file compressed with gzip. The result
// lists the parts of the cluster that could not be read; the archive has the same list. Write
// returns an error only if the cluster is unreachable, ctx has ended, or writing fails.
func Write(ctx context.Context, c *cluster.Cluster, w io.Writer, o Options) ([]Missing, error) {
	g := &gathering{Options: o, cluster: c, begin: time.Now().UTC(), files: map[string][]byte{}}
	if err := c.Identify(ctx); err != nil {
		if errors.Is(err, cluster.ErrUnreachable) {
			return nil, err
		}
		g.miss("identity of the cluster", err)
	}
	o.Report("objects")
	tenants := g.tenants(ctx)
	g.secrets(ctx, append(slices.Clone(tenants), c.Namespace))
	g.objects(ctx, tenants)
	o.Report("output of status and diagnose")
	status, diagnosis := g.summarize(ctx)
	pods := g.pods(ctx)
	o.Report(fmt.Sprintf("logs, status and metrics of %d Pods", len(pods)))
	g.queryAll(ctx, pods)
	if err := ctx.Err(); err != nil {
		return g.missing, err
	}
	slices.SortFunc(g.missing, func(a, b Missing) int { return cmp.Or(cmp.Compare(a.What, b.What), cmp.Compare(a.Why, b.Why)) })
	g.files["summary.md"] = g.summary(status, diagnosis, pods)
	return g.missing, g.write(w)
}

func (g *gathering) put(name string, text []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.files[name] = text
}

func (g *gathering) miss(what string, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.missing = append(g.missing, Missing{what, err.Error()})
}

func (g *gathering) tenants(ctx context.Context) (names []string) {
	var list isthmus.PeeringList
	if err := g.cluster.Client.List(ctx, &list); err != nil {
		g.miss("Peerings, and therefore the namespaces of peerings", err)
		return nil
	}
	for _, p := range list.Items {
		names = append(names, p.Spec.TenantNamespace.Local)
	}
	return names
}

// secrets lists the Secrets without their values. It registers the values with the redactor, so
// that they are removed from all other files as well.
func (g *gathering) secrets(ctx context.Context, namespaces []string) {
	type key struct {
		Name   string `json:"name"`
		Octets int    `json:"octets"`
	}
	type secret struct {
		Namespace string            `json:"namespace"`
		Name      string            `json:"name"`
		Type      corev1.SecretType `json:"type"`
		Created   time.Time         `json:"created"`
		Labels    map[string]string `json:"labels,omitempty"`
		Keys      []key             `json:"keys"`
	}
	all := []secret{}
	for _, namespace := range namespaces {
		var list corev1.SecretList
		if err := g.cluster.Client.List(ctx, &list, client.InNamespace(namespace)); err != nil {
			g.miss("Secrets in "+namespace+"; their values are removed only where they look like secrets", err)
			continue
		}
		for i := range list.Items {
			s := &list.Items[i]
			out := secret{s.Namespace, s.Name, s.Type, s.CreationTimestamp.UTC(), s.Labels, []key{}}
			for _, name := range slices.Sorted(maps.Keys(s.Data)) {
				out.Keys = append(out.Keys, key{name, len(s.Data[name])})
				g.learn(name, s.Data[name])
			}
			all = append(all, out)
		}
	}
	g.yaml("secrets.yaml", all)
}

// Some values in Secrets are not secret, and may be shown. public has their keys.
var public = map[string]bool{"publicKey": true, "tunnels": true, "nextPublicKey": true, "nextTunnels": true, "offeredKey": true, "since": true, "nextSince": true, "ca.crt": true, "tls.crt": true, "certificate": true, "namespace": true, "apiServerUrl": true, "apiServerCa": true}

func (g *gathering) learn(name string, value []byte) {
	if public[name] {
		return
	}
	g.redact.Secret(value)
	var exchange postquantum.State
	if json.Unmarshal(value, &exchange) == nil {
		for _, secret := range exchange.Secrets() {
			// Secret also registers the decoded octets.
			g.redact.Secret([]byte(base64.StdEncoding.EncodeToString(secret)))
		}
	}
	config, err := clientcmd.Load(value)
	if err != nil {
		return
	}
	for _, user := range config.AuthInfos {
		for _, secret := range [][]byte{[]byte(user.Token), []byte(user.Password), user.ClientKeyData} {
			g.redact.Secret(secret)
		}
	}
}

// summarize returns the output of `isthmus status` and of `isthmus diagnose`.
func (g *gathering) summarize(ctx context.Context) (status, diagnosis string) {
	if s, err := inspect.StatusOf(ctx, g.cluster); err != nil {
		g.miss("status", err)
	} else {
		g.yaml("status.yaml", s)
		status = printed(func(w io.Writer) error { return s.Print(w, true) })
	}
	if d, err := inspect.Diagnose(ctx, g.cluster, nil, ""); err != nil {
		g.miss("diagnosis", err)
	} else {
		g.yaml("diagnosis.yaml", d)
		diagnosis = printed(d.Print)
	}
	return status, diagnosis
}

func printed(print func(io.Writer) error) string {
	var b strings.Builder
	_ = print(&b) // writing to a Builder cannot fail
	return b.String()
}

const statusFile = "status.json"

// components are the kinds of Pods, by ServiceAccount, with the pages that each kind serves at
// its loopback address.
var components = map[string][]struct {
	port uint16
	path string
	file string
}{
	deploy.GatewayServiceAccount:    {{5873, "/status?flows=1000", statusFile}, {5873, "/metrics", "metrics.txt"}},
	deploy.RouteAgentServiceAccount: {{5875, "/status", statusFile}, {5875, "/metrics", "metrics.txt"}},
	deploy.ManagerServiceAccount:    {{5876, "/metrics", "metrics.txt"}},
}

// pods returns the Pods of the installation, with at most maxAgents route agents.
func (g *gathering) pods(ctx context.Context) (all []corev1.Pod) {
	var list corev1.PodList
	if err := g.cluster.Client.List(ctx, &list, client.InNamespace(g.cluster.Namespace)); err != nil {
		g.miss("Pods in "+g.cluster.Namespace+", and therefore their logs and status", err)
		return nil
	}
	slices.SortStableFunc(list.Items, func(a, b corev1.Pod) int {
		if cluster.PodReady(&a) != cluster.PodReady(&b) {
			return map[bool]int{false: -1, true: 1}[cluster.PodReady(&a)]
		}
		return cmp.Compare(a.Name, b.Name)
	})
	agents := 0
	for _, p := range list.Items {
		if components[p.Spec.ServiceAccountName] == nil {
			continue
		}
		if p.Spec.ServiceAccountName == deploy.RouteAgentServiceAccount {
			if agents++; agents > maxAgents {
				continue
			}
		}
		all = append(all, p)
	}
	if agents > maxAgents {
		g.miss(fmt.Sprintf("logs and status of %d more route agents", agents-maxAgents), fmt.Errorf("the archive has at most %d route agents, beginning with those that are not ready", maxAgents))
	}
	return all
}

// queryAll queries all Pods, concurrentQueries of them concurrently.
func (g *gathering) queryAll(ctx context.Context, pods []corev1.Pod) {
	core, err := corev1client.NewForConfig(g.cluster.Config)
	if err != nil {
		g.miss("logs", err)
		return
	}
	var group sync.WaitGroup
	slots := make(chan struct{}, concurrentQueries)
	for i := range pods {
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			g.logs(ctx, core, &pods[i])
			for _, c := range components[pods[i].Spec.ServiceAccountName] {
				if c.file == statusFile && pods[i].Labels[v1alpha1.LabelGateway] == v1alpha1.GatewayStandby {
					continue // a standby has no status page
				}
				g.readPage(ctx, &pods[i], c.port, c.path, c.file)
			}
		})
	}
	group.Wait()
}

func (g *gathering) logs(ctx context.Context, core corev1client.PodsGetter, p *corev1.Pod) {
	restarted := make(map[string]bool)
	for _, s := range p.Status.ContainerStatuses {
		restarted[s.Name] = s.RestartCount > 0
	}
	limit := int64(maxLog)
	for _, container := range p.Spec.Containers {
		for _, previous := range []bool{false, true} {
			name := container.Name + ".log"
			if previous {
				if !restarted[container.Name] {
					continue
				}
				name = container.Name + ".before.log"
			}
			name = path.Join("pods", p.Name, name)
			text, err := core.Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{
				Container: container.Name, Previous: previous, TailLines: &g.LogLines, LimitBytes: &limit, Timestamps: true,
			}).DoRaw(ctx)
			if err != nil {
				g.miss(name, err)
				continue
			}
			g.put(name, text)
		}
	}
}

// readPage reads a page that a component serves at its loopback address.
func (g *gathering) readPage(ctx context.Context, p *corev1.Pod, port uint16, url, file string) {
	name := path.Join("pods", p.Name, file)
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	text, err := func() ([]byte, error) {
		c, err := podport.Client(g.cluster.Config, p.Namespace, p.Name, port)
		if err != nil {
			return nil, err
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+url, http.NoBody)
		if err != nil {
			return nil, err
		}
		answer, err := c.Do(request)
		if err != nil {
			return nil, err
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
		if err == nil && answer.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s", answer.Status, safetext.Of(strings.TrimSpace(string(text))))
		}
		return text, err
	}()
	if err != nil {
		g.miss(name, err)
		return
	}
	g.put(name, text)
}

// write redacts all files and writes them into an archive.
func (g *gathering) write(w io.Writer) error {
	compressed := gzip.NewWriter(w)
	archive := tar.NewWriter(compressed)
	root := "isthmus-" + cmp.Or(g.cluster.Identity.ClusterName, "cluster") + "-" + g.begin.Format("20060102T150405Z")
	for _, name := range slices.Sorted(maps.Keys(g.files)) {
		text := g.redact.Text(g.files[name])
		header := &tar.Header{Name: path.Join(root, name), Mode: 0o600, Size: int64(len(text)), ModTime: g.begin, Format: tar.FormatPAX}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		if _, err := archive.Write(text); err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), compressed.Close())
}

// summary returns the page that a reader should read first.
func (g *gathering) summary(status, diagnosis string, pods []corev1.Pod) []byte {
	var b bytes.Buffer
	identity := g.cluster.Identity
	fmt.Fprintf(&b, "# Isthmus in cluster %s\n\nCluster ID %s, namespace %s. Gathered %s by isthmus %s.\n\nValues of Secrets were removed and replaced by %s. Review the archive before you share it:\nit contains names, addresses and public keys.\n\n",
		safetext.Of(cmp.Or(identity.ClusterName, "?")), safetext.Of(cmp.Or(identity.ClusterID, "?")), g.cluster.Namespace, g.begin.Format(time.RFC3339), g.Version, redact.Mark)
	section := func(title, text string) {
		if text != "" {
			fmt.Fprintf(&b, "## %s\n\n```\n%s\n```\n\n", title, strings.ReplaceAll(strings.Trim(text, "\n"), "```", "'''"))
		}
	}
	section("Diagnosis", diagnosis)
	section("Status", status)
	fmt.Fprint(&b, "## Components\n\n| Pod | node | ready | restarts | image | last end |\n| --- | --- | --- | --- | --- | --- |\n")
	for i := range pods {
		p := &pods[i]
		for j, c := range p.Spec.Containers {
			restarts, end := int32(0), ""
			if j < len(p.Status.ContainerStatuses) {
				s := p.Status.ContainerStatuses[j]
				restarts = s.RestartCount
				if t := s.LastTerminationState.Terminated; t != nil {
					end = fmt.Sprintf("%s, exit code %d, %s", t.Reason, t.ExitCode, t.FinishedAt.UTC().Format(time.RFC3339))
				}
			}
			fmt.Fprintf(&b, "| %s | %s | %v | %d | %s | %s |\n", safetext.Of(p.Name), safetext.Of(p.Spec.NodeName), cluster.PodReady(p), restarts, safetext.Of(c.Image), end)
		}
	}
	fmt.Fprint(&b, "\n## Not read\n\n")
	if len(g.missing) == 0 {
		fmt.Fprint(&b, "Nothing: the archive is complete.\n")
	}
	for _, m := range g.missing {
		fmt.Fprintf(&b, "- %s: %s\n", safetext.Of(m.What), safetext.Of(m.Why))
	}
	fmt.Fprint(&b, "\n## Files\n\n")
	for _, name := range slices.Sorted(maps.Keys(g.files)) {
		fmt.Fprintf(&b, "- %s, %d octets\n", name, len(g.files[name]))
	}
	return b.Bytes()
}
