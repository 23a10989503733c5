package image

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
)

// A license is the license of one module: its SPDX expression and the files that must be
// distributed with it.
type license struct {
	expression string
	text       []byte
}

// marks has, for each known license, a sentence that every copy of the license contains. Before the
// comparison, sequences of white space and comment characters are replaced by one blank.
var marks = []struct{ id, sentence string }{
	{"Apache-2.0", "Apache License Version 2.0"},
	{"Apache-2.0", "Licensed under the Apache License, Version 2.0"},
	{"ISC", "Permission to use, copy, modify, and distribute this software for any purpose with or without fee"},
	{"ISC", "Permission to use, copy, modify, and or distribute this software for any purpose with or without fee"},
	{"MIT", "Permission is hereby granted, free of charge"},
	{"MPL-2.0", "Mozilla Public License Version 2.0"},
	{"BSD-2-Clause", "Redistribution and use in source and binary forms, with or without modification, are permitted"},
}

var (
	noticeFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents)`)
	blanks     = regexp.MustCompile(`[\s*#/]+`)
	copyleft   = regexp.MustCompile(`(?i)general public license`)
)

// expressionOf returns the SPDX expression for the text of a module's license files. It returns an
// error for an unknown text, and for a copyleft license, which a static binary must not link.
func expressionOf(text []byte) (string, error) {
	plain := string(blanks.ReplaceAll(text, []byte(" ")))
	var ids []string
	for _, m := range marks {
		id := m.id
		if !strings.Contains(plain, m.sentence) {
			continue
		}
		if id == "BSD-2-Clause" && strings.Contains(plain, "endorse or promote products derived") {
			id = "BSD-3-Clause"
		}
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	switch {
	case len(ids) == 0:
		return "", fmt.Errorf("unknown license: %.80q", plain)
	case copyleft.MatchString(plain) && !slices.Contains(ids, "MPL-2.0"): // the MPL mentions the GPL as a secondary license
		return "", fmt.Errorf("mentions the GPL: %.80q", plain)
	}
	slices.Sort(ids)
	return strings.Join(ids, " AND "), nil
}

// licensesOf finds the licenses of all modules of a binary, of Go itself (stdlib), and of the main
// module in root. The keys are "PATH@VERSION". It runs `go mod download` to find the modules'
// folders.
func licensesOf(info *debug.BuildInfo, root string) (map[string]license, error) {
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOROOT: %w", err)
	}
	dirs := map[string]string{
		key(&info.Main):     root,
		key(goModule(info)): strings.TrimSpace(string(goroot)),
	}
	if len(info.Deps) > 0 {
		args := []string{"mod", "download", "-json"}
		for _, m := range info.Deps {
			args = append(args, key(effective(m)))
		}
		cmd := exec.Command("go", args...)
		cmd.Dir, cmd.Stderr = root, os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("go mod download: %w", err)
		}
		for d := json.NewDecoder(bytes.NewReader(out)); d.More(); {
			var m struct{ Path, Version, Dir string }
			if err := d.Decode(&m); err != nil {
				return nil, fmt.Errorf("go mod download: %w", err)
			}
			dirs[m.Path+"@"+m.Version] = m.Dir
		}
	}
	found := map[string]license{}
	for name, dir := range dirs {
		if found[name], err = licenseIn(dir); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return found, nil
}

func licenseIn(dir string) (l license, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return l, err
	}
	for _, e := range entries { // sorted by name
		if e.IsDir() || !noticeFile.MatchString(e.Name()) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return l, err
		}
		l.text = append(append(l.text, text...), '\n')
	}
	l.expression, err = expressionOf(l.text)
	return l, err
}

// notices returns the text that must accompany the program and the certificate authorities. It
// lists each module with the text of its license.
func notices(info *debug.BuildInfo, origin *debug.Module, licenses map[string]license) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "isthmus is under the Apache License 2.0. Its image contains these modules:\n\n")
	modules := append(slices.Clone(info.Deps), goModule(info), origin)
	for _, m := range modules {
		m = effective(m)
		fmt.Fprintf(&b, "  %s %s: %s\n", m.Path, m.Version, licenses[key(m)].expression)
	}
	for _, m := range modules {
		m = effective(m)
		fmt.Fprintf(&b, "\n%s\n%s %s\n\n%s", strings.Repeat("=", 80), m.Path, m.Version, licenses[key(m)].text)
	}
	return b.Bytes()
}

// authoritiesNotice is the notice that the Mozilla Public License requires for the certificate
// authorities.
const authoritiesNotice = `Of this module the image contains only the certificate authorities of Mozilla's NSS, in
/etc/ssl/certs/ca-certificates.crt. They are subject to the terms of the Mozilla Public License,
v. 2.0, which you can obtain at https://mozilla.org/MPL/2.0/. Their source is
https://hg.mozilla.org/projects/nss/file/tip/lib/ckfw/builtins/certdata.txt.
`

// originOf returns the module from which the certificate authorities come. Their first line has its
// name and version, which internal/tools/roots has written.
func originOf(authorities []byte) (*debug.Module, error) {
	line, _, _ := strings.Cut(string(authorities), "\n")
	if f := strings.Fields(line); len(f) == 3 && f[0] == "#" {
		return &debug.Module{Path: f[1], Version: f[2]}, nil
	}
	return nil, fmt.Errorf("certificate authorities: first line %.80q: want # MODULE VERSION", line)
}

// goModule returns a module that stands for Go's standard library. It is in every binary but not in
// the list of the binary's modules.
func goModule(info *debug.BuildInfo) *debug.Module {
	return &debug.Module{Path: "stdlib", Version: strings.TrimPrefix(info.GoVersion, "go")}
}

// effective returns the module that the linker used for m: the replacement of m if there is one.
func effective(m *debug.Module) *debug.Module {
	if m.Replace != nil {
		return m.Replace
	}
	return m
}

func key(m *debug.Module) string { return m.Path + "@" + m.Version }
