package v1alpha1

import "maps"

// Most types in this file are aliases, so they are plain strings in Go. Their validation rules are
// written once here instead of at each field.

// The rules do not use CEL's containsCIDR: in Kubernetes 1.31, it returns true only for networks
// that begin at the same address, because it compares addresses before it masks them.

// CIDR is a network of pods or of mapped endpoints, in canonical notation: all host bits are zero,
// as in 10.244.0.0/16. Liqo publishes only canonical networks. The bounds of the prefix length
// leave room for the two addresses that every peering needs: the network address, which NAPT uses
// as source of packets that are not from pods, and a first host, which answers the connection
// check. Liqo allocates only networks within these bounds, because its largest pool is a /8.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:XValidation:rule="isCIDR(self)",message="must be a network in CIDR notation, such as 10.244.0.0/16",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || string(cidr(self).masked()) == self",message="must be in canonical form, with all host bits zero",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || (cidr(self).ip().family() == 4 ? cidr(self).prefixLength() >= 8 && cidr(self).prefixLength() <= 30 : cidr(self).prefixLength() >= 16 && cidr(self).prefixLength() <= 126)",message="must have a prefix length from 8 to 30 (IPv4) or from 16 to 126 (IPv6)",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || (!['0.0.0.0/8', '127.0.0.0/8', '169.254.0.0/16', '224.0.0.0/4', '::/8', 'fe80::/10', 'ff00::/8'].exists(n, cidr(n).containsIP(cidr(self).ip()) && cidr(self).prefixLength() >= cidr(n).prefixLength()) && !['0.0.0.0', '127.0.0.0', '169.254.0.0', '224.0.0.0', '255.255.255.255', '::', 'fe80::', 'ff00::'].exists(a, cidr(self).containsIP(a)))",message="must be a unicast network, apart from unspecified, loopback, link-local, multicast and broadcast addresses",reason=FieldValueInvalid
type CIDR = string

// NATCIDR is the network into which another network is remapped, or the literal None if that
// network is used unchanged.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:XValidation:rule="self == 'None' || isCIDR(self)",message="must be None or a network in CIDR notation, such as 10.246.0.0/16",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || string(cidr(self).masked()) == self",message="must be in canonical form, with all host bits zero",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || (cidr(self).ip().family() == 4 ? cidr(self).prefixLength() >= 8 && cidr(self).prefixLength() <= 30 : cidr(self).prefixLength() >= 16 && cidr(self).prefixLength() <= 126)",message="must have a prefix length from 8 to 30 (IPv4) or from 16 to 126 (IPv6)",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || (!['0.0.0.0/8', '127.0.0.0/8', '169.254.0.0/16', '224.0.0.0/4', '::/8', 'fe80::/10', 'ff00::/8'].exists(n, cidr(n).containsIP(cidr(self).ip()) && cidr(self).prefixLength() >= cidr(n).prefixLength()) && !['0.0.0.0', '127.0.0.0', '169.254.0.0', '224.0.0.0', '255.255.255.255', '::', 'fe80::', 'ff00::'].exists(a, cidr(self).containsIP(a)))",message="must be a unicast network, apart from unspecified, loopback, link-local, multicast and broadcast addresses",reason=FieldValueInvalid
type NATCIDR = string

// EndpointHost is the address of a gateway: an IP address, or a DNS name if the gateway's load
// balancer has no IP address. A name comes from the status of a Service, or from an annotation that
// a person wrote. Therefore upper case, underscores and a final dot are accepted. A name that ends
// in a number is refused as a mistyped address. Code that resolves the name must check the
// resulting address, because a name may resolve to any address.
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=253
// +kubebuilder:validation:XValidation:rule="isIP(self) || (self.matches('^([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?[.])*[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?[.]?$') && !self.matches('(^|[.])([0-9]+|0[xX][0-9A-Fa-f]*)[.]?$'))",message="must be an IP address or a DNS name",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="isIP(self) ? ip(self).isGlobalUnicast() && !cidr('0.0.0.0/8').containsIP(self) : !self.matches('(^|[.])[Ll][Oo][Cc][Aa][Ll][Hh][Oo][Ss][Tt][.]?$')",message="must be reachable from another cluster: not unspecified, loopback, link-local, multicast or broadcast",reason=FieldValueInvalid
type EndpointHost = string

// ConfigValue is a value of BackendConfig or PeerConfiguration.
// +kubebuilder:validation:MaxLength=1024
type ConfigValue = string

// BackendConfig holds the parameters of the tunnel: publicKey, a WireGuard public key in base64,
// and port, a decimal string. Liqo writes nothing else. If a gateway has several tunnels, Isthmus
// also writes the key tunnels: up to 15 entries PORT:PUBLICKEY, separated by commas. Other keys are
// ignored, so that later versions can add keys. The number and the length of keys are limited. The
// zero public key is refused, because WireGuard uses it for "no key". The controllers check that
// all ports and public keys differ.
// +kubebuilder:validation:MaxProperties=16
// +kubebuilder:validation:XValidation:rule="self.all(k, k.size() > 0 && k.size() <= 63)",message="keys must have 1 to 63 characters",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="'publicKey' in self && 'port' in self",message="must have the keys publicKey and port",reason=FieldValueRequired
// +kubebuilder:validation:XValidation:rule="!('publicKey' in self) || self['publicKey'].matches('^[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=$')",message="publicKey must be a WireGuard public key: 32 octets in base64, which are 44 characters",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!('publicKey' in self) || !self['publicKey'].matches('^A+=*$')",message="publicKey must not be zero",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!('port' in self) || (self['port'].matches('^[1-9][0-9]{0,4}$') && int(self['port']) <= 65535)",message="port must be a UDP port from 1 to 65535, in decimal without leading zeros",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!('tunnels' in self) || (self['tunnels'] + ',').matches('^(([1-9][0-9]{0,3}|[1-5][0-9]{4}|6([0-4][0-9]{3}|5([0-4][0-9]{2}|5([0-2][0-9]|3[0-5])))):[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=,){1,15}$')",message="tunnels must be 1 to 15 entries PORT:PUBLICKEY, separated by commas, each with a UDP port and a WireGuard public key",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!('tunnels' in self) || !self['tunnels'].matches(':A+=')",message="no public key in tunnels may be zero",reason=FieldValueInvalid
// +kubebuilder:object:generate=false
type BackendConfig map[string]ConfigValue

// DeepCopy returns a copy that shares no memory with the original. It is written by hand because
// controller-gen v0.23 does not copy maps of alias types.
func (in BackendConfig) DeepCopy() BackendConfig { return maps.Clone(in) }

// BackendType names the tunnel driver. Liqo's field is a plain string, but WireGuard is the only
// driver in every version of Liqo since v0.2. An object with another driver could not be applied.
// +kubebuilder:validation:Enum=wireguard
type BackendType = string

// ClusterID is the identity of a cluster, a UUID in Liqo. Liqo uses it as the value of labels
// (liqo.io/remoteID, clusterID), so every ID that Liqo accepts is a valid label value.
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=63
// +kubebuilder:validation:XValidation:rule="self.matches('^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$')",message="must be usable as a label value: letters, digits, '-', '_' and '.', the first and the last a letter or digit",reason=FieldValueInvalid
type ClusterID = string

// ClusterName is the name of a cluster. Liqo makes object names from it by appending "-" and six
// hexadecimal digits, so every name that Liqo accepts is the beginning of a valid object name.
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=246
// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([a-z0-9.-]*[a-z0-9-])?$')",message="must be usable at the beginning of an object name: lower case letters, digits, '-' and '.'",reason=FieldValueInvalid
type ClusterName = string

// IPAddress is an IPv4 or IPv6 address.
// +kubebuilder:validation:MaxLength=45
// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address",reason=FieldValueInvalid
type IPAddress = string

// ClusterIdentity identifies a cluster.
type ClusterIdentity struct {
	// ClusterID is unique among all clusters and never changes.
	ClusterID ClusterID `json:"clusterID"`
	// ClusterName is the display name of the cluster. Object names contain it.
	ClusterName ClusterName `json:"clusterName"`
}
