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
func (l *loop) update(u update) {
	err := u.err
	if err == nil {
		if l.now.configErr == nil && u.config.samePeers(l.now.config) {
			if reflect.DeepEqual(u.config.PodNetwork, l.now.config.PodNetwork) && u.config.Gateway.Site.Equal(l.now.config.Gateway.Site) {
				return
			}
			// only Nodes, Pods and addresses that no peer's gateway can have differ: keep rules and
			// peers
			l.now.config = u.config
			l.publish()
			l.reapply(false)
			return
		}
		err = l.accept(u.config)
	}
	if err == nil {
		return
	}
	again := l.now.configErr != nil && l.now.configErr.Error() == err.Error()
	l.now.configErr = err
	l.publish()
	if again {
		return
	}
	for _, e := range unjoin(err) {
		l.log.Error("configuration rejected; the last valid one stays in force", errorAttrs(e)...)
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
func (l *loop) accept(c Config) error {
	gw := c.Gateway
	if err := checkMTU(c.MTU, gw.Peers); err != nil {
		return err
	}
	want := l.cutTunnels(gw.Peers, l.now.peers)
	l.locate(want, gw.Site)
	survey := l.survey(c, want, false)
	if err := l.setRules(&survey); err != nil {
		l.locate(l.now.wanted(), l.now.config.Gateway.Site)
		return err
	}
	if l.now.generation > 0 {
		old := l.now.config
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
				l.log.Warn("change takes effect after a restart", "field", f.name)
			}
		}
	}
	l.now.config, l.now.configErr = c, nil
	l.publish()
	if l.flows != nil {
		l.flows.name(gw.Peers)
	}
	if l.acting { // the rules are in force, and no packet has been read yet
		l.adopt()
	}
	l.put(&survey)
	l.now.generation++ // last: when a caller sees the generation, it is in force
	l.now.reloaded = time.Now()
	l.publish()
	l.log.Info("configuration in force", "generation", l.now.generation, "peers", len(gw.Peers))
	return nil
}

// reapply applies the configuration in force again after a change around the gateway. ways says
// that routes to peers may have changed, too. After a failed attempt it applies the whole
// configuration.
func (l *loop) reapply(ways bool) {
	peers := l.now.wanted()
	l.locate(peers, l.now.config.Gateway.Site)
	survey := l.survey(l.now.config, peers, ways)
	if err := l.setRules(&survey); err != nil {
		if ways { // otherwise the result of the probes would be lost
			l.ways.Store(true)
		}
		// the rules differ only in MTU and MSS
		l.log.Error("cannot set the NAT rules for a new MTU", "mtu", survey.tunnel, "error", err)
		return
	}
	l.put(&survey)
}
