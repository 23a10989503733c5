#!/bin/sh
# progress.sh ARG... runs `go build -v ARG...` and prints its progress every few seconds, to show that a slow build has not
# stopped. It also prints the compiler's messages.
{ go build -v "$@" 2>&1 || echo "build failed"; } | {
	modules=0 packages=0 last=$(date +%s)
	while IFS= read -r line; do
		case $line in
		"build failed") exit 1 ;;
		"go: downloading "*) modules=$((modules + 1)) what="$modules modules downloaded" ;;
		*[[:space:]:]*) printf '%s\n' "$line" && continue ;;
		*) packages=$((packages + 1)) what="$packages packages compiled, now $line" ;;
		esac
		now=$(date +%s)
		[ $((now - last)) -lt 5 ] || { echo "go build: $what" && last=$now; }
	done
}
