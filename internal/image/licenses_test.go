package image

import (
	"crypto/x509"
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/testbin"
)

func TestLicensesAreRecognizedByTheirText(t *testing.T) {
	const (
		bsd     = "Redistribution and use in source and binary forms, with or without\nmodification, are permitted provided that"
		mit     = "Permission is hereby granted, free of\n// charge, to any person"
		apache  = "                                 Apache License\n                           Version 2.0, January 2004\n"
		mozilla = "Mozilla Public License Version 2.0 ... the GNU General Public License, Version 2.0"
	)
	for text, want := range map[string]string{
		bsd: "BSD-2-Clause",
		bsd + " to endorse or promote products derived from": "BSD-3-Clause",
		mit:                          "MIT",
		apache:                       "Apache-2.0",
		mit + apache:                 "Apache-2.0 AND MIT",
		mozilla:                      "MPL-2.0",
		"GNU General Public License": "",
		mit + " the GNU LESSER GENERAL PUBLIC LICENSE": "",
		"all rights reserved":                          "",
		"":                                             "",
	} {
		if got, err := expressionOf([]byte(text)); got != want || (err == nil) != (want != "") {
			t.Errorf("%.40q: %q, %v; want %q", text, got, err, want)
		}
	}
}

// authorities returns the certificate authorities with their origin in the first line. That line
// must not prevent parsing the rest.
func authorities(t *testing.T, root string) []byte {
	t.Helper()
	cmd := exec.Command("go", "run", "-C", "internal/tools", "./roots")
	cmd.Dir = root
	text, err := cmd.Output()
	if err != nil || !x509.NewCertPool().AppendCertsFromPEM(text) {
		t.Fatalf("go run ./roots: %v\n%.200s", err, text)
	}
	return text
}

func TestCertificateAuthoritiesWithoutOriginAreRejected(t *testing.T) {
	for _, text := range []string{"", "-----BEGIN CERTIFICATE-----\n", "# example.org/roots\n"} {
		if m, err := originOf([]byte(text)); err == nil {
			t.Errorf("%q is from %v", text, m)
		}
	}
}

// The modules according to the go command must be the modules that the linker recorded.
func TestIsthmusSBOMListsEachModuleWithItsLicense(t *testing.T) {
	root, err := testbin.Root()
	if err != nil {
		t.Fatal(err)
	}
	binary, err := testbin.Isthmus(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	text, notices, err := SBOM(binary, root, "isthmus", "v0", authorities(t, root), example.Created)
	if err != nil {
		t.Fatal(err)
	}
	var d spdxDocument
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range d.Packages {
		if p.License == "" {
			t.Errorf("%s %s has no license", p.Name, p.Version)
		}
		if p.ID == "SPDXRef-isthmus" {
			continue
		}
		if !strings.Contains(string(notices), "\n"+p.Name+" "+p.Version+"\n\n") {
			t.Errorf("the notices lack the text of %s %s", p.Name, p.Version)
		}
		if p.Name != "stdlib" {
			got = append(got, p.Name+"@"+p.Version)
		}
	}
	const roots = "golang.org/x/crypto/x509roots/fallback"
	cmd := exec.Command("go", "list", "-C", "internal/tools", "-m", "-f", "{{.Path}}@{{.Version}}", roots)
	cmd.Dir = root
	origin, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range d.Packages {
		if p.Name == roots && p.License != "MPL-2.0" {
			t.Errorf("license of Mozilla's certificate authorities: %q", p.License)
		}
	}
	cmd = exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}}@{{.Version}}{{end}}{{end}}", "./cmd/isthmus")
	cmd.Dir = root
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	want := append(strings.Fields(string(out)), strings.TrimSpace(string(origin)))
	slices.Sort(want)
	slices.Sort(got)
	if want = slices.Compact(want); !slices.Equal(got, want) {
		t.Errorf("modules of the SBOM:\n%q\nof the packages:\n%q", got, want)
	}
}
