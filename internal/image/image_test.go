package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"runtime/debug"
	"strings"
	"testing"
	"time"
)

var example = Image{
	Ref: "example.org/a/b:v1", Created: time.Unix(1_700_000_000, 5), User: "65532:65532", Entrypoint: []string{"/b"},
	Labels: map[string]string{"x": "1", "y": "2"},
	Platforms: []Platform{
		{OS: "linux", Architecture: "amd64", Files: []File{{"/usr/share/z", 0o644, []byte("z")}, {"/b", 0o755, []byte("binary")}}},
		{OS: "linux", Architecture: "arm64", Files: []File{{"/b", 0o755, []byte("BINARY")}, {"/usr/share/z", 0o644, []byte("z")}}},
	},
}

func write(t *testing.T, i Image) (digest string, archive []byte) {
	t.Helper()
	var b bytes.Buffer
	digest, err := i.Write(&b)
	if err != nil {
		t.Fatal(err)
	}
	return digest, b.Bytes()
}

// unpack reads a tar file with the standard library's reader.
func unpack(t *testing.T, r io.Reader) map[string]*tar.Header {
	t.Helper()
	all := map[string]*tar.Header{}
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		h.PAXRecords = map[string]string{"content": string(content)}
		all[h.Name] = h
	}
}

func TestSameInputGivesSameBytes(t *testing.T) {
	digest, archive := write(t, example)
	again := example
	again.Labels = map[string]string{"y": "2", "x": "1"}
	again.Created = example.Created.In(time.FixedZone("elsewhere", 3600))
	if d, a := write(t, again); d != digest || !bytes.Equal(a, archive) {
		t.Errorf("%s and %s, equal archives: %v", digest, d, bytes.Equal(a, archive))
	}
	again.Platforms = append([]Platform{}, example.Platforms...)
	again.Platforms[1].Files = []File{{"/b", 0o755, []byte("another")}}
	if d, _ := write(t, again); d == digest {
		t.Error("another binary has the same digest")
	}
}

// The test follows the references from the archive to the files, as a container runtime does.
func TestArchiveContainsTheFilesOfEachPlatform(t *testing.T) {
	digest, archive := write(t, example)
	files := unpack(t, bytes.NewReader(archive))
	follow := func(d descriptor, into any) []byte {
		t.Helper()
		name := "blobs/sha256/" + strings.TrimPrefix(d.Digest, "sha256:")
		h := files[name]
		if h == nil {
			t.Fatalf("%s is not in the archive", name)
		}
		content := []byte(h.PAXRecords["content"])
		if got := sha256.Sum256(content); hex.EncodeToString(got[:]) != strings.TrimPrefix(d.Digest, "sha256:") || len(content) != d.Size {
			t.Fatalf("%s: has %d octets and digest %x, not %d", name, len(content), got, d.Size)
		}
		if into != nil {
			if err := json.Unmarshal(content, into); err != nil {
				t.Fatal(err)
			}
		}
		return content
	}
	var layout, platforms index
	if err := json.Unmarshal([]byte(files["index.json"].PAXRecords["content"]), &layout); err != nil {
		t.Fatal(err)
	}
	if files["oci-layout"].PAXRecords["content"] != `{"imageLayoutVersion":"1.0.0"}` {
		t.Error("no oci-layout")
	}
	if got := layout.Manifests[0]; got.Digest != digest || got.Annotations["io.containerd.image.name"] != example.Ref {
		t.Errorf("index.json leads to %+v, not %s", got, digest)
	}
	follow(layout.Manifests[0], &platforms)
	for n, want := range []struct{ architecture, binary string }{{"amd64", "binary"}, {"arm64", "BINARY"}} {
		d := platforms.Manifests[n]
		if d.Platform.Architecture != want.architecture || d.Platform.OS != "linux" {
			t.Errorf("platform %d is %+v", n, d.Platform)
		}
		var m manifest
		var c config
		follow(d, &m)
		follow(m.Config, &c)
		if c.Architecture != want.architecture || c.Config.User != "65532:65532" || c.Config.Entrypoint[0] != "/b" || c.Config.Labels["x"] != "1" {
			t.Errorf("configuration: %+v", c)
		}
		z, err := gzip.NewReader(bytes.NewReader(follow(m.Layers[0], nil)))
		if err != nil {
			t.Fatal(err)
		}
		layer, err := io.ReadAll(z)
		if err != nil {
			t.Fatal(err)
		}
		if got := sha256.Sum256(layer); c.RootFS.DiffIDs[0] != "sha256:"+hex.EncodeToString(got[:]) {
			t.Errorf("diff_ids %v, of a layer with digest %x", c.RootFS.DiffIDs, got)
		}
		in := unpack(t, bytes.NewReader(layer))
		if b := in["b"]; b == nil || b.PAXRecords["content"] != want.binary || b.Mode != 0o755 || b.ModTime.Unix() != 1_700_000_000 || b.Uid != 0 {
			t.Errorf("binary: %+v", b)
		}
		if in["usr/"] == nil || in["usr/share/"] == nil || in["usr/share/"].Typeflag != tar.TypeDir || in["usr/share/z"] == nil {
			t.Errorf("files: %v", in)
		}
	}
}

func TestInvalidAndDuplicateFilePathsAreRejected(t *testing.T) {
	for _, path := range []string{"b", "/../b", "/a//b", "/a/"} {
		i := example
		i.Platforms = []Platform{{OS: "linux", Architecture: "amd64", Files: []File{{Path: path}}}}
		if _, err := i.Write(io.Discard); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: %v", path, err)
		}
	}
	i := example
	i.Platforms = []Platform{{OS: "linux", Architecture: "amd64", Files: []File{{Path: "/b"}, {Path: "/b"}}}}
	if _, err := i.Write(io.Discard); err == nil {
		t.Error("a file may be there twice")
	}
}

func TestSBOMHasEachModuleOfTheBinary(t *testing.T) {
	info := &debug.BuildInfo{
		GoVersion: "go1.26.8",
		Main:      debug.Module{Path: "example.org/main", Version: "v1.2.3"},
		Deps: []*debug.Module{
			{Path: "example.org/a", Version: "v1.0.0+incompatible", Sum: "h1:abc="},
			{Path: "example.org/b", Version: "v2.0.0", Replace: &debug.Module{Path: "example.org/fork", Version: "v2.0.1"}},
		},
		Settings: []debug.BuildSetting{{Key: "GOARCH", Value: "arm64"}},
	}
	origin := &debug.Module{Path: "example.org/roots", Version: "v0.1.0"}
	licenses := map[string]license{"example.org/fork@v2.0.1": {expression: "MIT"}}
	text, err := sbom(info, origin, licenses, "main", example.Created)
	if err != nil {
		t.Fatal(err)
	}
	var d spdxDocument
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	var purls []string
	ids := map[string]bool{d.ID: true}
	for _, p := range d.Packages {
		purls = append(purls, p.Refs[0].Locator)
		ids[p.ID] = true
	}
	want := "pkg:golang/example.org/main@v1.2.3 pkg:golang/example.org/a@v1.0.0%2Bincompatible pkg:golang/example.org/fork@v2.0.1 pkg:golang/stdlib@1.26.8 pkg:golang/example.org/roots@v0.1.0"
	if got := strings.Join(purls, " "); got != want {
		t.Errorf("packages:\n%s\nwant\n%s", got, want)
	}
	if got := d.Packages[2].License; got != "MIT" {
		t.Errorf("license of the module that replaces another: %q", got)
	}
	if len(ids) != len(purls)+1 || len(d.Relationships) != len(purls) {
		t.Errorf("%d IDs and %d relationships for %d packages", len(ids), len(d.Relationships), len(purls))
	}
	for _, r := range d.Relationships {
		if !ids[r.Element] || !ids[r.Related] {
			t.Errorf("%+v: names what is not there", r)
		}
	}
}
