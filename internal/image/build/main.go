// Command build creates the image of Isthmus from existing binaries, for `make image`.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/internal/image"
)

func main() {
	var o options
	var created int64
	flag.StringVar(&o.binaries, "binaries", "bin/image", "directory with OS-ARCHITECTURE/isthmus for each platform")
	platforms := flag.String("platforms", "linux/amd64,linux/arm64", "platforms of the image")
	flag.StringVar(&o.roots, "roots", "", "file with the certificate authorities, in PEM")
	flag.StringVar(&o.ref, "ref", "", "name and tag of the image")
	flag.StringVar(&o.version, "version", "", "version for the labels")
	flag.StringVar(&o.revision, "revision", "", "commit for the labels")
	flag.Int64Var(&created, "created", 0, "time of everything in it, in seconds since 1970, such as the commit's")
	flag.StringVar(&o.out, "out", "bin/isthmus-image.tar", "the archive")
	flag.Parse()
	o.platforms, o.created = strings.Split(*platforms, ","), time.Unix(created, 0)
	digest, err := build(o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
	fmt.Printf("%s: %s for %s, %s\n", o.out, o.ref, *platforms, digest)
}

type options struct {
	binaries, roots, ref, version, revision, out string
	platforms                                    []string
	created                                      time.Time
}

// nonRoot is the user of the image. A component that needs root, such as a route agent, sets its
// user in the manifest.
const nonRoot = "65532:65532"

func build(o options) (digest string, err error) {
	roots, err := os.ReadFile(o.roots)
	if err != nil {
		return "", err
	}
	i := image.Image{
		Ref: o.ref, Created: o.created, User: nonRoot, Entrypoint: []string{"/isthmus"},
		Labels: map[string]string{
			"org.opencontainers.image.title":       "isthmus",
			"org.opencontainers.image.description": "Joins the pod networks of Kubernetes clusters",
			"org.opencontainers.image.licenses":    "Apache-2.0",
			"org.opencontainers.image.source":      "https://github.com/isthmus-net/isthmus",
			"org.opencontainers.image.version":     o.version,
			"org.opencontainers.image.revision":    o.revision,
			"org.opencontainers.image.created":     o.created.UTC().Format(time.RFC3339),
		},
	}
	for _, name := range o.platforms {
		system, architecture, ok := strings.Cut(name, "/")
		if !ok {
			return "", fmt.Errorf("platform %q: want one such as linux/amd64", name)
		}
		path := filepath.Join(o.binaries, system+"-"+architecture, "isthmus")
		binary, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		sbom, notices, err := image.SBOM(path, ".", "isthmus-"+system+"-"+architecture, o.version, roots, o.created)
		if err != nil {
			return "", fmt.Errorf("%s: %w", path, err)
		}
		// A release signs and publishes these files, so write them beside the archive as well.
		beside := strings.TrimSuffix(o.out, ".tar") + "-" + system + "-" + architecture
		if err := errors.Join(os.WriteFile(beside+".spdx.json", sbom, 0o644), os.WriteFile(beside+".licenses.txt", notices, 0o644)); err != nil {
			return "", err
		}
		i.Platforms = append(i.Platforms, image.Platform{OS: system, Architecture: architecture, Files: []image.File{
			{Path: "/isthmus", Mode: 0o755, Content: binary},
			{Path: "/etc/ssl/certs/ca-certificates.crt", Mode: 0o644, Content: roots},
			{Path: "/usr/share/spdx/isthmus.spdx.json", Mode: 0o644, Content: sbom},
			{Path: "/usr/share/licenses/isthmus/LICENSES.txt", Mode: 0o644, Content: notices},
		}})
	}
	out, err := os.Create(o.out)
	if err != nil {
		return "", err
	}
	if digest, err = i.Write(out); err != nil {
		out.Close()
		return "", err
	}
	return digest, out.Close()
}
