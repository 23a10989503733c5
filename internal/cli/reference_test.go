package cli

import (
	"bytes"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

func TestReferenceHasEveryCommandWithItsFlags(t *testing.T) {
	root := &cobra.Command{Use: "program", Long: "It does things."}
	do := &cobra.Command{Use: "do THING", Short: "Do a thing", Example: "  program do it\n  program do more", Run: func(*cobra.Command, []string) {}}
	var output Output
	AddOutputFlag(do, &output, "print for programs", "wide")
	do.Flags().Int("count", 3, "how often")
	do.Flags().Bool("force", false, "whatever it takes")
	secret := &cobra.Command{Use: "secret", Hidden: true, Run: func(*cobra.Command, []string) {}}
	root.AddCommand(do, secret)
	var out, errs bytes.Buffer
	if code := Run(root, []string{"reference"}, strings.NewReader(""), &out, &errs); code != Fine {
		t.Fatalf("code %d, %s", code, &errs)
	}
	const want = "\n## program\n\nIt does things.\n" +
		"\n### program do\n\n```\nprogram do THING [flags]\n```\n\nDo a thing.\n" +
		"\n```\nprogram do it\nprogram do more\n```\n" +
		"\n| flag | value | default | |\n| --- | --- | --- | --- |\n" +
		"| `--count` | int | `3` | how often |\n" +
		"| `--force` | | | whatever it takes |\n" +
		"| `--output`, `-o` | wide\\|json\\|yaml | | print for programs |\n" +
		"\n### program version\n"
	if got := out.String(); !strings.HasPrefix(got, want) {
		t.Errorf("got\n%s\nwant at the beginning\n%s", got, want)
	}
}
