package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every command of the program that a page shows is one that it has, with the flags and arguments
// that it takes. What the commands do is tested on clusters (docs/lifecycle.md by test/nodes).
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
			continue // made from the commands
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
