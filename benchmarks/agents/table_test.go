package main

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

func TestFiguresAreReadAsTheyAreWritten(t *testing.T) {
	f := figures{where: "CPU, commit abc, 2026-11-23; CPU seconds of the process route-agent.", all: []*result{
		{size{100, 20, 10}, []row{{"watches", "5"}, {"at rest: CPU, of a core", "0.02 %"}}},
		{size{5000, 20, 1000}, []row{{"watches", "7"}, {"at rest: CPU, of a core", "0.15 %"}}},
	}}
	name := filepath.Join(t.TempDir(), "after.md")
	if err := os.WriteFile(name, []byte(f.text()), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := readFigures(name)
	if err != nil || !reflect.DeepEqual(got, f) {
		t.Fatalf("%+v, %v; want %+v", got, err, f)
	}
	if v := got.all[1].number("at rest: CPU, of a core"); v != 0.15 {
		t.Errorf("%v, want 0.15", v)
	}
	if commit("x, commit abc-dirty, y") != commit(f.where) {
		t.Error("the file itself makes another commit")
	}
}

func TestThePageIsWhatTheFilesSay(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{beforeFile, afterFile, pageFile} {
		b, err := os.ReadFile(filepath.Join("../..", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := page(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{pageFile, plotFile} {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(filepath.Join("../..", name))
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != string(want) {
			t.Errorf("%s is not what the files say; want go run ./benchmarks/agents -docs .", name)
		}
	}
}
