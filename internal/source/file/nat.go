package file

import (
	stdjson "encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

// NAT has the bounds and timeouts of the NAT engine, as GatewayFile sets them. If a field is absent
// or 0, the engine's default applies; see natengine.Config.
type NAT nat[int, bool, Duration]

// natRaw has the fields of NAT before parsing, so that each invalid field has its own message.
type natRaw nat[stdjson.RawMessage, stdjson.RawMessage, stdjson.RawMessage]

type nat[number, truth, duration any] struct {
	MaxFlows               number   `json:"maxFlows,omitempty"`
	MaxFlowsPerPeer        number   `json:"maxFlowsPerPeer,omitempty"`
	MaxFlowsPerHost        number   `json:"maxFlowsPerHost,omitempty"`
	RandomPorts            truth    `json:"randomPorts,omitempty"`
	MaxFragmentSets        number   `json:"maxFragmentSets,omitempty"`
	MaxFragmentBytes       number   `json:"maxFragmentBytes,omitempty"`
	MaxFragmentsPerSet     number   `json:"maxFragmentsPerSet,omitempty"`
	MaxICMPErrorsPerSecond number   `json:"maxICMPErrorsPerSecond,omitempty"`
	UDPTimeout             duration `json:"udpTimeout,omitempty"`
	TCPEstablishedTimeout  duration `json:"tcpEstablishedTimeout,omitempty"`
	TCPTransitoryTimeout   duration `json:"tcpTransitoryTimeout,omitempty"`
	TCPClosingTimeout      duration `json:"tcpClosingTimeout,omitempty"`
	ICMPTimeout            duration `json:"icmpTimeout,omitempty"`
	GenericTimeout         duration `json:"genericTimeout,omitempty"`
	FragmentTimeout        duration `json:"fragmentTimeout,omitempty"`
}

// Config returns the configuration of the engine. The caller adds the addresses.
func (n NAT) Config() natengine.Config {
	return natengine.Config{
		MaxFlows: n.MaxFlows, MaxFlowsPerPeer: n.MaxFlowsPerPeer, MaxFlowsPerHost: n.MaxFlowsPerHost, RandomPorts: n.RandomPorts,
		MaxFragmentSets: n.MaxFragmentSets, MaxFragmentBytes: n.MaxFragmentBytes, MaxFragmentsPerSet: n.MaxFragmentsPerSet,
		MaxErrorsPerSecond: n.MaxICMPErrorsPerSecond,
		Timeouts: natengine.Timeouts{
			UDP: time.Duration(n.UDPTimeout), TCPEstablished: time.Duration(n.TCPEstablishedTimeout),
			TCPTransitory: time.Duration(n.TCPTransitoryTimeout), TCPClosing: time.Duration(n.TCPClosingTimeout),
			ICMP: time.Duration(n.ICMPTimeout), Generic: time.Duration(n.GenericTimeout), Fragment: time.Duration(n.FragmentTimeout),
		},
	}
}

// NATField describes one field of a NAT, from which the caller can make a command-line flag. Value
// is a pflag.Value that writes to the field.
type NATField struct {
	Name  string // in gateway.yaml
	Flag  string
	Usage string
	Value NATValue
}

// NATValue reads and writes a field. Set rejects a value out of bounds, and its error states
// the bounds.
type NATValue interface {
	Set(text string) error
	String() string
	Type() string
	setJSON(raw stdjson.RawMessage) error
}

// Fields lists the fields of n in the order of the struct.
func (n *NAT) Fields() []NATField {
	flows := func(p *int) NATValue { return &number{p, MaxFlows} }
	return []NATField{
		{"maxFlows", "max-flows", "NAT flows over all peers (default 1048576)", flows(&n.MaxFlows)},
		{"maxFlowsPerPeer", "max-flows-per-peer", "NAT flows of one peer (default: an equal share of --max-flows)", flows(&n.MaxFlowsPerPeer)},
		{"maxFlowsPerHost", "max-flows-per-host", "NAT flows of one host with one peer (default: a quarter of the peer's limit, at least 1024, at most 16384)", flows(&n.MaxFlowsPerHost)},
		{"randomPorts", "random-ports", "give every NAT mapping a random port, even if the sender's own port is free", (*truth)(&n.RandomPorts)},
		{"maxFragmentSets", "max-fragment-sets", "incomplete datagrams, per peer and direction (default 256)", &number{&n.MaxFragmentSets, 1 << 20}},
		{"maxFragmentBytes", "max-fragment-bytes", "octets of held fragments, per peer and direction (default 1048576)", &number{&n.MaxFragmentBytes, 1 << 30}},
		{"maxFragmentsPerSet", "max-fragments-per-set", "held fragments of one datagram (default 256)", &number{&n.MaxFragmentsPerSet, 1 << 13}},
		{"maxICMPErrorsPerSecond", "max-icmp-errors-per-second", "ICMP errors that the gateway sends, per peer (default 1000)", &number{&n.MaxICMPErrorsPerSecond, 1 << 20}},
		{"udpTimeout", "udp-timeout", "timeout of UDP flows (default 5m)", &n.UDPTimeout},
		{"tcpEstablishedTimeout", "tcp-established-timeout", "timeout of established TCP connections (default 2h4m)", &n.TCPEstablishedTimeout},
		{"tcpTransitoryTimeout", "tcp-transitory-timeout", "timeout of half-open TCP connections (default 4m)", &n.TCPTransitoryTimeout},
		{"tcpClosingTimeout", "tcp-closing-timeout", "timeout of closed TCP connections (default: --tcp-transitory-timeout)", &n.TCPClosingTimeout},
		{"icmpTimeout", "icmp-timeout", "timeout of ICMP queries (default 1m)", &n.ICMPTimeout},
		{"genericTimeout", "generic-timeout", "timeout of flows of protocols other than TCP, UDP and ICMP (default 5m)", &n.GenericTimeout},
		{"fragmentTimeout", "fragment-timeout", "how long IP fragments wait for missing ones, 2s to 30s (default 5s)", &n.FragmentTimeout},
	}
}

// read copies the fields that are set in raw. The method Fields must return them in the order of
// natRaw.
func (n *NAT) read(raw *natRaw, problem func(field, format string, args ...any)) {
	written := reflect.ValueOf(raw).Elem()
	for i, f := range n.Fields() {
		if r := written.Field(i).Bytes(); r != nil {
			if err := f.Value.setJSON(r); err != nil {
				problem(f.Name, "%v", err)
			}
		}
	}
}

// number is an int from 0 to limit.
type number struct {
	to    *int
	limit int64
}

func (v *number) Set(text string) error {
	n, wrong := integer([]byte(text), 0, v.limit)
	if wrong != "" {
		return errors.New(wrong)
	}
	*v.to = int(n)
	return nil
}

func (v *number) String() string {
	if v.to == nil {
		return "0"
	}
	return strconv.Itoa(*v.to)
}

func (v *number) Type() string                         { return "int" }
func (v *number) setJSON(raw stdjson.RawMessage) error { return v.Set(string(raw)) }

type truth bool

func (v *truth) Set(text string) error {
	b, err := strconv.ParseBool(text)
	if err != nil {
		return errors.New("is neither true nor false")
	}
	*v = truth(b)
	return nil
}

func (v *truth) String() string { return strconv.FormatBool(bool(*v)) }
func (v *truth) Type() string   { return "bool" }

func (v *truth) setJSON(raw stdjson.RawMessage) error {
	if text := string(raw); text != "true" && text != "false" {
		return errors.New("is neither true nor false")
	}
	return v.Set(string(raw))
}

// A Duration is written like "5m" or "2h4m"; 0 is written as an empty string.
type Duration time.Duration

// Bounds of a Duration other than 0.
const (
	MinTimeout = time.Second
	MaxTimeout = 30 * 24 * time.Hour
)

// Set accepts "0", and durations from MinTimeout to MaxTimeout.
func (v *Duration) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil || d != 0 && (d < MinTimeout || d > MaxTimeout) {
		found := "is no duration"
		if err == nil {
			found = "is " + d.String()
		}
		return fmt.Errorf("%s; want a time from %v to %v, such as \"5m\"", found, MinTimeout, MaxTimeout)
	}
	*v = Duration(d)
	return nil
}

func (v *Duration) String() string {
	if *v == 0 {
		return ""
	}
	return time.Duration(*v).String()
}

// Type returns "duration".
func (v *Duration) Type() string { return "duration" }

// MarshalText returns text that Set accepts.
func (v Duration) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

func (v *Duration) setJSON(raw stdjson.RawMessage) error {
	var text string
	if stdjson.Unmarshal(raw, &text) != nil {
		text = "-" // a number without a unit is invalid
	}
	return v.Set(text)
}
