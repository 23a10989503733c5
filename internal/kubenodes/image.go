package kubenodes

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
)

// WriteImage writes a docker-save archive (what `ctr images import` takes) of an image with nothing
// but one static program, which is its entry point. Files of equal programs are equal.
func WriteImage(path, reference, program string) error {
	binary, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	name := filepath.Base(program)
	layer, err := tarOf(file{name, binary, 0o755})
	if err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": []string{"/" + name}, "Env": []string{"PATH=/"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + sum(layer)}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]map[string]any{{
		"Config": sum(config) + ".json", "RepoTags": []string{reference}, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return err
	}
	archive, err := tarOf(file{"layer.tar", layer, 0o644}, file{sum(config) + ".json", config, 0o644}, file{"manifest.json", manifest, 0o644})
	if err != nil {
		return err
	}
	return os.WriteFile(path, archive, 0o644)
}

type file struct {
	name    string
	content []byte
	mode    int64
}

func tarOf(files ...file) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.content))}); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return b.Bytes(), err
}

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}
