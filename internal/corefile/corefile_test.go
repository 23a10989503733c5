package corefile

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The files testdata/*.in are the Corefiles of common installers, and one for each special case
// of Add. testdata/NAME.want is NAME with the zone.
func TestRemoveRevertsAdd(t *testing.T) {
	files, err := filepath.Glob("testdata/*.in")
	if err != nil || len(files) < 5 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, file := range files {
		in, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(strings.TrimSuffix(file, ".in") + ".want")
		if err != nil {
			t.Fatal(err)
		}
		got, err := Add(string(in))
		if err != nil || got != string(want) {
			t.Errorf("%s: %v\n%s", file, err, got)
		}
		if back, err := Remove(got); err != nil || back != string(in) {
			t.Errorf("%s: not as it was: %v\n%s", file, err, back)
		}
		check(t, string(in))
		check(t, strings.ReplaceAll(string(in), "\n", "\r\n"))
	}
}

// check checks the properties that must hold for every text.
func check(t *testing.T, in string) {
	t.Helper()
	out, err := Add(in)
	if err != nil {
		if out != "" {
			t.Errorf("with an error: %q", out)
		}
		return
	}
	if is, err := Serves(out); !is || err != nil {
		t.Errorf("%q: does not serve the zone: %v", out, err)
	}
	if again, err := Add(out); again != out || err != nil {
		t.Errorf("%q: the second time: %q, %v", out, again, err)
	}
	if !Multicluster(out) {
		t.Errorf("%q has no multicluster", out)
	}
	if Marked(in) {
		return
	}
	if back, err := Remove(out); back != in || err != nil {
		t.Errorf("%q became %q, then %q: %v", in, out, back, err)
	}
	// The tokens that CoreDNS reads must differ only by the added words.
	before, err := lex(in)
	if err != nil {
		t.Fatal(err)
	}
	after, err := lex(out)
	if err != nil {
		t.Fatal(err)
	}
	var added []string
	for _, word := range after {
		if len(before) > 0 && word.text == before[0].text {
			before = before[1:]
		} else {
			added = append(added, word.text)
		}
	}
	slices.Sort(added)
	expected := false
	for _, zone := range []string{"", option + " " + Zone, Zone + " " + option + " " + Zone, Zone + " { " + option + " " + Zone + " }"} {
		for _, cache := range []string{"", Zone, "disable denial " + Zone, "{ disable denial " + Zone + " }"} {
			words := strings.Fields(zone + " " + cache)
			slices.Sort(words)
			expected = expected || slices.Equal(added, words)
		}
	}
	if !expected {
		t.Errorf("%q: %q has more: %q", in, out, added)
	}
	if len(before) > 0 {
		t.Errorf("%q: %q lacks %q", in, out, before[0].text)
	}
}

func FuzzAdd(f *testing.F) {
	files, err := filepath.Glob("testdata/*.*")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil {
			f.Add(string(text))
		}
	}
	f.Add("a {\nkubernetes \"x\"{\n}\n}")
	f.Fuzz(check)
}

func TestUnparsableCorefileIsAnError(t *testing.T) {
	for in, want := range map[string]string{
		"":                              "empty",
		"# nothing":                     "empty",
		".:53 {\n forward . 9.9.9.9\n}": "not 0 times",
		".:53 {\n kubernetes {\n pods insecure\n }\n}":                        "names no zones",
		".:53 {\n kubernetes a {\n }\n kubernetes b {\n }\n}":                 "not 2 times",
		".:53 {\n kubernetes a {\n multicluster other.zone\n }\n}":            "already has the option multicluster",
		".:53 {\n kubernetes a {\n multicluster\n }\n}":                       "already has the option multicluster",
		".:53 {\n kubernetes a {\n multicluster clusterset.local\n }\n}":      "already has the option multicluster",
		".:53 {\n kubernetes a {\n multicluster b\n multicluster c\n }\n}":    "appears twice",
		".:53 {\n kubernetes a { pods insecure\n }\n}":                        "want a space before the opening brace",
		".:53 {\n kubernetes \"a\"{\n }\n}":                                   "want a space before the opening brace",
		".:53 {\n kubernetes clusterset.local\n}":                             "add a block",
		".:53 {\n kubernetes a\n {\n }\n}":                                    "want the opening brace on the line",
		"cluster.local:53 {\n kubernetes a\n}":                                "no server block answers",
		"tls://.:853 {\n kubernetes a\n}":                                     "no server block answers",
		".:1053 .:2053 {\n kubernetes a\n}":                                   "1053, 2053",
		".:53 {\n kubernetes a\n}\n. {\n kubernetes a\n}":                     "two server blocks",
		".:53 {\n kubernetes a\n}\nclusterset.local {\n forward . 1.1.1.1\n}": "not 0 times",
		"(s) {\n kubernetes a {\n }\n}\n.:53 {\n import s\n}":                 "in a snippet",
		"{$ZONE}:53 {\n kubernetes a\n}":                                      "not the plain name",
		".:53\nkubernetes a\n":                                                "braces",
		".:53 {\n kubernetes a {\n }\n":                                       "no closing brace",
		".:53 {\n kubernetes a {\n } b\n}":                                    "after the closing brace",
		".:53 {\n kubernetes a\n}}":                                           "no closing brace",
		".:53 {\n kubernetes \"a\nb\" {\n }\n}":                               "quoted word",
		".:53 {\n kubernetes a\u00a0b {\n }\n}":                               "ASCII",
		".:53 {\n kubernetes a\rb {\n }\n}":                                   "ASCII",
		"import":                                                              "import without a name",
		".:53 {\n kubernetes a clusterset.local {\n multicluster b clusterset.local " + markZone + "\n }\n}": "were changed",
		".:53 {\n kubernetes a {\n multicluster clusterset.local " + markZone + "\n }\n}":                    "among its zones",
		".:53 {\n kubernetes a clusterset.local {\n multicluster clusterset.local " + mark + "?\n }\n}":      "was changed",
		".:53 {\n kubernetes a {\n pods insecure " + mark + "\n }\n}":                                        "is not on the line of plugin kubernetes",
	} {
		do := Add
		if Marked(in) {
			do = Remove
		}
		if out, err := do(in); out != "" || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %q, %v; want %q", in, out, err, want)
		}
	}
}

// Remove keeps lines that a user has added, and changes that a user made beside ours.
func TestRemoveKeepsChangesByUsers(t *testing.T) {
	const ours, block = " # added by isthmus install, with the zone", " and this block"
	for in, want := range map[string]string{
		".:53 {\n kubernetes a clusterset.local {\n multicluster clusterset.local\n }\n}":                                "",
		".:53 {\n kubernetes a clusterset.local b {\n ttl 5\n multicluster clusterset.local" + ours + "\n pods x\n }\n}": ".:53 {\n kubernetes a b {\n ttl 5\n pods x\n }\n}",
		".:53 {\n kubernetes a clusterset.local {\n multicluster clusterset.local" + ours + block + "\n pods x\n }\n}":   ".:53 {\n kubernetes a {\n pods x\n }\n}",
		".:53 {\n kubernetes a clusterset.local {\n multicluster clusterset.local " + mark + "\n }\n}":                   ".:53 {\n kubernetes a clusterset.local {\n }\n}",
	} {
		if want == "" {
			want = in
		}
		if got, err := Remove(in); got != want || err != nil {
			t.Errorf("%q: %q, %v; want %q", in, got, err, want)
		}
	}
}

func TestAddExcludesZoneFromNegativeCache(t *testing.T) {
	const server, end, ours = ".:53 {\n kubernetes clusterset.local {\n multicluster clusterset.local\n }\n", "}\n", " # added by isthmus install"
	for in, want := range map[string]string{
		" cache\n":                              " cache {\n     disable denial clusterset.local" + ours + ", with this block\n }\n",
		" cache 30 # why\n":                     " cache 30 {\n     disable denial clusterset.local" + ours + ", with this block\n } # why\n",
		" cache {\n }\n":                        " cache {\n     disable denial clusterset.local" + ours + "\n }\n",
		" cache 30 local {\n  prefetch 1\n }\n": " cache 30 local {\n  disable denial clusterset.local" + ours + "\n  prefetch 1\n }\n",
		" cache {\n  disable denial a\n  disable denial b # why\n }\n": " cache {\n  disable denial a\n  disable denial b clusterset.local # why" + ours + ", with the zone\n }\n",
		// Add changes nothing if the cache already does not store missing names of the zone, or if
		// the Corefile does not show whether it does.
		" cache {\n  disable denial\n }\n":              "",
		" cache {\n  disable denial a Local.\n }\n":     "",
		" cache 30 cluster.local\n":                     "",
		" cache 30\n cache 60\n":                        "",
		" cache 30 { prefetch 1\n }\n":                  "",
		" forward . 9.9.9.9\n":                          "",
		" cache {\n  disable denial a\n }\n import b\n": " cache {\n  disable denial a clusterset.local" + ours + ", with the zone\n }\n import b\n",
	} {
		if want == "" {
			want = in
		}
		out, err := Add(server + in + end)
		if err != nil || out != server+want+end {
			t.Errorf("%q: %q, %v; want %q", in, out, err, server+want+end)
		}
		if back, err := Remove(out); err != nil || back != server+in+end {
			t.Errorf("%q: not as it was: %q, %v", in, back, err)
		}
	}
	// Remove keeps changes that a user made beside ours.
	for in, want := range map[string]string{
		" cache {\n disable denial clusterset.local" + ours + ", with this block\n prefetch 1\n }\n": " cache {\n prefetch 1\n }\n",
		" cache {\n disable denial a clusterset.local b" + ours + ", with the zone\n }\n":            " cache {\n disable denial a b\n }\n",
	} {
		if got, err := Remove(server + in + end); err != nil || got != server+want+end {
			t.Errorf("%q: %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{
		" cache {\n disable denial clusterset.local" + ours + ", with the zone\n }\n",
		" cache {\n disable denial a clusterset.local" + ours + ", with the zone?\n }\n",
	} {
		if out, err := Remove(server + in + end); out != "" || err == nil || !strings.Contains(err.Error(), "was changed") {
			t.Errorf("%q: %q, %v", in, out, err)
		}
	}
}

func TestServesMatchesZonesLikeCoreDNS(t *testing.T) {
	for in, want := range map[string]bool{
		".:53 {\n kubernetes cluster.local ClusterSet.local. {\n multicluster clusterset.local.\n }\n}":                                true,
		".:53 {\n kubernetes a {\n }\n}\nclusterset.local:53 {\n kubernetes clusterset.local {\n multicluster clusterset.local\n }\n}": true,
		".:53 {\n kubernetes a clusterset.local {\n multicluster clusterset.local\n }\n}\nlocal:53 {\n kubernetes a\n}":                false,
		".:53 {\n kubernetes a clusterset.local {\n # multicluster clusterset.local\n }\n}":                                            false,
		"dns://.:1053 {\n kubernetes a clusterset.local {\n multicluster clusterset.local\n }\n}\nimport custom/*.server":              true,
	} {
		if got, err := Serves(in); got != want || err != nil {
			t.Errorf("%q: %v, %v", in, got, err)
		}
		if got, commented := Multicluster(in), strings.Contains(in, "#"); got == commented {
			t.Errorf("%q: has multicluster: %v", in, got)
		}
	}
}
