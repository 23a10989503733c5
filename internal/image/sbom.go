package image

import (
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"runtime/debug"
	"strings"
	"time"
)

// SBOM returns the software bill of materials of a Go binary, as SPDX 2.3 in JSON, and the text of
// all licenses. Both list the modules that the linker recorded in the binary, the version of Go
// that compiled it, and the origin of the certificate authorities. name is the name of the
// document. version is the version of the main module, which the binary lacks if it was built
// without version control. root is the main module's folder.
func SBOM(binary, root, name, version string, authorities []byte, created time.Time) (spdx, text []byte, err error) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return nil, nil, err
	}
	info.Main.Version = version
	origin, err := originOf(authorities)
	if err != nil {
		return nil, nil, err
	}
	licenses, err := licensesOf(info, root)
	if err != nil {
		return nil, nil, err
	}
	licenses[key(origin)] = license{"MPL-2.0", []byte(authoritiesNotice)}
	if spdx, err = sbom(info, origin, licenses, name, created); err != nil {
		return nil, nil, err
	}
	return spdx, notices(info, origin, licenses), nil
}

type spdxDocument struct {
	Version       string             `json:"spdxVersion"`
	License       string             `json:"dataLicense"`
	ID            string             `json:"SPDXID"`
	Name          string             `json:"name"`
	Namespace     string             `json:"documentNamespace"`
	Creation      spdxCreation       `json:"creationInfo"`
	Packages      []spdxPackage      `json:"packages"`
	Relationships []spdxRelationship `json:"relationships"`
}

type spdxCreation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

type spdxPackage struct {
	ID       string    `json:"SPDXID"`
	Name     string    `json:"name"`
	Version  string    `json:"versionInfo,omitempty"`
	Location string    `json:"downloadLocation"`
	Analyzed bool      `json:"filesAnalyzed"`
	License  string    `json:"licenseConcluded"`
	Declared string    `json:"licenseDeclared"`
	Rights   string    `json:"copyrightText"`
	Comment  string    `json:"comment,omitempty"`
	Refs     []spdxRef `json:"externalRefs,omitempty"`
}

type spdxRef struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type spdxRelationship struct {
	Element string `json:"spdxElementId"`
	Type    string `json:"relationshipType"`
	Related string `json:"relatedSpdxElement"`
}

func sbom(info *debug.BuildInfo, origin *debug.Module, licenses map[string]license, name string, created time.Time) ([]byte, error) {
	setting := func(key string) string {
		for _, s := range info.Settings {
			if s.Key == key {
				return s.Value
			}
		}
		return ""
	}
	d := spdxDocument{
		Version: "SPDX-2.3", License: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: name,
		Namespace: fmt.Sprintf("https://%s/spdx/%s-%s-%s", info.Main.Path, name, info.Main.Version, setting("GOARCH")),
		Creation:  spdxCreation{created.UTC().Format(time.RFC3339), []string{"Tool: isthmus-internal-image"}},
	}
	add := func(id string, m debug.Module) {
		p := spdxPackage{ID: id, Name: m.Path, Version: m.Version, Location: "NOASSERTION",
			License: licenses[key(&m)].expression, Declared: "NOASSERTION", Rights: "NOASSERTION",
			Refs: []spdxRef{{"PACKAGE-MANAGER", "purl", "pkg:golang/" + m.Path + "@" + strings.ReplaceAll(m.Version, "+", "%2B")}}}
		if m.Sum != "" {
			p.Comment = "go.sum " + m.Sum
		}
		d.Packages = append(d.Packages, p)
	}
	const root = "SPDXRef-isthmus"
	add(root, info.Main)
	d.Relationships = append(d.Relationships, spdxRelationship{d.ID, "DESCRIBES", root})
	depends := func(on string) {
		d.Relationships = append(d.Relationships, spdxRelationship{root, "DEPENDS_ON", on})
	}
	for n, m := range info.Deps {
		id := fmt.Sprintf("SPDXRef-module-%d", n+1)
		add(id, *effective(m))
		depends(id)
	}
	add("SPDXRef-go", *goModule(info))
	depends("SPDXRef-go")
	const authorities = "SPDXRef-authorities"
	add(authorities, *origin)
	d.Packages[len(d.Packages)-1].Comment = authoritiesNotice
	d.Relationships = append(d.Relationships, spdxRelationship{d.ID, "DESCRIBES", authorities})
	return json.MarshalIndent(d, "", " ")
}
