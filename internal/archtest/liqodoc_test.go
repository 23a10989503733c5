package archtest

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Comments cite facts about Liqo by their section number in docs/liqo-v0.md. Each cited section
// must exist.
func TestCommentsCiteExistingSectionsOfLiqoDocument(t *testing.T) {
	root := filepath.Join("..", "..")
	doc, err := os.ReadFile(filepath.Join(root, "docs", "liqo-v0.md"))
	if err != nil {
		t.Fatal(err)
	}
	headings := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^###? (\d+(?:\.\d+)?)\b`).FindAllStringSubmatch(string(doc), -1) {
		headings[m[1]] = true
	}
	var (
		comment = regexp.MustCompile(`\s*\n\s*// ?`)
		after   = regexp.MustCompile(`docs/liqo-v0\.md(?:, sections? | \(section )(\d+(?:\.\d+)?)(?: and (\d+(?:\.\d+)?))?`)
		before  = regexp.MustCompile(`section (\d+(?:\.\d+)?) of docs/liqo-v0\.md`)
		cited   = 0
	)
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && (name == ".git" || name == "bin") {
			return filepath.SkipDir
		}
		if filepath.Ext(path) != ".go" {
			return nil
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		text := comment.ReplaceAllString(string(src), " ") // a line break may split a citation
		for _, re := range []*regexp.Regexp{after, before} {
			for _, m := range re.FindAllStringSubmatch(text, -1) {
				for _, section := range m[1:] {
					if section == "" {
						continue
					}
					cited++
					if !headings[section] {
						t.Errorf("%s cites section %s of docs/liqo-v0.md, which has none", strings.TrimPrefix(path, root+"/"), section)
					}
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if cited < 20 {
		t.Errorf("found only %d citations: looking in the wrong place", cited)
	}
}
