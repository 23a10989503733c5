package datapath

import (
	"crypto/cipher"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/crypto/blake2s"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/replay"
)

// This file contains all accesses to unexported parts of wireguard-go: the keys of a session, and
// the device's state of a peer and of a handshake. TestReviewedWireGuardVersionMatchesGoMod fails
// if go.mod has another version of wireguard-go. If wireguard-go lacks one of the fields, or the
// field has another type, the process panics before main.

// wireguardVersion is the version of golang.zx2c4.com/wireguard whose device package was reviewed
// for this file. To update the module, review the changes in
// device/{keypair,peer,send,receive,timers,noise-protocol,indextable}.go, run the tests of this
// package, and then change this constant.
const wireguardVersion = "v0.0.0-20260522210424-ecfc5a8d5446"

// A field is the path to an unexported field of type F in a struct S.
type field[S, F any] struct{ offset uintptr }

// fieldOf returns the field with the given path of names, outermost first. It panics if there is
// no such field of type F.
func fieldOf[S, F any](names ...string) field[S, F] {
	in, offset := reflect.TypeFor[S](), uintptr(0)
	for _, name := range names {
		f, ok := reflect.StructField{}, false
		if in.Kind() == reflect.Struct {
			f, ok = in.FieldByName(name)
		}
		if !ok || len(f.Index) != 1 {
			panic(fmt.Sprintf("wireguard-go: %v has no field %s", reflect.TypeFor[S](), name))
		}
		in, offset = f.Type, offset+f.Offset
	}
	if in != reflect.TypeFor[F]() {
		panic(fmt.Sprintf("wireguard-go: %v.%s is of type %v, want %v", reflect.TypeFor[S](), names[len(names)-1], in, reflect.TypeFor[F]()))
	}
	return field[S, F]{offset}
}

// ptr returns a pointer to the field in s.
func (f field[S, F]) ptr(s *S) *F { return (*F)(unsafe.Add(unsafe.Pointer(s), f.offset)) }

// The fields of a Keypair do not change once lookup can find it, with two exceptions. Nonces come
// from an atomic counter that the device uses as well, so no nonce is used twice. The replay window
// is used only by this package, because the device never sees a data message.
var (
	deviceIndexTable = fieldOf[device.Device, device.IndexTable]("indexTable")
	entryPeer        = fieldOf[device.IndexTableEntry, *device.Peer]("peer")
	entryKeypair     = fieldOf[device.IndexTableEntry, *device.Keypair]("keypair")

	peerKeypairs   = fieldOf[device.Peer, device.Keypairs]("keypairs")
	peerReceived   = fieldOf[device.Peer, atomic.Uint64]("rxBytes")
	peerSent       = fieldOf[device.Peer, atomic.Uint64]("txBytes")
	peerEndpointMu = fieldOf[device.Peer, sync.Mutex]("endpoint", "Mutex")
	peerEndpoint   = fieldOf[device.Peer, conn.Endpoint]("endpoint", "val")
	peerRetransmit = fieldOf[device.Peer, *device.Timer]("timers", "retransmitHandshake")
	peerAttempts   = fieldOf[device.Peer, atomic.Uint32]("timers", "handshakeAttempts")

	peerHandshakeMu = fieldOf[device.Peer, sync.RWMutex]("handshake", "mutex")
	peerHash        = fieldOf[device.Peer, [blake2s.Size]byte]("handshake", "hash")
	peerChain       = fieldOf[device.Peer, [blake2s.Size]byte]("handshake", "chainKey")
	peerPreshared   = fieldOf[device.Peer, device.NoisePresharedKey]("handshake", "presharedKey")
	peerEphemeral   = fieldOf[device.Peer, device.NoisePrivateKey]("handshake", "localEphemeral")
	peerInitiated   = fieldOf[device.Peer, time.Time]("handshake", "lastSentHandshake")
	peerIndex       = fieldOf[device.Peer, uint32]("handshake", "localIndex") // is 0 when the handshake has made a keypair

	peerStatic = fieldOf[device.Peer, [device.NoisePublicKeySize]byte]("handshake", "precomputedStaticStatic")

	keypairsNext = fieldOf[device.Keypairs, atomic.Pointer[device.Keypair]]("next")

	keypairNonce     = fieldOf[device.Keypair, atomic.Uint64]("sendNonce")
	keypairSend      = fieldOf[device.Keypair, cipher.AEAD]("send")
	keypairReceive   = fieldOf[device.Keypair, cipher.AEAD]("receive")
	keypairWindow    = fieldOf[device.Keypair, replay.Filter]("replayFilter")
	keypairInitiator = fieldOf[device.Keypair, bool]("isInitiator")
	keypairCreated   = fieldOf[device.Keypair, time.Time]("created")
	keypairRemote    = fieldOf[device.Keypair, uint32]("remoteIndex")
	keypairLocal     = fieldOf[device.Keypair, uint32]("localIndex")
)

// handshakesWaiting returns the number of handshake messages that wait in the device.
func handshakesWaiting(d *device.Device) int {
	return reflect.ValueOf(d).Elem().FieldByIndex(deviceHandshakeQueue).Elem().FieldByIndex(queueChannel).Len()
}

// Paths to the channel in the device's queue of handshakes. The type of the queue is not exported.
// So the first path leads to the pointer to the queue, and the second from there to the channel.
var (
	deviceHandshakeQueue = indexOf(reflect.TypeFor[device.Device](), "queue", "handshake")
	queueChannel         = indexOf(reflect.TypeFor[device.Device]().FieldByIndex(deviceHandshakeQueue).Type.Elem(), "c")
	_                    = reflect.TypeFor[device.Device]().FieldByIndex(deviceHandshakeQueue).Type.Elem().FieldByIndex(queueChannel).Type.ChanDir()
)

// indexOf returns the index path of a field, given its path of names, outermost first. It panics
// if there is no such field.
func indexOf(in reflect.Type, names ...string) (path []int) {
	for _, name := range names {
		f, ok := in.FieldByName(name)
		if !ok {
			panic(fmt.Sprintf("wireguard-go: %v has no field %s", in, name))
		}
		path, in = append(path, f.Index...), f.Type
	}
	return path
}

// refusals are the texts that the device logs when it refuses a handshake message whose mac1 is
// valid. The device reports such a refusal in no other way.
var refusals = [...]string{
	"Received invalid initiation message from %s",
	"Received invalid response message from %s",
}

// lookup returns the keypair and the peer with a receiver index. The keypair is nil if the index
// is unknown or belongs to a handshake in progress. lookup takes the read lock of the device's
// index table.
func lookup(d *device.Device, index uint32) (*device.Peer, *device.Keypair) {
	entry := deviceIndexTable.ptr(d).Lookup(index)
	return *entryPeer.ptr(&entry), *entryKeypair.ptr(&entry)
}

// endpointOf returns the endpoint to which the device sends messages for a peer, or nil if it is
// unknown.
func endpointOf(p *device.Peer) conn.Endpoint {
	mu := peerEndpointMu.ptr(p)
	mu.Lock()
	defer mu.Unlock()
	return *peerEndpoint.ptr(p)
}
