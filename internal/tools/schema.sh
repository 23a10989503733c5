#!/bin/sh
# schema.sh updates deploy/crds/SCHEMA: a number that grows with each change of the custom resource definitions, and
# their digest. `isthmus install` compares the number with that of the cluster's definitions, and does not replace newer
# ones. `make generate` runs the script after the generator.
set -e
export LC_ALL=C
cd "$(dirname "$0")/../../deploy/crds"
digest=$(cat ./*.yaml | sha256sum | cut -d' ' -f1)
number=$(sed -n 1p SCHEMA 2>/dev/null || echo 0) known=$(sed -n 2p SCHEMA 2>/dev/null || true)
[ "$digest" = "$known" ] || printf '%d\n%s\n' "$((number + 1))" "$digest" >SCHEMA
