package crd

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// A refusal is an object that must be refused, made from a golden document by changes. The error
// must name the field, without subscripts, and contain the message.
type refusal struct {
	golden         string
	changes        []change
	field, message string
}

const (
	mustBeCIDR      = "must be a network in CIDR notation"
	mustBeNoneCIDR  = "must be None or a network in CIDR notation"
	mustBeCanonical = "must be in canonical form, with all host bits zero"
	mustBeSane      = "must have a prefix length from 8 to 30 (IPv4) or from 16 to 126 (IPv6)"
	mustBeUnicast   = "must be a unicast network"
	mustBeHost      = "must be an IP address or a DNS name"
	mustBeReachable = "must be reachable from another cluster"
	mustBeIP        = "must be an IP address"
	mustBeKey       = "publicKey must be a WireGuard public key"
	mustBeTunnels   = "tunnels must be 1 to 15 entries PORT:PUBLICKEY"
	mustBePort      = "port must be a UDP port"
	mustBeLabel     = "must be usable as a label value"
	mustBeName      = "must be usable at the beginning of an object name"
	mustBeStored    = "must be empty or a network in canonical CIDR notation"
	mustBeStoredNAT = "must be empty, None or a network in canonical CIDR notation"
	mustBeListed    = "must be a network in canonical CIDR notation"
	mustBeMapped    = "must be addresses in externalCIDR"
	mustBeEndpoint  = "keys must be unicast IP addresses"
)

// refusals returns hostile and mistyped objects.
func refusals() []refusal {
	var all []refusal
	add := func(golden, path string, value any, message string) {
		all = append(all, refusal{golden, []change{set(value, splitPath(path)...)}, path, message})
	}
	const nc, te, nm, ipam = "networkconfig-local", "tunnelendpoint-connected", "natmapping", "ipamstorage"

	// Invalid networks, in each field with a network.
	notCIDR := []string{
		"", " ", "10.244.0.0", "10.244.0.0/", "/16", "10.244.0.0/33", "10.244.0.0/-1", "10.244.0.0/016", "10.244/16", "010.244.0.0/16",
		" 10.244.0.0/16", "10.244.0.0/16 ", "10.244.0.0/16\n", "10.244.0.0/16,10.0.0.0/8", "0x0a.244.0.0/16", "fd00::/129", "fe80::%eth0/64",
		"::ffff:10.244.0.0/112", "none", "any", "example.com/16", "10.244.0.0/16/16", "１０.244.0.0/16",
	}
	networks := func(golden, path, form string) {
		for _, v := range notCIDR {
			add(golden, path, v, form)
		}
		for _, v := range []string{"10.244.0.1/16", "10.244.128.0/16", "fd00::1/64", "FD00:10::/48", "fd00:0:0::/48"} {
			add(golden, path, v, mustBeCanonical)
		}
		for _, v := range []string{"0.0.0.0/0", "128.0.0.0/1", "16.0.0.0/7", "10.0.0.0/31", "10.0.0.1/32", "::/0", "2000::/3", "fc00::/7", "fd00::/127", "fd00::1/128"} {
			add(golden, path, v, mustBeSane)
		}
		for _, v := range []string{
			"0.0.0.0/0", "0.0.0.0/8", "0.1.0.0/16", "127.0.0.0/8", "127.5.0.0/16", "64.0.0.0/2", "169.254.0.0/16", "169.254.169.0/24", "169.0.0.0/8", "128.0.0.0/1",
			"224.0.0.0/8", "239.1.0.0/16", "224.0.0.0/4", "192.0.0.0/2", "255.255.0.0/16", "255.255.255.252/30", "240.0.0.0/4",
			"::/0", "::/64", "::/126", "64:ff9b::/96", "fe80::/64", "febf::/16", "ff00::/8", "ff02::/16", "8000::/1",
		} {
			add(golden, path, v, mustBeUnicast)
		}
		add(golden, path, strings.Repeat("1", 44), "Too long")
		add(golden, path, int64(10), "must be of type string")
	}
	for _, f := range []string{"spec.podCIDR", "spec.externalCIDR"} {
		networks(nc, f, mustBeCIDR)
		networks(nm, f, mustBeCIDR)
		add(nc, f, "None", mustBeCIDR)
	}
	for _, f := range []string{"spec.localPodCIDR", "spec.localExternalCIDR", "spec.remotePodCIDR", "spec.remoteExternalCIDR"} {
		networks(te, f, mustBeCIDR)
		add(te, f, "None", mustBeCIDR)
	}
	for _, f := range []string{"spec.localNATPodCIDR", "spec.localNATExternalCIDR", "spec.remoteNATPodCIDR", "spec.remoteNATExternalCIDR"} {
		networks(te, f, mustBeNoneCIDR)
		for _, v := range []string{"10.128.0.0/17", "10.246.0.0/15", "fd00::/16"} {
			add(te, f, v, "must have the address family and prefix length of "+strings.Replace(strings.TrimPrefix(f, "spec."), "NAT", "", 1))
		}
	}
	for _, f := range []string{"status.podCIDRNAT", "status.externalCIDRNAT"} {
		networks(nc, f, mustBeNoneCIDR)
		for _, v := range []string{"10.128.0.0/17", "10.246.0.0/15", "fd00::/16"} {
			add(nc, f, v, "must have the address family and prefix length of spec."+strings.TrimSuffix(strings.TrimPrefix(f, "status."), "NAT"))
		}
		all = append(all, refusal{nc, []change{set(absent, splitPath(f)...)}, "status", "must be set if processed is true"})
	}
	for _, c := range []struct{ golden, pod, external, field string }{
		{nc, "spec.podCIDR", "spec.externalCIDR", "spec.externalCIDR"},
		{te, "spec.localPodCIDR", "spec.localExternalCIDR", "spec.localExternalCIDR"},
		{te, "spec.remotePodCIDR", "spec.remoteExternalCIDR", "spec.remoteExternalCIDR"},
	} {
		for _, v := range [][2]string{{"10.244.0.0/16", "10.244.0.0/16"}, {"10.244.0.0/16", "10.244.7.0/24"}, {"10.244.7.0/24", "10.244.0.0/16"}, {"fd00::/48", "fd00::/64"}} {
			all = append(all, refusal{c.golden, []change{set(v[0], splitPath(c.pod)...), set(v[1], splitPath(c.external)...)}, c.field, "must not overlap"})
		}
	}

	// Invalid endpoints, backends and backend configurations.
	for _, golden := range []string{nc, te} {
		for _, v := range []string{
			"10.0.0.256", "10.0.0", "1.2.3.4.5", "12345", "0x7f000001", "0x7f.1", "01.2.3.4", "10.0.0.1:5871", "[fd00::1]", "[fd00::1]:5871", "fe80::1%eth0", "::ffff:10.0.0.1",
			"http://gw.example.com", "gw.example.com:5871", "gw.example.com/", "gw..example.com", ".example.com", "-gw.example.com", "gw-.example.com", ".",
			"gw example.com", "gw.example.com\n", "gw.example.com\x00", "$(id).example.com", "bücher.example", "1.2.3.4\n", " 1.2.3.4", strings.Repeat("a", 64) + ".example.com",
		} {
			add(golden, "spec.endpointIP", v, mustBeHost)
		}
		for _, v := range []string{
			"0.0.0.0", "0.1.2.3", "127.0.0.1", "127.9.9.9", "169.254.169.254", "224.0.0.1", "239.1.1.1", "255.255.255.255", "::", "::1", "fe80::1", "ff02::1",
			"localhost", "LocalHost", "localhost.", "gw.localhost",
		} {
			add(golden, "spec.endpointIP", v, mustBeReachable)
		}
		add(golden, "spec.endpointIP", "", "at least 1 chars")
		add(golden, "spec.endpointIP", strings.Repeat("a.", 127), "Too long")
		for _, v := range []string{"", "Wireguard", "wireguard ", "ipsec", "gre"} {
			add(golden, "spec.backendType", v, "Unsupported value")
		}
		for _, v := range []string{
			"", "key", strings.Repeat("A", 44), "rMWb8vnY6xUeVr2NvL9yQ3iJk0aZs4tGd7HpOqBcDf=", "rMWb8vnY6xUeVr2NvL9yQ3iJk0aZs4tGd7HpOqBcDfE", "rMWb8vnY6xUeVr2NvL9yQ3iJk0aZs4tGd7HpOqBcDfEg=",
			"rMWb8vnY6xUeVr2NvL9yQ3iJk0aZs4tGd7HpOqBcDfB=", "rMWb8vnY6xUeVr2NvL9yQ3iJk0aZs4tGd7HpOqBcDfE=\n", "rMWb8vnY6xUeVr2NvL9yQ3iJk0aZs4tGd7HpOqBc-_E=",
			"aa16f9bcbf6d8c43a1e95af636f2fd720de22640299ace2d9d1ee9a3aa816c71",
		} {
			all = append(all, refusal{golden, []change{set(v, "spec", "backend_config", "publicKey")}, "spec.backend_config", mustBeKey})
		}
		all = append(all, refusal{golden, []change{set(strings.Repeat("A", 43)+"=", "spec", "backend_config", "publicKey")}, "spec.backend_config", "publicKey must not be zero"})
		for _, v := range []string{"", "0", "65536", "99999", "100000", "-1", "+5871", "05871", "5871 ", " 5871", "5871\n", "0x16ef", "5e3", "wireguard", "5871/UDP", "５８７１"} {
			all = append(all, refusal{golden, []change{set(v, "spec", "backend_config", "port")}, "spec.backend_config", mustBePort})
		}
		const key = aKey
		for _, v := range []string{
			"", ",", "5872:" + key + ",", "," + "5872:" + key, "5872:" + key + ", 5873:" + key, "5872:" + key + ";5873:" + key, "5872:" + key + "\n", key, "5872", "5872:",
			"0:" + key, "65536:" + key, "70000:" + key, "100000:" + key, "05872:" + key, "-1:" + key, "+5872:" + key, "192.0.2.1:5872:" + key, "5872:" + key[:43], "5872: " + key,
			"5872:" + key[:42] + "B=", "5872:" + key + ",5873:" + key[:40], strings.Repeat("5872:"+key+",", 15) + "5873:" + key, strings.Repeat("x", 1024),
		} {
			all = append(all, refusal{golden, []change{set(v, "spec", "backend_config", "tunnels")}, "spec.backend_config", mustBeTunnels})
		}
		for _, v := range []string{"5872:" + strings.Repeat("A", 43) + "=", "5872:" + key + ",5873:" + strings.Repeat("A", 43) + "="} {
			all = append(all, refusal{golden, []change{set(v, "spec", "backend_config", "tunnels")}, "spec.backend_config", "no public key in tunnels may be zero"})
		}
		all = append(all,
			refusal{golden, []change{set(int64(5871), "spec", "backend_config", "port")}, "spec.backend_config.port", "must be of type string"},
			refusal{golden, []change{set(absent, "spec", "backend_config", "port")}, "spec.backend_config", "must have the keys publicKey and port"},
			refusal{golden, []change{set(absent, "spec", "backend_config", "publicKey")}, "spec.backend_config", "must have the keys publicKey and port"},
			refusal{golden, []change{set(object{}, "spec", "backend_config")}, "spec.backend_config", "must have the keys publicKey and port"},
			refusal{golden, []change{set(strings.Repeat("x", 1025), "spec", "backend_config", "x")}, "spec.backend_config.x", "Too long"},
			refusal{golden, []change{set(numbered(17), "spec", "backend_config")}, "spec.backend_config", "Too many"},
			refusal{golden, []change{set("", "spec", "backend_config", strings.Repeat("k", 64))}, "spec.backend_config", "keys must have 1 to 63 characters"},
			refusal{golden, []change{set("", "spec", "backend_config", "")}, "spec.backend_config", "keys must have 1 to 63 characters"},
		)
		cluster := map[string]string{nc: "spec.cluster", te: "spec.clusterIdentity"}[golden]
		for _, v := range []string{" ", "a b", "a/b", "-a", "a-", "_a", "a.", "a\nb", `a"b`, "ä", "{{a}}"} {
			add(golden, cluster+".clusterID", v, mustBeLabel)
		}
		add(golden, cluster+".clusterID", "", "at least 1 chars")
		add(golden, cluster+".clusterID", strings.Repeat("a", 64), "Too long")
		for _, v := range []string{" ", "Bravo", "my cluster", "-a", "a.", "a_b", `a"b`, "a\nb", "bücher"} {
			add(golden, cluster+".clusterName", v, mustBeName)
		}
		add(golden, cluster+".clusterName", "", "at least 1 chars")
		add(golden, cluster+".clusterName", strings.Repeat("a", 247), "Too long")
	}
	add(nc, "status.processed", "true", "must be of type boolean")
	add(te, "status.gatewayIP", "node-1", mustBeIP)
	add(te, "status.gatewayIP", "172.30.0.1/24", mustBeIP)
	add(te, "status.vethIP", "169.254.100", mustBeIP)
	add(te, "status.vethIFaceIndex", int64(-1), "greater than or equal to 0")
	add(te, "status.vethIFaceIndex", int64(1<<31), "less than or equal to 2147483647")
	add(te, "status.tunnelIFaceIndex", int64(-1), "greater than or equal to 0")
	add(te, "status.vethIFaceName", "sixteen-letters-", "Too long")
	add(te, "status.tunnelIFaceName", "sixteen-letters-", "Too long")
	add(te, "status.connection.status", "connected", "Unsupported value")
	add(te, "status.connection.status", "", "Unsupported value")
	add(te, "status.connection.latency.timestamp", "yesterday", "must be of type date-time")
	add(te, "status.connection.statusMessage", strings.Repeat("x", 32769), "Too long")
	add(te, "status.connection.peerConfiguration", numbered(17), "Too many")
	add(te, "status.connection.peerConfiguration", object{strings.Repeat("k", 64): ""}, "keys must have 1 to 63 characters")
	for _, v := range []string{"fast", "7", "7 ms", "7.5ms", "7ns", "ms", "n/a", "7ms\n", "1h7ms", "+7ms"} {
		add(te, "status.connection.latency.value", v, "must be N/A or a whole number of ms or μs")
	}
	add(te, "status.connection.latency.timestamp", "2026-01-01t00:00:00z", "must be a time")
	for _, golden := range []string{nc, te, nm} {
		add(golden, "status.conditions", []any{condition("Ready"), condition("Ready")}, "Duplicate value")
		for _, at := range []string{"2026-01-01t00:00:00z", "2026-01-01T00:00:00+99:99", "2026-01-01T00:00:00.5z"} {
			c := condition("Ready")
			c["lastTransitionTime"] = at
			add(golden, "status.conditions", []any{c}, "must be a time")
		}
		all = append(all, refusal{golden, []change{set([]any{condition("not a type")}, "status", "conditions")}, "status.conditions.type", "should match"})
		all = append(all, refusal{golden, []change{set([]any{object{"type": "Ready"}}, "status", "conditions")}, "status.conditions.reason", "Required value"})
		var many []any
		for i := range 17 {
			many = append(many, condition(fmt.Sprintf("Type%d", i)))
		}
		add(golden, "status.conditions", many, "Too many")
	}

	// Invalid mapped endpoints.
	for _, v := range []string{"", "10.247.0", "10.247.0.300", "10.247.0.1/32", "fe80::1%eth0", "host", "010.247.0.1"} {
		all = append(all, refusal{nm, []change{set(v, "spec", "clusterMappings", "192.0.2.1")}, "spec.clusterMappings", mustBeIP})
	}
	for _, v := range []string{"10.244.0.1", "10.248.0.0", "127.0.0.1", "fd00::1"} {
		all = append(all, refusal{nm, []change{set(v, "spec", "clusterMappings", "192.0.2.1")}, "spec.clusterMappings", mustBeMapped})
	}
	for _, k := range []string{
		"", "host", "192.0.2.1/32", "192.0.2", "192.0.2.1 ", "127.0.0.1", "0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.0.2", "224.0.0.251", "255.255.255.255",
		"::1", "fe80::1", "ff02::1", "::ffff:192.0.2.1", strings.Repeat("1", 5000),
	} {
		all = append(all, refusal{nm, []change{set("10.247.0.9", "spec", "clusterMappings", k)}, "spec.clusterMappings", mustBeEndpoint})
	}
	for _, v := range []string{" ", "a b", "a/b"} {
		add(nm, "spec.clusterID", v, mustBeLabel)
	}
	add(nm, "spec.clusterID", "", "at least 1 chars")
	add(nm, "spec.clusterMappings", numbered(16385), "Too many")
	add(nm, "spec.clusterMappings", nil, "Required value")

	// Invalid IPAM state.
	for _, f := range []string{"spec.podCIDR", "spec.externalCIDR", "spec.serviceCIDR"} {
		for _, v := range []string{"10.244.0.1/16", "10.244.0.0", "None", "x"} {
			add(ipam, f, v, mustBeStored)
		}
	}
	for _, v := range []string{"", "10.0.0.1/8", "10.0.0.0", "None"} {
		add(ipam, "spec.pools", []any{"10.0.0.0/8", v}, mustBeListed)
		add(ipam, "spec.reservedSubnets", []any{v}, mustBeListed)
	}
	subnets := func(f, v string) object {
		m := object{"localNATPodCIDR": "None", "remotePodCIDR": "10.1.0.0/16", "localNATExternalCIDR": "None", "remoteExternalCIDR": "10.2.0.0/16"}
		m[f] = v
		return object{"c": m}
	}
	for _, v := range []string{"none", "10.0.0.1/8", "10.0.0.0"} {
		for _, f := range []string{"localNATPodCIDR", "localNATExternalCIDR"} {
			all = append(all, refusal{ipam, []change{set(subnets(f, v), "spec", "clusterSubnets")}, "spec.clusterSubnets." + f, mustBeStoredNAT})
		}
		for _, f := range []string{"remotePodCIDR", "remoteExternalCIDR"} {
			all = append(all, refusal{ipam, []change{set(subnets(f, v), "spec", "clusterSubnets")}, "spec.clusterSubnets." + f, mustBeStored})
		}
	}
	for _, k := range []string{"", strings.Repeat("c", 64)} {
		all = append(all,
			refusal{ipam, []change{set(subnets("remotePodCIDR", "")["c"], "spec", "clusterSubnets", k)}, "spec.clusterSubnets", "keys must be clusterIDs"},
			refusal{ipam, []change{set(object{}, "spec", "natMappingsConfigured", k)}, "spec.natMappingsConfigured", "keys must be clusterIDs"})
	}
	all = append(all,
		refusal{ipam, []change{set("QUJD", "spec", "prefixes", strings.Repeat("1", 65))}, "spec.prefixes", "keys must be prefixes"},
		refusal{ipam, []change{set("not base64", "spec", "prefixes", "p")}, "spec.prefixes.p", "must be of type byte"})
	mapping := func(original, natted string) object {
		return object{"ExternalCIDROriginalIP": original, "clusterMappings": object{"c": object{"ExternalCIDRNattedIP": natted}}}
	}
	for _, k := range []string{"host", "", "10.0.0.0/8"} {
		all = append(all, refusal{ipam, []change{set(mapping("10.0.0.1", "10.0.0.1"), "spec", "endpointMappings", k)}, "spec.endpointMappings", "keys must be IP addresses"})
	}
	for _, v := range []string{"", "host", "10.0.0.256", "10.0.0.01", "10.0.0.1\n", "10.0.0.1/8", "cafe", "::g"} {
		all = append(all,
			refusal{ipam, []change{set(mapping(v, "10.0.0.1"), "spec", "endpointMappings", "e")}, "spec.endpointMappings.e.ExternalCIDROriginalIP", "should match"},
			refusal{ipam, []change{set(mapping("10.0.0.1", v), "spec", "endpointMappings", "e")}, "spec.endpointMappings.e.clusterMappings.c.ExternalCIDRNattedIP", "should match"})
	}

	// Fields that Liqo requires, and the spec itself.
	for golden, fields := range map[string]string{
		nc:   "podCIDR externalCIDR endpointIP backendType backend_config cluster cluster.clusterID cluster.clusterName",
		te:   "localPodCIDR localExternalCIDR remotePodCIDR remoteExternalCIDR endpointIP backendType backend_config clusterIdentity clusterIdentity.clusterID clusterIdentity.clusterName",
		nm:   "clusterID podCIDR externalCIDR clusterMappings",
		ipam: "prefixes pools reservedSubnets clusterSubnets externalCIDR endpointMappings podCIDR serviceCIDR natMappingsConfigured",
	} {
		add(golden, "spec", absent, "Required value")
		for f := range strings.FieldsSeq(fields) {
			add(golden, "spec."+f, absent, "Required value")
		}
	}
	return all
}

// numbered returns a map of n strings.
func numbered(n int) object {
	m := object{}
	for i := range n {
		m[fmt.Sprint(i)] = ""
	}
	return m
}

// offer writes the changed document. If f is a field of the status, offer first creates the golden
// document and then updates its status.
func offer(s *server, golden, changed object, f string) field.ErrorList {
	if !strings.HasPrefix(f, "status") {
		_, errs := s.create(changed)
		return errs
	}
	stored, errs := s.create(golden)
	if len(errs) > 0 {
		return errs
	}
	_, errs = s.updateStatus(changed, stored)
	return errs
}

// The API server must refuse each object for the expected reason. Each rule of the CRDs must refuse
// at least one object, at the rule's own field. A rule that never refuses anything might not work
// at all.
func TestEachRuleRefusesSomeHostileObject(t *testing.T) {
	all, docs := servers(t), goldens(t)
	var todo []rule
	for _, s := range all {
		todo = append(todo, rules(s)...)
	}
	if len(todo) < 60 {
		t.Fatalf("only %d rules in the CRDs", len(todo))
	}
	hit := map[rule]bool{}
	for _, r := range refusals() {
		golden := docs[r.golden]
		s := all[kindOf(golden)]
		changed := withChanges(golden, r.changes...)
		errs := offer(s, golden, changed, r.field)
		found := false
		for _, err := range errs {
			where := subscript.ReplaceAllString(err.Field, "")
			found = found || where == r.field && strings.Contains(err.Error(), r.message)
			if strings.Contains(err.Error(), "no such overload") || strings.Contains(err.Error(), "rule evaluation") || strings.Contains(err.Error(), "budget") {
				t.Errorf("%s, %s: a rule broke: %v", r.golden, describe(r.changes), err)
			}
			detail := err.Detail
			if _, rule, failed := strings.Cut(detail, " evaluating rule: "); failed { // the rule failed to parse a time
				detail = rule
			}
			hit[rule{kindOf(golden), where, detail}] = true
		}
		if !found {
			t.Errorf("%s, %s: want an error at %s that says %q, have %v", r.golden, describe(r.changes), r.field, r.message, errs.ToAggregate())
		}
	}
	for _, r := range todo {
		if !hit[r] {
			t.Errorf("no refused object hits the rule of %s at %s: %s", r.kind, r.path, r.message)
		}
	}
	t.Logf("%d refused objects, %d rules", len(refusals()), len(todo))
}

func describe(changes []change) string {
	var b strings.Builder
	for _, c := range changes {
		v := fmt.Sprintf("%q", fmt.Sprint(c.value))
		if len(v) > 60 {
			v = v[:60] + "..."
		}
		fmt.Fprintf(&b, "%s=%s ", strings.Join(c.path, "."), v)
	}
	return strings.TrimSpace(b.String())
}

// A status is only written through the status subresource.
func TestStatusIsIgnoredOutsideItsSubresource(t *testing.T) {
	s, nc := servers(t)["NetworkConfig"], goldens(t)["networkconfig-local"]
	stored, errs := s.create(nc)
	if len(errs) > 0 || stored["status"] != nil {
		t.Fatalf("created with status %v (%v)", stored["status"], errs.ToAggregate())
	}
	updated, errs := s.update(runtime.DeepCopyJSON(nc), stored)
	if len(errs) > 0 || updated["status"] != nil {
		t.Errorf("updated with status %v (%v)", updated["status"], errs.ToAggregate())
	}
}
