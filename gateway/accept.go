package gateway

import (
	"errors"
	"reflect"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
)

// An update is one delivery by the Source: a new configuration, or the error that made the newest
// one invalid.
type update struct {
	config Config
	err    error
}

// update applies a new configuration. If it is invalid, update logs the error once and keeps the
// last valid one.
func (l *loop) update(u update) {
	err := u.err
	if err == nil {
		if l.now.configErr == nil && u.config.samePeers(l.now.config) {
			if reflect.DeepEqual(u.config.PodNetwork, l.now.config.PodNetwork) && u.config.Gateway.Site.Equal(l.now.config.Gateway.Site) {
				return
			}
			// Nothing has changed except Nodes, Pods and the addresses that peers' gateways must
			// not use. So the rules and peers stay.
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

// unjoin returns the errors that errors.Join has joined in err, including those in nested joins.
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

// errorAttrs returns the log attributes of err. For a fabric.Problem they include its file,
// object and field.
func errorAttrs(err error) []any {
	attrs := []any{"error", err}
	if p := (fabric.Problem{}); errors.As(err, &p) {
		attrs = append(attrs, "file", p.Origin.File, "object", fabric.Origin{Kind: p.Origin.Kind, Namespace: p.Origin.Namespace, Name: p.Origin.Name}.String(), "field", p.Field)
	}
	return attrs
}

// accept validates a configuration and applies all of it. If it returns an error, nothing has
// changed. Errors of the kernel and of the tunnels are not returned, but recorded in applyErr.
func (l *loop) accept(c Config) error {
	gw := c.Gateway
	if err := checkMTU(c.MTU, gw.Peers); err != nil {
		return err
	}
	want := l.cutTunnels(gw.Peers, l.now.peers)
	l.locate(want, gw.Site)
	survey := l.survey(c, want, false)
	if err := l.setRules(&survey); err != nil {
		l.locate(l.now.wantedPeers(), l.now.config.Gateway.Site)
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
		l.flows.setNames(gw.Peers)
	}
	// Adopt the flows of the previous active gateway now: the rules that translate them are in
	// force, and no packet has been read from the TUNs.
	if l.acting {
		l.adopt()
	}
	l.put(&survey)
	l.now.generation++ // incremented last, so that a reader that finds the new generation can rely on the whole configuration
	l.now.reloaded = time.Now()
	l.publish()
	l.log.Info("configuration in force", "generation", l.now.generation, "peers", len(gw.Peers))
	return nil
}

// reapply applies the current configuration again, after an event such as a netlink message, a DNS
// answer or a roaming peer. If remeasure is true, routes to peers may have changed as well. If the
// last attempt has failed, reapply applies everything, changed or not.
func (l *loop) reapply(remeasure bool) {
	peers := l.now.wantedPeers()
	l.locate(peers, l.now.config.Gateway.Site)
	survey := l.survey(l.now.config, peers, remeasure)
	if err := l.setRules(&survey); err != nil {
		if remeasure { // so that the next reapply queries the routes again
			l.remeasure.Store(true)
		}
		// The rules differ from those in force only in MTU and MSS, so this error is not fatal.
		l.log.Error("cannot set the NAT rules for a new MTU", "mtu", survey.tunnel, "error", err)
		return
	}
	l.put(&survey)
}
