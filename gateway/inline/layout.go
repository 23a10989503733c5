package inline

import (
	"crypto/cipher"
	"errors"
	"fmt"
	"reflect"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.zx2c4.com/wireguard/device"
)

// wireguardModule and wireguardVersion are what this package was written for and reviewed with. With any other version
// New refuses: an update of the module is not enough, somebody has to read what changed in device/{keypair,peer,send,
// receive,noise-protocol,indextable}.go, run the tests of this package and change the constant.
const (
	wireguardModule  = "golang.zx2c4.com/wireguard"
	wireguardVersion = "v0.0.0-20260522210424-ecfc5a8d5446"
)

// layout is where wireguard-go's device keeps what a session consists of: offsets of unexported fields, found by name
// and type. Everything else that this package needs of the device is exported.
type layout struct {
	indexTable               uintptr // of device.Device
	entryPeer, entryKeypair  uintptr // of device.IndexTableEntry
	keypairs, rxBytes        uintptr // of device.Peer
	sendNonce, send, receive uintptr // of device.Keypair
	created, remoteIndex     uintptr // of device.Keypair
}

// findLayout is the layout of the device in this program.
func findLayout() (layout, error) {
	return layoutOf(reflect.TypeFor[device.Device](), reflect.TypeFor[device.Peer](), reflect.TypeFor[device.Keypair](), reflect.TypeFor[device.IndexTableEntry]())
}

// layoutOf fails when a field is missing or of another type.
func layoutOf(dev, peer, keypair, entry reflect.Type) (l layout, err error) {
	var errs []error
	at := func(into *uintptr, in reflect.Type, name string, want reflect.Type) {
		f, ok := in.FieldByName(name)
		switch {
		case !ok || len(f.Index) != 1:
			errs = append(errs, fmt.Errorf("%v has no field %s", in, name))
		case f.Type != want:
			errs = append(errs, fmt.Errorf("%v.%s is of type %v, want %v", in, name, f.Type, want))
		default:
			*into = f.Offset
		}
	}
	at(&l.indexTable, dev, "indexTable", reflect.TypeFor[device.IndexTable]())
	at(&l.entryPeer, entry, "peer", reflect.TypeFor[*device.Peer]())
	at(&l.entryKeypair, entry, "keypair", reflect.TypeFor[*device.Keypair]())
	at(&l.keypairs, peer, "keypairs", reflect.TypeFor[device.Keypairs]())
	at(&l.rxBytes, peer, "rxBytes", reflect.TypeFor[atomic.Uint64]())
	at(&l.sendNonce, keypair, "sendNonce", reflect.TypeFor[atomic.Uint64]())
	at(&l.send, keypair, "send", reflect.TypeFor[cipher.AEAD]())
	at(&l.receive, keypair, "receive", reflect.TypeFor[cipher.AEAD]())
	at(&l.created, keypair, "created", reflect.TypeFor[time.Time]())
	at(&l.remoteIndex, keypair, "remoteIndex", reflect.TypeFor[uint32]())
	return l, errors.Join(errs...)
}

// checkVersion fails unless the process was built with the version of wireguard-go that was reviewed.
func checkVersion() error {
	info, ok := debug.ReadBuildInfo()
	switch {
	case !ok:
		return errors.New("the program does not say which modules it was built from")
	case strings.HasSuffix(info.Path, ".test") && len(info.Deps) == 0:
		return nil // go test says nothing about modules; TestVersionIsTheOneOfTheModule reads go.mod
	}
	for _, m := range info.Deps {
		switch {
		case m.Path != wireguardModule:
		case m.Replace != nil:
			return fmt.Errorf("%s is replaced by %s %s", m.Path, m.Replace.Path, m.Replace.Version)
		case m.Version != wireguardVersion:
			return fmt.Errorf("%s is at %s, reviewed was %s", m.Path, m.Version, wireguardVersion)
		default:
			return nil
		}
	}
	return fmt.Errorf("%s is not among the modules of the program", wireguardModule)
}

// field is the field of type T at an offset of *S.
func field[T, S any](s *S, offset uintptr) *T { return (*T)(unsafe.Add(unsafe.Pointer(s), offset)) }

// lookup finds peer and keypair of a receiver index; nil when there is none. The device's own lock is taken.
func (l *layout) lookup(d *device.Device, index uint32) (*device.Peer, *device.Keypair) {
	if d == nil {
		return nil, nil
	}
	entry := field[device.IndexTable](d, l.indexTable).Lookup(index)
	return *field[*device.Peer](&entry, l.entryPeer), *field[*device.Keypair](&entry, l.entryKeypair)
}

// current is the keypair that the peer sends with, nil without a session. The device's own lock is taken.
func (l *layout) current(p *device.Peer) *device.Keypair {
	return field[device.Keypairs](p, l.keypairs).Current()
}

// received adds octets to what the device says that it has received.
func (l *layout) received(p *device.Peer, n int) { field[atomic.Uint64](p, l.rxBytes).Add(uint64(n)) }

// The fields of a keypair never change after it can be found, but for the counter of nonces, which is shared with the
// device: a nonce that one of the two has drawn is never drawn again.
func (l *layout) nonce(k *device.Keypair) *atomic.Uint64 { return field[atomic.Uint64](k, l.sendNonce) }
func (l *layout) sealer(k *device.Keypair) cipher.AEAD   { return *field[cipher.AEAD](k, l.send) }
func (l *layout) opener(k *device.Keypair) cipher.AEAD   { return *field[cipher.AEAD](k, l.receive) }
func (l *layout) remote(k *device.Keypair) uint32        { return *field[uint32](k, l.remoteIndex) }

// fresh reports whether a keypair may still be used (REJECT_AFTER_TIME of the WireGuard paper, section 6.1).
func (l *layout) fresh(k *device.Keypair, now time.Time) bool {
	return now.Sub(*field[time.Time](k, l.created)) < device.RejectAfterTime
}
