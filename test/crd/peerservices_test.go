package crd

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// exported returns a service of PeerServices with n endpoints.
func exported(name string, n int) object {
	endpoints := make([]any, n)
	for i := range endpoints {
		endpoints[i] = object{"address": fmt.Sprintf("10.244.%d.%d", i>>8&0xff, i&0xff), "ready": true, "serving": true}
	}
	return object{
		"namespace": "prod", "name": name, "since": "2026-11-21T10:00:00Z", "type": "ClusterSetIP",
		"ports":   []any{object{"name": "http", "protocol": "TCP", "port": int64(80)}},
		"subsets": []any{object{"targets": []any{object{"name": "http", "port": int64(8080)}}, "endpoints": endpoints}},
	}
}

func peerServices(services ...any) object {
	return object{"apiVersion": "isthmus.net/v1alpha1", "kind": "PeerServices", "metadata": object{"name": "services-0"}, "spec": object{"services": services}}
}

func serverOfPeerServices(t *testing.T) *server {
	t.Helper()
	return newServer(t, "testdata/crds/isthmus.net_peerservices.yaml")
}

// The API server must refuse each value that a peer must not write into a service, and name the
// field. The schema does not check to whom an address belongs, because the importer's manager does
// that.
func TestEachInvalidFieldOfAServiceIsRefused(t *testing.T) {
	s := serverOfPeerServices(t)
	const services = "spec.services"
	type test struct {
		field, message string
		value          any
	}
	var all []test
	add := func(field, message string, values ...any) {
		for _, v := range values {
			all = append(all, test{field, message, v})
		}
	}
	dotless := []any{"a.b", "A", "-a", "a-", "a_b", "a b", "*", "../a", "a/b", "ä", "a\n"}
	const long = "Too long"
	for _, f := range []string{"namespace", "name"} {
		add(f, "should match", dotless...)
		add(f, "at least 1 chars", "")
		add(f, long, strings.Repeat("a", 64))
		add(f, "must be of type string", int64(1))
		add(f, "Required value", absent)
	}
	add("type", "Unsupported value", "", "ExternalName", "LoadBalancer", "clustersetip")
	add("type", "Required value", absent)
	add("since", "must be of type date-time", "", "yesterday", "2026-11-21")
	add("since", "should match", "2026-01-01t00:00:00z", "2026-01-01T00:00:00+99:99", "2026-01-01T00:00:00x5Z", "2026-01-01T00:00:00ZTgarbage", "2026-01-01T00:00:00+01:00")
	add("since", "Required value", absent)
	add("sessionAffinity", "Unsupported value", "clientip", "x")
	add("sessionAffinitySeconds", "greater than or equal to 1", int64(0), int64(-1))
	add("sessionAffinitySeconds", "less than or equal to 86400", int64(86401), int64(1<<31-1))
	add("internalTrafficPolicy", "Unsupported value", "x")
	add("trafficDistribution", "Unsupported value", "x")
	for _, f := range []string{"labels", "annotations"} {
		add(f, "Too many", numbered(17))
		add(f, "keys have at most 317 characters", object{strings.Repeat("k", 318): ""})
		add(f+".x", long, strings.Repeat("v", 513))
	}
	for _, f := range []string{"ports", "subsets.targets"} {
		add(f+".port", "greater than or equal to 1", int64(0), int64(-1))
		add(f+".port", "less than or equal to 65535", int64(65536))
		add(f+".port", "must be of type integer", "http")
		add(f+".name", "should match", dotless...)
		add(f+".name", long, strings.Repeat("a", 64))
		var many []any
		for i := range 65 {
			many = append(many, object{"name": fmt.Sprint("p", i), "protocol": "TCP", "port": int64(1 + i)})
		}
		add(f, "Too many", many)
	}
	add("ports.protocol", "Unsupported value", "", "ICMP", "tcp", "ALL")
	add("ports.appProtocol", long, strings.Repeat("a", 318))
	add("subsets", "Too many", slices.Repeat([]any{object{}}, 9))
	const endpoint = "subsets.endpoints."
	add(endpoint+"address", "should match", "", "0.0.0.0/0", "10.244.0.0/16", "::/0", "10.244.0", "10.244.0.1000", "10.244.0.1 ", "10.244.0.1\n", "10.244.0.1:80", "0x0af40001",
		"::ffff:10.244.0.1", "fe80::1%eth0", "[::1]", "FD00::1", "evil.example", "localhost")
	add(endpoint+"address", long, strings.Repeat("1:", 20))
	add(endpoint+"address", "Required value", absent)
	add(endpoint+"ready", "Required value", absent)
	add(endpoint+"serving", "Required value", absent)
	add(endpoint+"hostname", "should match", dotless...)
	add(endpoint+"hostname", long, strings.Repeat("a", 64))
	add(endpoint+"zone", long, strings.Repeat("a", 64))
	refused := func(what string, obj object, field, message string) {
		t.Helper()
		_, errs := s.create(obj)
		for _, err := range errs {
			if subscript.ReplaceAllString(err.Field, "") == field && strings.Contains(err.Error(), message) {
				return
			}
		}
		t.Errorf("%s: want an error at %s that says %q, have %v", what, field, message, errs.ToAggregate())
	}
	for _, test := range all {
		service := exported("shop", 1)
		put(service, splitPath(test.field), test.value)
		refused(fmt.Sprintf("%s=%.60q", test.field, fmt.Sprint(test.value)), peerServices(service), services+"."+test.field, test.message)
	}

	number := func(n int) (all []any) {
		for i := range n {
			all = append(all, exported(fmt.Sprint("s", i), 0))
		}
		return all
	}
	const root, most = "<nil>", "all services together have at most 2500 endpoints"
	subsets := exported("shop", 1250)
	subsets["subsets"] = append(subsets["subsets"].([]any), exported("shop", 1251)["subsets"].([]any)...)
	refused("129 services", peerServices(number(129)...), services, "Too many")
	refused("a service twice", peerServices(exported("shop", 1), exported("shop", 1)), services, "Duplicate value")
	refused("20,001 endpoints", peerServices(exported("shop", 20_001)), services+".subsets.endpoints", "Too many")
	refused("2,501 endpoints in a subset", peerServices(exported("shop", 2501)), services+".subsets.endpoints", "Too many")
	refused("2,501 endpoints in two subsets", peerServices(subsets), root, most)
	refused("2,501 endpoints in two services", peerServices(exported("a", 2500), exported("b", 1)), root, most)
	refused("no spec", object{"apiVersion": "isthmus.net/v1alpha1", "kind": "PeerServices", "metadata": object{"name": "services-0"}}, "spec", "Required value")
}

// put sets a value in an object. Each list on the path must have one item.
func put(m object, path []string, value any) {
	for _, key := range path[:len(path)-1] {
		switch child := m[key].(type) {
		case object:
			m = child
		case []any:
			m = child[0].(object)
		default:
			next := object{}
			m[key], m = next, next
		}
	}
	if last := path[len(path)-1]; value == absent {
		delete(m, last)
	} else {
		m[last] = value
	}
}

// The largest PeerServices that the schema allows is accepted: the rule about endpoints stays
// within its cost budget, and the status has room for the importer's answer.
func TestLargestPeerServicesAreAccepted(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes it slow; CI runs it without")
	}
	s := serverOfPeerServices(t)
	var all, refused []any
	for i := range 128 {
		service := exported(fmt.Sprintf("s%062d", i), 2)
		subset := service["subsets"].([]any)[0]
		service["subsets"] = slices.Repeat([]any{subset}, 8)
		labels := object{}
		for k := range 16 {
			labels[fmt.Sprintf("%0253d/%063d", k, k)] = strings.Repeat("v", 512)
		}
		service["labels"], service["annotations"] = labels, labels
		var ports []any
		for p := range 64 {
			ports = append(ports, object{"name": fmt.Sprintf("p%062d", p), "protocol": "SCTP", "port": int64(65535 - p), "appProtocol": strings.Repeat("a", 317)})
		}
		service["ports"] = ports
		all = append(all, service)
		refused = append(refused, object{"namespace": strings.Repeat("n", 63), "name": service["name"], "reason": strings.Repeat("r", 256), "message": strings.Repeat("m", 512)})
	}
	// The services have 2,048 endpoints so far. The first one gets the rest.
	first := all[0].(object)["subsets"].([]any)
	all[0].(object)["subsets"] = append(slices.Clone(first[:7]), exported("", 2500-2046)["subsets"].([]any)[0])
	stored, errs := s.create(peerServices(all...))
	if len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	if _, errs := s.updateStatus(withChanges(stored, set(refused, "status", "refused"), set(int64(1), "status", "observedGeneration")), stored); len(errs) > 0 {
		t.Error(errs.ToAggregate())
	}
	one := exported("shop", 2500)
	if _, errs := s.create(peerServices(one)); len(errs) > 0 {
		t.Errorf("2,500 endpoints: %v", errs.ToAggregate())
	}
	if _, errs := s.create(peerServices()); len(errs) > 0 {
		t.Errorf("no services: %v", errs.ToAggregate())
	}
	for _, address := range []string{"10.244.0.1", "0.0.0.0", "fd00::1", "::1", "fd00:1111:2222:3333:4444:5555:6666:7777"} {
		service := exported("shop", 1)
		put(service, splitPath("subsets.endpoints.address"), address)
		if _, errs := s.create(peerServices(service)); len(errs) > 0 {
			t.Errorf("%s: %v", address, errs.ToAggregate())
		}
	}
}
