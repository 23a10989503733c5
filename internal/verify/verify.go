package verify

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// Options select the checks.
type Options struct {
	Only  Only
	Sizes map[string][]int // sizes to use for a protocol instead of those in the package's Sizes
	To    []string         // targets in the remote cluster, in addition to those found there; see Targets
	Image string           // image of the Pods; empty: the gateway's image in each cluster
	// Pods and RemotePods are Pods of the local and the remote cluster to use instead of
	// creating some, each NAMESPACE/NAME; see CheckPods.
	Pods, RemotePods []string
	Report           func(string) // called with a line for each step
	// Continuous makes the run last until the context ends, with one small UDP packet per
	// second for each pair. It is called with the counts every second and at the end, and owns
	// the slice.
	Continuous func([]Loss)
}

// A Loss counts the packets from one Pod to another, and how many of these were lost.
type Loss struct {
	From     End       `json:"from"`
	To       End       `json:"to"`
	Sent     int       `json:"sent"`
	Lost     int       `json:"lost"`
	Last     time.Time `json:"last,omitzero"` // when a packet was last lost; zero: never
	Why      string    `json:"why,omitempty"` // reason of the last loss
	NotAsked int       `json:"notAsked"`      // number of checks without a result; see Result.Unknown
	WhyNot   string    `json:"whyNot,omitempty"`
}

// ErrNotPeered is returned for two clusters that are not peered.
var ErrNotPeered = errors.New("not peered")

// Run creates Pods in both clusters, makes them send, and deletes them, even if ctx ends. If Run
// returns an error, the Report has the results before the error. If ctx ends, Run returns an error,
// unless it has already begun to send continuously (Options.Continuous).
func Run(ctx context.Context, local, remote *cluster.Cluster, o Options) (report *Report, err error) {
	report = &Report{At: time.Now(), Results: []Result{}}
	clusters := [2]*cluster.Cluster{local, remote}
	for _, c := range clusters {
		if err := c.Identify(ctx); err != nil {
			return report, err
		}
	}
	report.Local, report.Remote = local.String(), remote.String()
	if local.Identity.ClusterID == remote.Identity.ClusterID {
		return report, fmt.Errorf("%s and %s are the same cluster: want two", local, remote)
	}
	run := fmt.Sprintf("%06x", rand.Uint32()&0xffffff)
	var sites [2]*site
	for i, c := range clusters {
		sites[i] = newSite(c, run, o.Image, [][]string{o.Pods, o.RemotePods}[i])
	}
	defer func() {
		for _, s := range sites {
			o.Report(s.summary("deleting the Pods", "ending the containers"))
		}
		var errs [2]error
		each(sites, func(i int, s *site) { errs[i] = s.remove(ctx) })
		err = errors.Join(err, errs[0], errs[1])
	}()
	for _, s := range sites {
		o.Report(s.summary(fmt.Sprintf("creating Pods isthmus-verify-%s-...", run), fmt.Sprintf("adding a container isthmus-verify-%s to Pods", run)))
	}
	var errs [2]error
	each(sites, func(i int, s *site) {
		if s.networks, errs[i] = agreedBy(ctx, clusters[1-i], clusters[i]); errs[i] == nil {
			errs[i] = s.make(ctx)
		}
	})
	if err := errors.Join(errs[:]...); err != nil {
		return report, err
	}
	var found [2][]Target
	for i := range found {
		if o.Continuous == nil {
			found[i] = discover(ctx, clusters[i], clusters[1-i], sites[1-i].networks, o.Report)
		}
	}
	return report, verify(ctx, sites, found, o, report)
}

// verify performs the checks that o selects. The Pods of sites[i] also check the targets in
// found[i], which are in the other cluster.
func verify(ctx context.Context, sites [2]*site, found [2][]Target, o Options, report *Report) error {
	checks := Plan(sites[0].ends(), sites[1].ends(), o.Only, o.Sizes)
	if o.Continuous != nil {
		watch(ctx, sites, pairs(checks), o.Continuous)
		return nil // only the end of ctx ends a continuous run
	}
	for _, target := range o.To {
		checks = append(checks, Targets(sites[0].ends(), o.Only, []Target{{Host: target}})...)
	}
	for i, direction := range []string{"out", "in"} {
		if among(o.Only.directions, direction) {
			checks = append(checks, Targets(sites[i].ends(), o.Only, found[i])...)
		}
	}
	o.Report(fmt.Sprintf("%d checks", len(checks)))
	results := send(ctx, sites, checks)
	for _, site := range sites {
		control(ctx, site, results)
	}
	results, report.LeftOut = withoutUnable(results, o.Only)
	report.add(results...)
	return ctx.Err()
}

// withoutUnable leaves out pings between Pods if one of the two is not permitted to send pings, and
// names that Pod in leftOut. TCP and UDP packets still test the same path. Pings that the user
// requested, and pings to targets that can only be pinged, are kept as unknown.
func withoutUnable(results []Result, selection Only) (some []Result, leftOut []string) {
	for _, r := range results {
		if r.Unable == "" || r.Target != "" || slices.Contains(selection.protocols, ICMP) {
			some = append(some, r)
			continue
		}
		if why := fmt.Sprintf("pings: %s", r.Unknown); !slices.Contains(leftOut, why) {
			leftOut = append(leftOut, why)
		}
	}
	return some, leftOut
}

// summary returns a line about the Pods of a site. It begins with createdText if verify created the
// Pods, and with givenText if the user named them.
func (s *site) summary(createdText, givenText string) string {
	if len(s.given) > 0 {
		return fmt.Sprintf("%s: %s %s", s, givenText, strings.Join(s.given, ", "))
	}
	return fmt.Sprintf("%s: %s", s, createdText)
}

func each(sites [2]*site, do func(int, *site)) {
	var group sync.WaitGroup
	for i, s := range sites {
		group.Go(func() { do(i, s) })
	}
	group.Wait()
}

func (s *site) ends() (all []End) {
	for _, m := range s.pods {
		all = append(all, m.End)
	}
	return all
}

// send performs checks. All Pods send concurrently. It returns the results in the order of
// checks.
func send(ctx context.Context, sites [2]*site, checks []Check) []Result {
	results := make([]Result, len(checks))
	var group sync.WaitGroup
	for m, mine := range senderOf(sites, checks) {
		group.Go(func() {
			for i, r := range m.send(ctx, pick(checks, mine), false) {
				results[mine[i]] = r
			}
		})
	}
	group.Wait()
	return results
}

// senderOf returns the indexes of the checks that each Pod has to send.
func senderOf(sites [2]*site, checks []Check) map[*member][]int {
	indexes := map[*member][]int{}
	for _, s := range sites {
		for _, m := range s.pods {
			for i, c := range checks {
				if c.From == m.End {
					indexes[m] = append(indexes[m], i)
				}
			}
		}
	}
	return indexes
}

func pick(checks []Check, which []int) []Check {
	some := make([]Check, len(which))
	for i, index := range which {
		some[i] = checks[index]
	}
	return some
}

// send makes one Pod perform checks. If the node of the Pod fails, the connection returns no error.
// Therefore the request has a timeout: the time that the Pod may take, and a margin.
func (m *member) send(ctx context.Context, checks []Check, once bool) []Result {
	requests := make([]Request, len(checks))
	for i, c := range checks {
		requests[i] = c.request()
		requests[i].Once = once
	}
	ctx, cancel := context.WithTimeout(ctx, patience(requests, once))
	defer cancel()
	var answers []Answer
	err := m.request(ctx, http.MethodPost, "/run", requests, &answers)
	if err == nil && len(answers) != len(requests) {
		err = fmt.Errorf("%d answers to %d requests", len(answers), len(requests))
	}
	results := make([]Result, len(checks))
	for i := range checks {
		if results[i].Check = checks[i]; err != nil {
			results[i].Unknown = fmt.Sprintf("Pod %s: %v", m.name, err)
		} else {
			results[i].Answer = answers[i]
			if answers[i].Unable != "" {
				results[i].Unknown = fmt.Sprintf("Pod %s: %s", m.name, answers[i].Unable)
			}
		}
	}
	return results
}

// patience returns the maximum time that a Pod takes for requests, even if none is answered, with a
// margin for the connection to the Pod. Large transfers get more time.
func patience(requests []Request, once bool) time.Duration {
	rounds := (len(requests) + maxSenders - 1) / maxSenders
	if once {
		return time.Duration(rounds)*attempt + 5*time.Second
	}
	transfers := 0
	for i := range requests {
		if requests[i].Protocol == TCP && requests[i].Size >= largeSize {
			transfers++
		}
	}
	return time.Duration(rounds*attempts)*attempt + time.Duration(transfers)*(maxTransferTime-attempt)/maxSenders + maxTransferTime
}

func (c Check) request() Request {
	r := Request{Protocol: c.Protocol, Host: c.To.Seen.String(), Port: echoPort, Size: c.Size}
	if c.Target != "" {
		r.Host, r.Port = c.Target, 0
		if host, port, err := net.SplitHostPort(c.Target); err == nil {
			n, _ := strconv.ParseUint(port, 10, 16) // CheckTarget has validated the port
			r.Host, r.Port = host, uint16(n)
		}
	}
	return r
}

// CheckTarget returns an error for a text that is neither HOST nor HOST:PORT.
func CheckTarget(text string) error {
	host, port, err := net.SplitHostPort(text)
	if err == nil {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return fmt.Errorf("%q: want a port from 1 to 65535", text)
		}
	} else {
		host = text
	}
	if _, err := netip.ParseAddr(host); err == nil || validation.IsDNS1123Subdomain(strings.TrimSuffix(host, ".")) == nil {
		return nil
	}
	return fmt.Errorf("%q: want HOST for a ping, or HOST:PORT for a connection, such as 10.0.0.1:443", text)
}

// pairs returns the checks for Continuous: one for each pair of Ends.
func pairs(checks []Check) (some []Check) {
	known := map[[2]End]bool{}
	for _, c := range checks {
		if pair := [2]End{c.From, c.To}; !known[pair] {
			known[pair] = true
			some = append(some, Check{From: c.From, To: c.To, Protocol: UDP, Size: Sizes[UDP][0]})
		}
	}
	return some
}

// watch makes each Pod send once per second, independently of the others. It calls report with the
// counts once per second and at the end. It does not call report before there are counts.
func watch(ctx context.Context, sites [2]*site, checks []Check, report func([]Loss)) {
	losses := make([]Loss, len(checks))
	for i, c := range checks {
		losses[i].From, losses[i].To = c.From, c.To
	}
	var mu sync.Mutex // guards losses
	var group sync.WaitGroup
	senders := senderOf(sites, checks)
	for _, m := range slices.Concat(sites[0].pods, sites[1].pods) {
		// A Pod that only answers must get requests, too, or it would end as idle.
		if _, sends := senders[m]; !sends {
			group.Go(func() {
				runPeriodically(ctx, idleTimeout/10, func() { _ = m.request(ctx, http.MethodGet, "/ready", nil, nil) })
			})
		}
	}
	for m, mine := range senders {
		group.Go(func() {
			runPeriodically(ctx, time.Second, func() {
				results := m.send(ctx, pick(checks, mine), true)
				if ctx.Err() != nil { // packets in transit do not count as lost
					return
				}
				mu.Lock()
				defer mu.Unlock()
				for i, r := range results {
					losses[mine[i]].count(r)
				}
			})
		})
	}
	publish := func() {
		mu.Lock()
		known := slices.Clone(losses)
		mu.Unlock()
		if slices.ContainsFunc(known, func(l Loss) bool { return l.Sent+l.NotAsked > 0 }) {
			report(known)
		}
	}
	runPeriodically(ctx, time.Second, publish)
	group.Wait()
	publish()
}

// runPeriodically calls do at once, and then after each interval. It returns when ctx has ended.
func runPeriodically(ctx context.Context, interval time.Duration, do func()) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for ctx.Err() == nil {
		do()
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

func (l *Loss) count(r Result) {
	if r.Unknown != "" {
		l.NotAsked++
		l.WhyNot = r.Unknown
		return
	}
	l.Sent++
	if r.Error != "" {
		l.Lost++
		l.Last, l.Why = time.Now(), r.Error
	}
}

// Line formats losses in one line.
func Line(losses []Loss) string {
	var b strings.Builder
	sent, lost, notAsked := 0, 0, 0
	var last Loss
	var whyNot string
	for _, l := range losses {
		sent, lost, notAsked = sent+l.Sent, lost+l.Lost, notAsked+l.NotAsked
		if l.NotAsked > 0 {
			whyNot = l.WhyNot
		}
		if l.Last.After(last.Last) {
			last = l
		}
	}
	fmt.Fprintf(&b, "%d sent, %d lost (%.2f %%)", sent, lost, 100*float64(lost)/float64(max(sent, 1)))
	if lost > 0 {
		fmt.Fprintf(&b, ", last %s from %v to %v: %s", last.Last.Format(time.TimeOnly), last.From, last.To, safetext.Of(last.Why))
	}
	if notAsked > 0 {
		fmt.Fprintf(&b, ", %d not requested: %s", notAsked, safetext.Of(whyNot))
	}
	return b.String()
}
