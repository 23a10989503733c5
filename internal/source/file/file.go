// Package file reads the configuration of a gateway from a directory. The directory contains the
// same TunnelEndpoint and NatMapping objects that `kubectl get -o yaml` prints, and one file for
// the gateway itself, in a format of this package. Such a directory is enough to reproduce a
// problem or to write a test. The package never writes to the directory. The gateway command calls
// Watch, and `isthmus trace` calls Load.
//
//	dir/gateway.yaml     kind Gateway, see GatewayFile
//	dir/private.key      the WireGuard key; privateKeyFile has its name
//	dir/next.key         the next key during a rotation; nextPrivateKeyFile has its name
//	dir/*.yaml           TunnelEndpoint, NatMapping: one object, several
//	                     documents, or kind List; JSON as well
//
//	files ─ decode ─► objects ─ fabric.PeerFrom, MappingsFrom, Attach, GatewayFor ─► Snapshot
//
// A directory is accepted as a whole or not at all. If there is any problem, Load returns an error
// with all problems and no Snapshot. The caller keeps the last valid Snapshot.
package file

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
)

// Limits of the files. Larger files are rejected. 16 MiB are enough for about ten thousand peers.
const (
	MaxFileSize = 16 << 20 // bytes of one file
	MaxFiles    = 4096     // files of one directory
	maxKeySize  = 4096     // bytes of a key file
)

// Snapshot is the complete content of a directory. Treat it as read-only.
type Snapshot struct {
	File       GatewayFile
	PrivateKey PrivateKey     // the key in File.PrivateKeyFile
	NextKey    PrivateKey     // the key in File.NextPrivateKeyFile; zero: the key is not being rotated
	Gateway    fabric.Gateway // no object is left out: any Problem makes Load fail
	// OpenKeys lists the files with private keys that other users can access, each with its mode,
	// such as "private.key (0644)".
	OpenKeys []string
}

// PrivateKey is a WireGuard private key. It prints as "(private key)", to keep it out of logs.
type PrivateKey [32]byte

const hiddenKey = "(private key)"

// Format hides the key from every verb of package fmt.
func (PrivateKey) Format(f fmt.State, _ rune) { fmt.Fprint(f, hiddenKey) }

// MarshalText hides the key from JSON, YAML and structured logs.
func (PrivateKey) MarshalText() ([]byte, error) { return []byte(hiddenKey), nil }

// Load reads a directory. It reads regular files, and symbolic links to them, named *.yaml, *.yml
// or *.json. It skips names with a leading dot, such as the ..data directories of a mounted
// ConfigMap.
//
// The error contains all problems, sorted and joined by errors.Join. A problem in the content of a
// file is a fabric.Problem. The error names files and fields, and never contains a private key. If
// files change while Load reads them, it reads the directory again. It fails if the changes last
// longer than about a second.
func Load(dir string) (Snapshot, error) {
	snapshot, _, err := loadSettled(dir)
	return snapshot, err
}

// errUnsettled means that the files change faster than Load can read them.
var errUnsettled = errors.New("files keep changing while they are read")

func loadSettled(dir string) (Snapshot, fingerprint, error) { return untilSettled(dir, load) }

// untilSettled calls load again until no file changed during the call.
func untilSettled(dir string, load func(string) (Snapshot, fingerprint, error)) (Snapshot, fingerprint, error) {
	for range 20 {
		snapshot, read, err := load(dir)
		if read.equal(fingerprintOf(dir, read.keys)) {
			return snapshot, read, err
		}
		time.Sleep(50 * time.Millisecond) // for the writer to finish
	}
	return Snapshot{}, fingerprint{}, fmt.Errorf("%s: %w", dir, errUnsettled)
}

// load reads the directory once. The fingerprint has the state that each file had when load opened
// it.
func load(dir string) (Snapshot, fingerprint, error) {
	names, err := list(dir)
	if err != nil {
		return Snapshot{}, fingerprint{err: err.Error()}, err
	}
	var read fingerprint
	contents := make([]content, 0, len(names))
	for _, name := range names {
		data, info, err := readFile(filepath.Join(dir, name), MaxFileSize)
		read.files = append(read.files, stamp{name, info})
		if !errors.Is(err, errDirectory) {
			contents = append(contents, content{name, data, err})
		}
	}
	var open []string
	snapshot, err := parse(contents, func(name string) content {
		path := name
		if !filepath.IsAbs(name) {
			path = filepath.Join(dir, name)
		}
		data, info, err := readFile(path, maxKeySize)
		read.keys, read.files = append(read.keys, path), append(read.files, stamp{path, info})
		if err == nil && info.Mode().Perm()&0o077 != 0 {
			open = append(open, fmt.Sprintf("%s (%04o)", printable(name), info.Mode().Perm()))
		}
		return content{name, data, err}
	})
	if err == nil {
		snapshot.OpenKeys = open
	}
	return snapshot, read, err
}

// content is the content of a file, or the error of reading it.
type content struct {
	name string
	data []byte
	err  error
}

// parse makes a Snapshot from the contents of the files. The function readKey reads a private key
// file. parse calls it at most once for each file.
func parse(contents []content, readKey func(name string) content) (Snapshot, error) {
	l := loader{seen: map[fabric.Origin]string{}}
	for _, c := range contents {
		if c.err != nil {
			l.problem(fabric.Origin{File: printable(c.name)}, "", "%v", c.err)
			l.unread = true
			continue
		}
		l.file(printable(c.name), c.data)
	}
	snapshot := Snapshot{File: l.theGateway()}
	if name := snapshot.File.PrivateKeyFile; name != "" {
		snapshot.PrivateKey = l.privateKey(fieldKey, readKey(name))
	}
	if name := snapshot.File.NextPrivateKeyFile; name != "" {
		if snapshot.NextKey = l.privateKey(fieldNextKey, readKey(name)); snapshot.NextKey != (PrivateKey{}) && snapshot.NextKey == snapshot.PrivateKey {
			l.problem(l.gateways[0].origin, fieldNextKey, "the content of %s is the key of privateKeyFile; want another key, or remove the field", printable(name))
		}
	}
	snapshot.Gateway = l.decide(snapshot.File, snapshot.PrivateKey)

	if problems := fabric.SortProblems(l.problems); len(problems) > 0 {
		errs := make([]error, len(problems))
		for i, p := range problems {
			errs[i] = p
		}
		return Snapshot{}, errors.Join(errs...)
	}
	return snapshot, nil
}

// list returns the names of the files to read, sorted.
func list(dir string) ([]string, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	var names []string
	for {
		some, err := d.Readdirnames(256)
		for _, name := range some {
			if strings.HasPrefix(name, ".") {
				continue
			}
			switch filepath.Ext(name) {
			case ".yaml", ".yml", ".json":
				names = append(names, name)
			}
		}
		switch {
		case len(names) > MaxFiles:
			return nil, fmt.Errorf("%s: more than %d files; want a directory that holds only the configuration", dir, MaxFiles)
		case err == io.EOF:
			slices.Sort(names)
			return names, nil
		case err != nil:
			return nil, err
		}
	}
}

var errDirectory = errors.New("is a directory")

// readFile reads a regular file of at most limit bytes. info describes the file when it was
// opened; info is nil if opening failed.
func readFile(path string, limit int64) (data []byte, info os.FileInfo, err error) {
	if info, err = os.Stat(path); err != nil {
		return nil, nil, withoutPath(err)
	}
	switch {
	case info.IsDir():
		return nil, info, errDirectory
	case !info.Mode().IsRegular(): // opening a FIFO would block until a writer opens it
		return nil, info, errors.New("is not a regular file")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, info, withoutPath(err)
	}
	defer f.Close()
	if info, err = f.Stat(); err != nil {
		return nil, info, withoutPath(err)
	}
	if data, err = io.ReadAll(io.LimitReader(f, limit+1)); err != nil {
		return nil, info, withoutPath(err)
	}
	if int64(len(data)) > limit {
		return nil, info, fmt.Errorf("is larger than %d bytes", limit)
	}
	return data, info, nil
}

// withoutPath removes the path from an error, because the caller's message already names the
// file.
func withoutPath(err error) error {
	if p := (*os.PathError)(nil); errors.As(err, &p) {
		return p.Err
	}
	return err
}

// theGateway returns the only Gateway object. Fields without a valid value are zero.
func (l *loader) theGateway() GatewayFile {
	if len(l.gateways) == 0 {
		if !l.unread {
			l.problem(fabric.Origin{}, "", "no object of kind Gateway (%s); want one, usually in gateway.yaml", GatewayAPIVersion)
		}
		return GatewayFile{}
	}
	for _, g := range l.gateways[1:] {
		l.problem(g.origin, "", "is a second Gateway, because %s has one; want only one", l.gateways[0].origin.File)
	}
	return l.gateways[0].file
}

// privateKey parses the content of a key file. Its messages never quote the content.
func (l *loader) privateKey(field string, c content) PrivateKey {
	origin := l.gateways[0].origin
	if c.err != nil {
		l.problem(origin, field, "%s: %v", printable(c.name), c.err)
		return PrivateKey{}
	}
	key, err := fabric.ParseKey(strings.TrimSpace(string(c.data)))
	if err != nil {
		l.problem(origin, field, "the content of %s %v", printable(c.name), err)
	}
	return key
}

// decide builds the Intent and passes it to package fabric, which validates it as a whole.
func (l *loader) decide(g GatewayFile, key PrivateKey) fabric.Gateway {
	in := fabric.Intent{ClusterID: g.ClusterID, ClusterName: g.ClusterName}
	if key != (PrivateKey{}) {
		keys := fabric.PublicKeys(key, fabric.MaxTunnels)
		in.PublicKey, in.FurtherKeys = keys[0], keys[1:]
	}
	var problems []fabric.Problem
	in.Peers, in.Waiting, problems = fabric.Attach(l.peers, l.mappings)
	l.problems = append(l.problems, problems...)
	gw, problems := fabric.GatewayFor(in)
	l.problems = append(l.problems, problems...)
	return gw
}
