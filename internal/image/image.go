// Package image writes OCI images as archives that container runtimes import. It needs only the
// files of the image and no daemon. The same input always produces the same archive.
//
//	oci-layout, index.json ─► index ─► manifest of each platform ─► config, one layer
//
// An archive stores each blob under the SHA-256 of its content
// (https://github.com/opencontainers/image-spec, version 1.1).
package image

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"
)

// An Image is the content of an archive.
type Image struct {
	// Ref is the image's name after an import, with registry and tag.
	Ref string
	// Created is the timestamp of everything in the image. The caller sets it, because with the
	// current time each build would be different.
	Created time.Time
	// Labels become labels in the configuration of each platform, and annotations of the index.
	Labels map[string]string
	// User is UID:GID as numbers, because the image has no /etc/passwd that could resolve names.
	User       string
	Entrypoint []string
	Platforms  []Platform
}

// A Platform is the image for one operating system and architecture, named as in GOOS and GOARCH.
type Platform struct {
	OS, Architecture string
	Files            []File
}

// A File is one file of a layer. Its parent directories are created; root owns them and everybody
// can read them.
type File struct {
	Path    string // absolute path
	Mode    int64
	Content []byte
}

// The media types of the image specification.
const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type index struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	Manifests     []descriptor      `json:"manifests"`
	Annotations   map[string]string `json:"annotations,omitempty"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

type config struct {
	Created      string          `json:"created"`
	Architecture string          `json:"architecture"`
	OS           string          `json:"os"`
	Config       containerConfig `json:"config"`
	RootFS       rootFS          `json:"rootfs"`
	History      []history       `json:"history"`
}

type containerConfig struct {
	User       string            `json:"User,omitempty"`
	Entrypoint []string          `json:"Entrypoint,omitempty"`
	Env        []string          `json:"Env,omitempty"`
	WorkingDir string            `json:"WorkingDir,omitempty"`
	Labels     map[string]string `json:"Labels,omitempty"`
}

type rootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

type history struct {
	Created   string `json:"created"`
	CreatedBy string `json:"created_by"`
}

// Write writes the archive. It returns the digest of the index, which identifies the image in a
// registry.
func (i Image) Write(w io.Writer) (digest string, err error) {
	if i.Ref == "" || len(i.Platforms) == 0 {
		return "", fmt.Errorf("image %q for %d platforms: want a name and at least one", i.Ref, len(i.Platforms))
	}
	var blobs store
	top := index{SchemaVersion: 2, MediaType: typeIndex, Annotations: i.Labels}
	for _, p := range i.Platforms {
		d, err := i.platform(&blobs, p)
		if err != nil {
			return "", fmt.Errorf("%s/%s: %w", p.OS, p.Architecture, err)
		}
		top.Manifests = append(top.Manifests, d)
	}
	named, err := blobs.json(typeIndex, top)
	if err != nil {
		return "", err
	}
	named.Annotations = map[string]string{
		"io.containerd.image.name":          i.Ref, // containerd reads the full name
		"org.opencontainers.image.ref.name": i.Ref, // other tools read the tag, or the full name
	}
	layout, err := json.Marshal(index{SchemaVersion: 2, MediaType: typeIndex, Manifests: []descriptor{named}})
	if err != nil {
		return "", err
	}
	files := []File{
		{Path: "/oci-layout", Mode: 0o644, Content: []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{Path: "/index.json", Mode: 0o644, Content: layout},
	}
	for _, b := range blobs.blobs {
		files = append(files, File{Path: "/blobs/sha256/" + b.digest, Mode: 0o644, Content: b.content})
	}
	return named.Digest, writeTar(w, files, i.Created)
}

// platform stores the blobs of one platform, and returns the descriptor of its manifest.
func (i Image) platform(blobs *store, p Platform) (descriptor, error) {
	var plain, packed bytes.Buffer
	if err := writeTar(&plain, p.Files, i.Created); err != nil {
		return descriptor{}, err
	}
	z, err := gzip.NewWriterLevel(&packed, gzip.BestCompression) // the gzip header stays empty: no name, no time
	if err != nil {
		return descriptor{}, err
	}
	if _, err := z.Write(plain.Bytes()); err != nil {
		return descriptor{}, err
	}
	if err := z.Close(); err != nil {
		return descriptor{}, err
	}
	created := i.Created.UTC().Format(time.RFC3339)
	c, err := blobs.json(typeConfig, config{
		Created: created, Architecture: p.Architecture, OS: p.OS,
		Config: containerConfig{User: i.User, Entrypoint: i.Entrypoint, Env: []string{"PATH=/"}, WorkingDir: "/", Labels: i.Labels},
		RootFS: rootFS{Type: "layers", DiffIDs: []string{"sha256:" + sum(plain.Bytes())}},
		// Some runtimes require one history entry for each layer.
		History: []history{{Created: created, CreatedBy: "isthmus internal/image"}},
	})
	if err != nil {
		return descriptor{}, err
	}
	m := manifest{SchemaVersion: 2, MediaType: typeManifest, Config: c, Layers: []descriptor{blobs.add(typeLayer, packed.Bytes())}}
	d, err := blobs.json(typeManifest, m)
	d.Platform = &platform{Architecture: p.Architecture, OS: p.OS}
	return d, err
}

type blob struct {
	digest  string
	content []byte
}

// A store holds the blobs in the order in which they were added, without duplicates.
type store struct{ blobs []blob }

func (s *store) add(mediaType string, content []byte) descriptor {
	digest := sum(content)
	if !slices.ContainsFunc(s.blobs, func(b blob) bool { return b.digest == digest }) {
		s.blobs = append(s.blobs, blob{digest, content})
	}
	return descriptor{MediaType: mediaType, Digest: "sha256:" + digest, Size: len(content)}
}

func (s *store) json(mediaType string, value any) (descriptor, error) {
	text, err := json.Marshal(value) // json.Marshal sorts the keys of maps
	if err != nil {
		return descriptor{}, err
	}
	return s.add(mediaType, text), nil
}

func sum(content []byte) string {
	h := sha256.Sum256(content)
	return hex.EncodeToString(h[:])
}

// writeTar writes files and their parent directories, sorted by name.
func writeTar(w io.Writer, files []File, created time.Time) error {
	files = slices.Clone(files)
	slices.SortFunc(files, func(a, b File) int { return cmp.Compare(a.Path, b.Path) })
	out := tar.NewWriter(w)
	made := map[string]bool{"/": true}
	for n, f := range files {
		if !path.IsAbs(f.Path) || path.Clean(f.Path) != f.Path || n > 0 && files[n-1].Path == f.Path {
			return fmt.Errorf("file %q: want a clean absolute path that no other file has", f.Path)
		}
		for at := 1; at < len(f.Path); at++ {
			if dir := f.Path[:at]; f.Path[at] == '/' && !made[dir] {
				made[dir] = true
				if err := out.WriteHeader(header(dir+"/", tar.TypeDir, 0o755, 0, created)); err != nil {
					return err
				}
			}
		}
		if err := out.WriteHeader(header(f.Path, tar.TypeReg, f.Mode, len(f.Content), created)); err != nil {
			return err
		}
		if _, err := out.Write(f.Content); err != nil {
			return err
		}
	}
	return out.Close()
}

func header(name string, kind byte, mode int64, size int, created time.Time) *tar.Header {
	return &tar.Header{Typeflag: kind, Name: strings.TrimPrefix(name, "/"), Mode: mode, Size: int64(size), ModTime: created.UTC().Truncate(time.Second), Format: tar.FormatUSTAR}
}
