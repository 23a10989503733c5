#!/bin/bash
# fuzz.sh TIME [PACKAGE...] runs every fuzz target of both modules for TIME, one after the other, and prints a table: the
# number of executions, of inputs that reached new code and of all inputs, the seconds, and the coverage of the package. It
# includes inputs of earlier runs, which Go stores in $(go env GOCACHE)/fuzz. A target that fails does not stop the others.
# Go writes the failing input to testdata/fuzz of the package; commit it with the fix.
set -u
time=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
module=github.com/isthmus-net/isthmus
cache=$(go env GOCACHE)/fuzz
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/all"
failed=0

# cover DIR PACKAGE TARGET runs the inputs of a target once and prints their coverage of the package. Go reads inputs from
# testdata only, so the function copies all inputs to one such directory.
cover() {
	local at=$work/inputs data=$work/data inputs
	rm -rf "$at" "$data"
	mkdir -p "$at" "$data"
	inputs=$at/testdata/fuzz/$3
	mkdir -p "$inputs"
	cp -r "$(go -C "$1" list -f '{{.Dir}}' "$2")/testdata/fuzz/$3/." "$cache/$2/$3/." "$inputs" 2>/dev/null
	(cd "$at" && "$work/binary" -test.run "^$3\$" -test.gocoverdir="$data" >/dev/null 2>&1)
	cp "$data"/* "$work/all" 2>/dev/null
	go tool covdata percent -i="$data" 2>/dev/null | sed -n 's/.*coverage: \([0-9.]*%\).*/\1/p' | head -1
}

row='%-24s %-20s %10s %7s %7s %8s %9s  %s\n'
printf "$row" package target execs new inputs seconds coverage '' >"$work/table"
for dir in "$root" "$root/test"; do
	packages=$(go -C "$dir" list "${@:-./...}" 2>/dev/null) || continue
	for pkg in $packages; do
		targets=$(go -C "$dir" test -list '^Fuzz' "$pkg" | grep '^Fuzz') || continue
		what=$pkg # package whose coverage is measured; packages in test/ test the parser
		[ "$dir" = "$root" ] || what=$module/packet
		go -C "$dir" test -c -cover -coverpkg="$what" -o "$work/binary" "$pkg" || failed=1
		for target in $targets; do
			echo "== $pkg $target, $time"
			start=$SECONDS verdict=
			go -C "$dir" test -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 10x "$pkg" 2>&1 | tee "$work/log"
			[ "${PIPESTATUS[0]}" -eq 0 ] || verdict=FAILED failed=1
			seconds=$((SECONDS - start))
			read -r execs new inputs < <(sed -n 's/.*execs: \([0-9]*\).*new interesting: \([0-9]*\) (total: \([0-9]*\)).*/\1 \2 \3/p' "$work/log" | tail -1)
			printf "$row" "${pkg#"$module/"}" "$target" "${execs:--}" "${new:--}" "${inputs:--}" $seconds "$(cover "$dir" "$pkg" "$target")" "$verdict" >>"$work/table"
		done
	done
done
echo
cat "$work/table"
echo
echo "coverage by all targets together:"
go tool covdata percent -i="$work/all"
exit $failed
