#!/bin/sh
# progress.sh ARG... runs `go build -v ARG...` and says every few seconds how far it is, so that a slow build does not look
# like a hanging one. What the compiler has to say is passed on.
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
