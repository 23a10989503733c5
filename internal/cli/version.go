package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

// release is the version of a release build. The linker sets it: -ldflags "-X
// github.com/isthmus-net/isthmus/internal/cli.release=v1.2.3".
var release string

// versionLine is the output of "version" and "--version".
func versionLine(program string) string {
	return fmt.Sprintf("%s %s %s %s/%s\n", program, Version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

func versionCommand() *cobra.Command {
	var output Output
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output.ForPrograms() {
				return output.Print(cmd.OutOrStdout(), map[string]string{"version": Version(), "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH})
			}
			_, err := fmt.Fprint(cmd.OutOrStdout(), versionLine(cmd.Root().Name()))
			return err
		},
	}
	AddOutputFlag(cmd, &output, "print for programs")
	return cmd
}

// Version returns the release, or the commit that the build recorded.
func Version() string {
	if release != "" {
		return release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	revision, modified := "", ""
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			revision = s.Value[:min(12, len(s.Value))]
		case "vcs.modified":
			if s.Value == "true" {
				modified = "-modified"
			}
		}
	}
	if revision == "" {
		return info.Main.Version
	}
	return revision + modified
}

// ImageTag returns the tag of the image that was built with this program. The tag is also a label
// of the Pods.
func ImageTag() string { return tagOf(Version()) }

// tagOf converts a version to a valid image tag and label value. Go calls a build outside of a
// repository "(devel)", and uses + in versions.
func tagOf(version string) string { return strings.ReplaceAll(strings.Trim(version, "()"), "+", "-") }
