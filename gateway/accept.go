package gateway

import (
	"errors"
	"reflect"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
)

// An update is a new configuration, or the reason why there is none.
type update struct {
	config Config
	err    error
}

// update puts a new configuration into force, or reports why there is none.
func (g *gateway) update(u update) {
	err := u.err
	if err == nil {
		if g.now.configErr == nil && u.config.samePeers(g.now.config) {
			if reflect.DeepEqual(u.config.PodNetwork, g.now.config.PodNetwork) && u.config.Gateway.Site.Equal(g.now.config.Gateway.Site) {
				return
			}
			// only Nodes, Pods and addresses that no peer's gateway can have differ: keep rules and
			// peers
			g.mu.Lock()
			g.now.config = u.config
			g.mu.Unlock()
			g.reapply(false)
			return
		}
		err = g.accept(u.config)
	}
	if err == nil {
		return
	}
	g.mu.Lock()
	again := g.now.configErr != nil && g.now.configErr.Error() == err.Error()
	g.now.configErr = err
	g.mu.Unlock()
	if again {
		return
	}
	for _, e := range unjoin(err) {
		g.log.Error("configuration rejected; the last valid one stays in force", errorAttrs(e)...)
	}
}

// unjoin returns the errors of an errors.Join.
func unjoin(err error) []error {
	if j, ok := err.(interface{ Unwrap() []error }); ok {
		var all []error
		for _, e := range j.Unwrap() {
			all = append(all, unjoin(e)...)
		}
		return all
	}
	return []error{err}
}

// errorAttrs returns the log attributes of a problem.
func errorAttrs(err error) []any {
	attrs := []any{"error", err}
	if p := (fabric.Problem{}); errors.As(err, &p) {
		attrs = append(attrs, "file", p.Origin.File, "object", fabric.Origin{Kind: p.Origin.Kind, Namespace: p.Origin.Namespace, Name: p.Origin.Name}.String(), "field", p.Field)
	}
	return attrs
}

// accept puts a whole configuration into force. After an error nothing has changed. The parts that could not
// be applied are in applyErr.
func (g *gateway) accept(c Config) error {
	gw := c.Gateway
	if err := checkMTU(c.MTU, gw.Peers); err != nil {
		return err
	}
	want := g.cutTunnels(gw.Peers, g.now.peers)
	g.locate(want, gw.Site)
	survey := g.survey(c, want, false)
	if err := g.setRules(&survey); err != nil {
		g.locate(g.now.wanted(), g.now.config.Gateway.Site)
		return err
	}
	if g.now.generation > 0 {
		old := g.now.config
		for _, f := range []struct {
			name    string
			changed bool
		}{
			{"bounds and timeouts of NAT", c.NAT != old.NAT},
			{"tunnels", c.Tunnels != old.Tunnels},
			{"metricsAddress", c.MetricsAddress != old.MetricsAddress},
			{"statusAddress", c.StatusAddress != old.StatusAddress},
			{"flowLog", c.FlowLog != old.FlowLog},
		} {
			if f.changed {
				g.log.Warn("change takes effect after a restart", "field", f.name)
			}
		}
	}
	g.mu.Lock()
	g.now.config, g.now.configErr = c, nil
	g.mu.Unlock()
	if g.flows != nil {
		g.flows.name(gw.Peers)
	}
	if g.acting { // the rules are in force, and no packet has been read yet
		g.adopt()
	}
	g.put(&survey)
	g.mu.Lock()
	g.now.generation++ // last: when a caller sees the generation, it is in force
	g.now.reloaded = time.Now()
	g.mu.Unlock()
	g.log.Info("configuration in force", "generation", g.now.generation, "peers", len(gw.Peers))
	return nil
}

// reapply applies the configuration in force again after a change around the gateway. ways says
// that routes to peers may have changed, too. After a failed attempt it applies the whole
// configuration.
func (g *gateway) reapply(ways bool) {
	peers := g.now.wanted()
	g.locate(peers, g.now.config.Gateway.Site)
	survey := g.survey(g.now.config, peers, ways)
	if err := g.setRules(&survey); err != nil {
		if ways { // otherwise the result of the probes would be lost
			g.ways.Store(true)
		}
		// the rules differ only in MTU and MSS
		g.log.Error("cannot set the NAT rules for a new MTU", "mtu", survey.tunnel, "error", err)
		return
	}
	g.put(&survey)
}
