package main

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

func TestFiguresRoundTrip(t *testing.T) {
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
	if commit("x, commit abc-dirty, y") != commit(f.where) {
		t.Error("the file itself makes another commit")
	}
}
