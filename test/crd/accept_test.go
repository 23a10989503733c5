package crd

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"
)

// table returns the names and columns of a kind, as `kubectl api-resources` and `kubectl get` use
// them.
func table(s *server) string {
	var b strings.Builder
	n := s.crd.Spec.Names
	fmt.Fprintln(&b, n.Plural, n.Singular, n.ListKind, s.crd.Spec.Scope, n.Categories, n.ShortNames, fmt.Sprintf("status=%v", s.subStatus))
	for _, c := range s.crd.Spec.AdditionalPrinterColumns {
		fmt.Fprintf(&b, "%s|%s|%d|%s\n", c.Name, c.Type, c.Priority, c.JSONPath)
	}
	return b.String()
}

// kindOf returns the kind of an object.
func kindOf(obj object) string { return obj["kind"].(string) }

// The API server must store objects of Liqo v0.9.4 unchanged, with all their fields.
func TestGoldenDocumentsAreStoredUnchanged(t *testing.T) {
	all := servers(t)
	for name, obj := range goldens(t) {
		s := all[kindOf(obj)]
		if _, dropped := s.decode(obj); len(dropped) > 0 {
			t.Errorf("%s: dropped %v", name, dropped)
		}
		stored, errs := s.put(obj)
		if len(errs) > 0 {
			t.Errorf("%s: %v", name, errs.ToAggregate())
		}
		if !reflect.DeepEqual(stored, obj) {
			out, _ := yaml.Marshal(stored)
			t.Errorf("%s: stored as\n%s", name, out)
		}
		// A later write of the same object passes as well.
		if _, errs := s.update(obj, stored); len(errs) > 0 {
			t.Errorf("%s, updated: %v", name, errs.ToAggregate())
		}
	}
}

const aKey = "rMWb8vnY6xUeVr2NvL9yQ3iJk0aZs4tGd7HpOqBcDfE="

// tunnels returns the text of n further tunnels.
func tunnels(n int) string {
	entries := make([]string, n)
	for i := range entries {
		entries[i] = fmt.Sprintf("%d:%s", 65521+i, aKey)
	}
	return strings.Join(entries, ",")
}

// Liqo also writes these objects, by itself or because of its users' configuration.
func TestLiqoVariantsAreAccepted(t *testing.T) {
	all, docs := servers(t), goldens(t)
	type variant struct {
		name    string
		golden  string
		changes []change
	}
	variants := []variant{
		{"created by Liqo's client", "networkconfig-unanswered", []change{set(nil, "metadata", "creationTimestamp"), set(object{"processed": false}, "status")}},
		{"empty status", "networkconfig-local", []change{set(object{}, "status")}},
		{"answered without remapping", "networkconfig-local", []change{set(object{"processed": true, "podCIDRNAT": "None", "externalCIDRNAT": "None"}, "status")}},
		{"one network remapped", "networkconfig-local", []change{set("None", "status", "podCIDRNAT")}},
		{"our conditions", "networkconfig-local", []change{set([]any{condition("Ready")}, "status", "conditions")}},
		{"a further parameter of the backend", "networkconfig-local", []change{set("x", "spec", "backend_config", "keepalive")}},
		{"a further tunnel", "networkconfig-local", []change{set(tunnels(1), "spec", "backend_config", "tunnels")}},
		{"all tunnels", "networkconfig-local", []change{set(tunnels(15), "spec", "backend_config", "tunnels")}},
		{"tunnels at every length of a port", "tunnelendpoint-connected", []change{set(
			"1:"+aKey+",23:"+aKey+",456:"+aKey+",7890:"+aKey+",59999:"+aKey+",64999:"+aKey+",65499:"+aKey+",65529:"+aKey+",65535:"+aKey, "spec", "backend_config", "tunnels")}},
		{"identity is no UUID", "networkconfig-local", []change{set("Milan_1.eu", "spec", "cluster", "clusterID")}},
		{"identity of one character", "networkconfig-local", []change{set("7", "spec", "cluster", "clusterID")}},
		{"longest identity", "networkconfig-local", []change{set(strings.Repeat("a", 63), "spec", "cluster", "clusterID")}},
		{"name with dots", "networkconfig-local", []change{set("kind.eu-west-1", "spec", "cluster", "clusterName")}},
		{"name that ends in a dash", "networkconfig-local", []change{set("k8s-", "spec", "cluster", "clusterName")}},
		{"lowest port", "networkconfig-local", []change{set("1", "spec", "backend_config", "port")}},
		{"highest port", "networkconfig-local", []change{set("65535", "spec", "backend_config", "port")}},

		{"NAT fields left out", "tunnelendpoint-connected", []change{
			set(absent, "spec", "localNATPodCIDR"), set(absent, "spec", "localNATExternalCIDR"),
			set(absent, "spec", "remoteNATPodCIDR"), set(absent, "spec", "remoteNATExternalCIDR")}},
		{"nothing remapped", "tunnelendpoint-connected", []change{
			set("None", "spec", "localNATPodCIDR"), set("None", "spec", "localNATExternalCIDR"),
			set("None", "spec", "remoteNATPodCIDR"), set("None", "spec", "remoteNATExternalCIDR")}},
		{"remapped PodCIDR of the peer is our ExternalCIDR there", "tunnelendpoint-connected", []change{
			set("10.245.0.0/16", "spec", "remoteNATPodCIDR"), set("10.245.0.0/16", "spec", "localNATExternalCIDR")}},
		{"created by Liqo's client", "tunnelendpoint-connected", []change{
			set(object{"connection": object{"latency": object{"timestamp": nil}}}, "status")}},
		{"measurement never made", "tunnelendpoint-error", []change{set(nil, "status", "connection", "latency", "timestamp")}},
		{"empty status", "tunnelendpoint-error", []change{set(object{}, "status")}},
		{"gateway known, connection not", "tunnelendpoint-error", []change{set(object{"gatewayIP": "172.30.0.2", "vethIP": "169.254.100.1"}, "status")}},
		{"tunnel device of other versions", "tunnelendpoint-error", []change{
			set("liqo.tunnel", "status", "tunnelIFaceName"), set(int64(4), "status", "tunnelIFaceIndex")}},
		{"long error text", "tunnelendpoint-error", []change{set(strings.Repeat("no route to host; ", 500), "status", "connection", "statusMessage")}},
		{"our conditions", "tunnelendpoint-error", []change{set([]any{condition("Ready")}, "status", "conditions")}},

		{"no mappings yet", "natmapping", []change{set(object{}, "spec", "clusterMappings")}},
		{"empty status", "natmapping", []change{set(object{}, "status")}},
		{"our conditions", "natmapping", []change{set(object{"conditions": []any{condition("Ready")}}, "status")}},
		{"public endpoint", "natmapping", []change{set("10.247.3.4", "spec", "clusterMappings", "203.0.113.7")}},
		{"pod of a third cluster", "natmapping", []change{set("10.247.3.5", "spec", "clusterMappings", "240.1.2.3")}},
		{"IPv6", "natmapping", []change{
			set("fd00:10:244::/64", "spec", "podCIDR"), set("fd00:10:247::/64", "spec", "externalCIDR"),
			set(object{"fd00:1::1": "fd00:10:247::1"}, "spec", "clusterMappings")}},

		{"reserved networks of any kind", "ipamstorage", []change{set([]any{"169.254.0.0/16", "0.0.0.0/8", "203.0.113.7/32", "::/0"}, "spec", "reservedSubnets")}},
		{"endpoint that no cluster uses", "ipamstorage", []change{
			set(object{"ExternalCIDROriginalIP": "10.245.0.9", "clusterMappings": object{}}, "spec", "endpointMappings", "192.0.2.1")}},
		{"large blob", "ipamstorage", []change{set(strings.Repeat("QUJD", 250_000), "spec", "prefixes", "10.245.0.0/16")}},
	}
	for _, host := range []string{
		"203.0.113.9", "10.0.0.1", "100.64.1.1", "240.0.0.9", "2001:db8::1", "fd00::1", "2001:DB8::1",
		"gw.example.com", "gw.example.com.", "GW.Example.COM", "a_b.example.com", "_wg._udp.example.com", "gateway", "5g-gateway", "xn--bcher-kva.example",
		"x.0xfg", strings.Repeat(strings.Repeat("a", 62)+".", 4),
	} {
		variants = append(variants, variant{"endpoint " + host, "networkconfig-local", []change{set(host, "spec", "endpointIP")}},
			variant{"endpoint " + host, "tunnelendpoint-connected", []change{set(host, "spec", "endpointIP")}})
	}
	for _, pair := range [][2]string{
		{"10.0.0.0/8", "11.0.0.0/8"}, {"100.64.0.0/10", "100.128.0.0/10"}, {"172.16.0.0/12", "172.32.0.0/12"}, {"240.128.0.0/12", "240.144.0.0/12"},
		{"192.168.0.0/30", "192.168.255.252/30"}, {"198.18.0.0/15", "198.20.0.0/15"}, {"169.253.0.0/16", "169.255.0.0/16"}, {"255.254.0.0/16", "223.255.0.0/16"},
		{"fd00:10:244::/56", "fd00:10:245::/56"}, {"2001:db8::/32", "2001:db9::/32"}, {"fd00::/126", "fd00::4/126"},
	} {
		variants = append(variants, variant{"networks " + pair[0], "networkconfig-local", []change{
			set(pair[0], "spec", "podCIDR"), set(pair[1], "spec", "externalCIDR"), set(pair[1], "status", "podCIDRNAT"), set(pair[0], "status", "externalCIDRNAT")}})
	}
	for _, latency := range []string{"N/A", "0ms", "7ms", "1234ms", "690μs", "12µs", "0μs", "-3ms", "-250μs"} {
		variants = append(variants, variant{"latency " + latency, "tunnelendpoint-connected", []change{set(latency, "status", "connection", "latency", "value")}})
	}
	for _, v := range variants {
		obj := withChanges(docs[v.golden], v.changes...)
		if _, errs := all[kindOf(obj)].put(obj); len(errs) > 0 {
			t.Errorf("%s, %s: %v", v.golden, v.name, errs.ToAggregate())
		}
	}
}

// condition returns a condition that the API conventions allow.
func condition(kind string) object {
	return object{"type": kind, "status": "True", "reason": "Tested", "message": "", "lastTransitionTime": "2026-11-21T10:00:00Z"}
}

func TestOmittedFieldsAreStoredWithTheirDefaults(t *testing.T) {
	all, docs := servers(t), goldens(t)
	te := withChanges(docs["tunnelendpoint-connected"],
		set(absent, "spec", "localNATPodCIDR"), set(absent, "spec", "localNATExternalCIDR"),
		set(absent, "spec", "remoteNATPodCIDR"), set(nil, "spec", "remoteNATExternalCIDR"))
	stored, errs := all["TunnelEndpoint"].put(te)
	if len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	for _, f := range []string{"localNATPodCIDR", "localNATExternalCIDR", "remoteNATPodCIDR", "remoteNATExternalCIDR"} {
		if v := get(stored, "spec."+f); v != "None" {
			t.Errorf("spec.%s is %v, want None", f, v)
		}
	}
	stored, errs = all["NetworkConfig"].put(withChanges(docs["networkconfig-local"], set(object{}, "status")))
	if len(errs) > 0 || get(stored, "status.processed") != false {
		t.Errorf("status.processed is %v, want false (%v)", get(stored, "status.processed"), errs.ToAggregate())
	}
	if stored, _ = all["NetworkConfig"].put(docs["networkconfig-unanswered"]); stored["status"] != nil {
		t.Errorf("a status came out of nothing: %v", stored["status"])
	}
}

// Even if a known cluster has changed its networks, Liqo's IPAM gives it the same answer as before.
// Such an answer is invalid, but it must not prevent the cluster from publishing its new networks.
func TestAnswerToPreviousNetworksDoesNotBlockChangesOfTheSpec(t *testing.T) {
	s, nc := servers(t)["NetworkConfig"], goldens(t)["networkconfig-local"]
	stored, errs := s.put(nc)
	if len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	moved := withChanges(stored, set("10.64.0.0/14", "spec", "podCIDR"), set("10.68.0.0/14", "spec", "externalCIDR"))
	updated, errs := s.update(moved, stored)
	if len(errs) > 0 {
		t.Fatalf("the new spec: %v", errs.ToAggregate())
	}
	if _, errs = s.updateStatus(withChanges(updated, set([]any{condition("Ready")}, "status", "conditions")), updated); len(errs) > 0 {
		t.Errorf("a condition beside the old answer: %v", errs.ToAggregate())
	}
	if _, errs = s.updateStatus(withChanges(updated, set("10.66.0.0/16", "status", "podCIDRNAT")), updated); len(errs) == 0 {
		t.Error("a new answer of the old length was accepted")
	}
}

// Unknown fields are dropped everywhere except in metadata, which the API server handles itself.
func TestUnknownFieldsAreDropped(t *testing.T) {
	all := servers(t)
	for name, obj := range goldens(t) {
		s := all[kindOf(obj)]
		dirty, places := runtime.DeepCopyJSON(obj), 0
		salt(dirty, s.structural, &places)
		if places < 2 {
			t.Fatalf("%s: only %d places for an unknown field", name, places)
		}
		stored, errs := s.put(dirty)
		if len(errs) > 0 {
			t.Errorf("%s: %v", name, errs.ToAggregate())
		}
		if !reflect.DeepEqual(stored, obj) {
			out, _ := yaml.Marshal(stored)
			t.Errorf("%s: stored as\n%s", name, out)
		}
	}
}

// salt adds an unknown field to each object in x, except to maps with arbitrary keys.
func salt(x any, s *structuralschema.Structural, places *int) {
	m, ok := x.(object)
	if !ok || s == nil {
		return
	}
	for key, child := range m {
		if p, ok := s.Properties[key]; ok && key != "metadata" {
			salt(child, &p, places)
		} else if s.AdditionalProperties != nil {
			salt(child, s.AdditionalProperties.Structural, places)
		}
	}
	if s.AdditionalProperties == nil {
		m["unknownField"] = object{"a": "b"}
		*places++
	}
}

// CEL rules have a cost budget for each object. The largest object that the schema allows must not
// exceed the budget; otherwise the schema's bounds are wrong.
func TestLargestObjectsStayWithinTheCostBudgetOfTheRules(t *testing.T) {
	if raceEnabled {
		t.Skip("six minutes with the race detector; CI runs it without")
	}
	all, docs := servers(t), goldens(t)
	mappings, endpoints := object{}, object{}
	for i := range 16384 {
		// the longest possible addresses
		e := fmt.Sprintf("fd00:1111:2222:3333:4444:5555:6666:%04x", i)
		mappings[e] = fmt.Sprintf("fd00:1111:2222:4444:4444:5555:6666:%04x", i)
		endpoints[e] = object{"ExternalCIDROriginalIP": mappings[e], "clusterMappings": object{strings.Repeat("c", 63): object{"ExternalCIDRNattedIP": mappings[e]}}}
	}
	nm := withChanges(docs["natmapping"], set("fd00:1111:2222:4444::/64", "spec", "externalCIDR"), set(mappings, "spec", "clusterMappings"))
	if _, errs := all["NatMapping"].put(nm); len(errs) > 0 {
		t.Errorf("NatMapping: %v", errs.ToAggregate())
	}
	subnets, configured, prefixes, list := object{}, object{}, object{}, []any{}
	const long = "fd00:1111:2222:3333:4444:5555:6666:7777/128"
	for i := range 16384 {
		if i < 1024 {
			subnets[fmt.Sprintf("%063d", i)] = object{"localNATPodCIDR": long, "remotePodCIDR": long, "localNATExternalCIDR": long, "remoteExternalCIDR": long}
			list = append(list, long)
		}
		configured[fmt.Sprintf("%063d", i)] = object{}
		prefixes[fmt.Sprintf("%064d", i)] = "QUJD"
	}
	ipam := withChanges(docs["ipamstorage"], set(subnets, "spec", "clusterSubnets"), set(configured, "spec", "natMappingsConfigured"),
		set(prefixes, "spec", "prefixes"), set(endpoints, "spec", "endpointMappings"), set(list, "spec", "pools"), set(list, "spec", "reservedSubnets"))
	if _, errs := all["IpamStorage"].put(ipam); len(errs) > 0 {
		t.Errorf("IpamStorage: %v", errs.ToAggregate())
	}
}
