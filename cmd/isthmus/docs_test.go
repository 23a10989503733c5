package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every command that a page shows must exist, with the flags and arguments shown. Other tests
// run the commands on clusters (test/nodes runs those of docs/lifecycle.md).
func TestCommandsOfTheDocumentationExist(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`(?m)^    isthmus (.*)$`)
	commands := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		if filepath.Base(page) == "cli.md" {
			continue // generated from the commands
		}
		for _, m := range line.FindAllStringSubmatch(string(text), -1) {
			command, _, _ := strings.Cut(m[1], " #")
			command, _, _ = strings.Cut(command, " >")
			commands++
			cmd, args, err := newRootCommand().Find(strings.Fields(command))
			if err == nil {
				err = cmd.ParseFlags(args)
			}
			if err == nil {
				err = cmd.ValidateArgs(cmd.Flags().Args())
			}
			if err != nil {
				t.Errorf("%s: isthmus %s: %v", filepath.Base(page), command, err)
			}
		}
	}
	if commands < 10 {
		t.Errorf("%d commands", commands)
	}
}
