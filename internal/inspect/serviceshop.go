package inspect

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/safetext"

	"golang.org/x/net/dns/dnsmessage"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/coredns"
	"github.com/isthmus-net/isthmus/internal/corefile"
	"github.com/isthmus-net/isthmus/internal/install"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/podport"
)

// Reasons for which the hop HopNames is broken.
const (
	reasonDNSTooOld = "CoreDNSTooOld"
	reasonNoZone    = "ZoneMissing"
	reasonNoAnswer  = "NoAnswer"
)

// sharesServices reports whether the cluster shares Services, according to the stored values of the
// installation or the manager's flags.
func sharesServices(ctx context.Context, c *cluster.Cluster) bool {
	if chosen, err := install.Remembered(ctx, c); err == nil && install.WithServices(chosen) {
		return true
	}
	var d appsv1.Deployment // optional: without the right to read it, there is no hop for services
	if c.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: deploy.ManagerServiceAccount}, &d) != nil {
		return false
	}
	return slices.ContainsFunc(d.Spec.Template.Spec.Containers, func(container corev1.Container) bool {
		return slices.Contains(container.Args, "--services") || slices.Contains(container.Args, "--services=true")
	})
}

// namesHop checks whether CoreDNS answers for imported services. notAsked describes the check that
// was not possible, or is empty.
func namesHop(ctx context.Context, c *cluster.Cluster) (hop health.Hop, notAsked string, err error) {
	hop = health.Hop{Cluster: c.String(), Name: health.HopNames, State: health.Works, Source: "Deployments in kube-system"}
	d, err := coredns.Find(ctx, c)
	switch {
	case errors.Is(err, coredns.ErrNone):
		hop.State, hop.Text = health.Unknown, coredns.ErrNone.Error()
		return hop, "", nil
	case apierrors.IsForbidden(err):
		hop.State, hop.Text = health.Unknown, "you are not allowed to list Deployments in kube-system, to find CoreDNS"
		return hop, "", nil
	case err != nil:
		return hop, "", err
	}
	hop.Source = "the " + d.Where()
	served, unclear := corefile.Serves(d.Corefile())
	switch {
	case unclear != nil:
		hop.State, hop.Text = health.Unknown, d.Where()+": "+unclear.Error()
		return hop, "", nil //nolint:nilerr // the hop has the error
	case d.TooOld() != "" && !served:
		hop.State, hop.Reason, hop.Text = health.Broken, reasonDNSTooOld, d.TooOld()
		return hop, "", nil
	case !served:
		hop.State, hop.Reason = health.Broken, reasonNoZone
		hop.Text = fmt.Sprintf("the %s does not have the zone %s; run `isthmus install --context %s --configure-dns`", d.Where(), corefile.Zone, c.Context)
		return hop, "", nil
	}
	hop.Text = "the " + d.Where() + " has the zone " + corefile.Zone + "; answers were not checked"
	pod, port, err := dnsPod(ctx, c)
	if err != nil {
		return hop, fmt.Sprintf("%s: CoreDNS: %s", c, safetext.Of(err.Error())), nil
	}
	hop.Source = "Pod " + metav1.NamespaceSystem + "/" + safetext.Of(pod)
	code, err := queryDNS(ctx, c, pod, port)
	switch {
	case err != nil:
		hop.Source = "the " + d.Where()
		return hop, fmt.Sprintf("%s: answers of CoreDNS for %s: %s", c, corefile.Zone, safetext.Of(err.Error())), nil
	case code == dnsmessage.RCodeSuccess:
		hop.Text = "CoreDNS answers for " + corefile.Zone
	default:
		hop.State, hop.Reason = health.Broken, reasonNoAnswer
		hop.Text = fmt.Sprintf("CoreDNS answers queries for %s with %s: it has not read its Corefile yet; it does so within two minutes, or at once by: kubectl -n kube-system rollout restart deployment %s",
			corefile.Zone, strings.TrimPrefix(code.String(), "RCode"), safetext.Of(d.Deployment))
		if code == dnsmessage.RCodeServerFailure {
			hop.Text += fmt.Sprintf("; or it is not allowed to watch ServiceImports, and then fails for all Services (`isthmus install --context %s`); the log of CoreDNS shows the reason", c.Context)
		}
	}
	return hop, "", nil
}

// dnsPod returns a ready Pod of CoreDNS and its TCP port for DNS.
func dnsPod(ctx context.Context, c *cluster.Cluster) (name string, port uint16, err error) {
	var pods corev1.PodList
	if err := c.Client.List(ctx, &pods, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{"k8s-app": "kube-dns"}); err != nil {
		return "", 0, err
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		if health.PodProblem(p) != "" {
			continue
		}
		port = 53
		for _, container := range p.Spec.Containers {
			for _, have := range container.Ports {
				if have.Protocol == corev1.ProtocolTCP && strings.HasPrefix(have.Name, "dns") {
					port = uint16(have.ContainerPort)
				}
			}
		}
		return p.Name, port, nil
	}
	return "", 0, errors.New("none of its Pods is ready")
}

// queryDNS queries a Pod of CoreDNS for the SOA record of the zone, over TCP through the API
// server.
func queryDNS(ctx context.Context, c *cluster.Cluster, pod string, port uint16) (dnsmessage.RCode, error) {
	ctx, cancel := context.WithTimeout(ctx, cluster.RequestTimeout)
	defer cancel()
	conn, err := podport.Dial(ctx, c.Config, metav1.NamespaceSystem, pod, port)
	if err != nil {
		return 0, err
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })() // the connection supports no deadline, so close it when ctx ends
	defer conn.Close()
	return querySOA(conn, corefile.Zone)
}

// querySOA queries the SOA record of a zone over TCP. The length precedes each message (RFC 1035,
// section 4.2.2).
func querySOA(conn net.Conn, zone string) (dnsmessage.RCode, error) {
	name, err := dnsmessage.NewName(zone + ".")
	if err != nil {
		return 0, err
	}
	id := uint16(rand.Uint32())
	question := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: id, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: name, Type: dnsmessage.TypeSOA, Class: dnsmessage.ClassINET}},
	}
	packed, err := question.AppendPack(make([]byte, 2, 64))
	if err != nil {
		return 0, err
	}
	binary.BigEndian.PutUint16(packed, uint16(len(packed)-2))
	if _, err := conn.Write(packed); err != nil {
		return 0, err
	}
	var length [2]byte
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		return 0, err
	}
	text := make([]byte, binary.BigEndian.Uint16(length[:]))
	if _, err := io.ReadFull(conn, text); err != nil {
		return 0, err
	}
	var p dnsmessage.Parser
	header, err := p.Start(text)
	switch {
	case err != nil:
		return 0, err
	case header.ID != id || !header.Response:
		return 0, errors.New("the answer is for another query")
	}
	return header.RCode, nil
}

// ServiceCounts counts the services of one peer.
type ServiceCounts struct {
	Imported int `json:"imported"`
	Refused  int `json:"refused,omitempty"`
	Waiting  int `json:"waiting,omitempty"` // neither imported nor refused yet

	reasons []string // reasons for which services were refused
}

func (s *ServiceCounts) String() string {
	if s == nil {
		return ""
	}
	text := fmt.Sprint(s.Imported)
	if s.Refused > 0 {
		text += fmt.Sprintf(" (%d refused)", s.Refused)
	}
	return text
}

// problems returns a line for each of the first refused services, and a line with the number of
// further ones.
func (s *ServiceCounts) problems() (all []string) {
	const few = 5
	for _, reason := range s.reasons[:min(few, len(s.reasons))] {
		all = append(all, "service "+reason)
	}
	if more := len(s.reasons) - few; more > 0 {
		all = append(all, fmt.Sprintf("and %d more services", more))
	}
	return all
}

// importedServices counts the services that peers export to this cluster, by tenant namespace. It
// returns nil if the kind does not exist, or if the user may not read the objects.
func importedServices(ctx context.Context, c *cluster.Cluster) (map[string]*ServiceCounts, error) {
	var list isthmus.PeerServicesList
	switch err := c.Client.List(ctx, &list); {
	case kubeerr.Forbidden(err), meta.IsNoMatchError(err):
		return nil, nil
	case err != nil:
		return nil, c.Explain("PeerServices", err)
	}
	counts := map[string]*ServiceCounts{}
	for i := range list.Items {
		counts[list.Items[i].Namespace] = &ServiceCounts{}
	}
	for i := range list.Items {
		counts[list.Items[i].Namespace].add(&list.Items[i])
	}
	return counts, nil
}

func (s *ServiceCounts) add(p *isthmus.PeerServices) {
	if p.Status.ObservedGeneration < p.Generation {
		s.Waiting += len(p.Spec.Services)
		return
	}
	refused := map[string]bool{}
	for _, r := range p.Status.Refused {
		name := r.Namespace + "/" + r.Name
		refused[name] = true
		text := safetext.Of(name) + ": " + safetext.Of(r.Reason)
		if r.Message != "" {
			text += ": " + safetext.Cut(r.Message, safetext.Message)
		}
		s.reasons = append(s.reasons, text)
	}
	s.Refused += len(refused)
	for _, e := range p.Spec.Services {
		if !refused[e.Namespace+"/"+e.Name] {
			s.Imported++
		}
	}
}

// servicesHop reports how many of the services that a peer exports can be used here.
func servicesHop(c *cluster.Cluster, p *isthmus.Peering, counts map[string]*ServiceCounts) health.Hop {
	hop := health.Hop{Cluster: c.String(), Peering: p.Name, Name: health.HopServices, State: health.Works, Source: "PeerServices in " + p.Spec.TenantNamespace.Local}
	s := counts[p.Spec.TenantNamespace.Local]
	switch {
	case counts == nil:
		hop.State, hop.Text = health.Unknown, "you are not allowed to list PeerServices"
	case s == nil:
		hop.Text = "the peer exports no services to this cluster"
	case s.Refused > 0:
		hop.State, hop.Reason = health.Limited, "Refused"
		hop.Text = fmt.Sprintf("%d imported, %d refused in whole or in part: %s", s.Imported, s.Refused, safetext.FirstFew(s.reasons, "; "))
	case s.Waiting > 0:
		hop.State, hop.Text = health.Unknown, fmt.Sprintf("%d imported, %d not checked by the manager yet", s.Imported, s.Waiting)
	default:
		hop.Text = fmt.Sprintf("%d imported", s.Imported)
	}
	return hop
}
