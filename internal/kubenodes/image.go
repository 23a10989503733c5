package kubenodes

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/isthmus-net/isthmus/internal/image"
)

// writeImage writes the archive of an image whose only file is a static program, its entry point.
// user is UID:GID, or empty for root.
func writeImage(path, reference, user, program string) error {
	binary, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	entry := "/" + filepath.Base(program)
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = image.Image{
		Ref: reference, User: user, Created: time.Unix(0, 0), Entrypoint: []string{entry},
		Platforms: []image.Platform{{OS: "linux", Architecture: runtime.GOARCH, Files: []image.File{{Path: entry, Content: binary, Mode: 0o755}}}},
	}.Write(f)
	return errors.Join(err, f.Close())
}
