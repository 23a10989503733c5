#!/bin/sh
# schema.sh keeps deploy/crds/SCHEMA: a number that grows with each change of the custom resource definitions, and their
# digest. By the number `isthmus install` sees that a cluster has newer ones. `make generate` runs it after the generator.
set -e
export LC_ALL=C
cd "$(dirname "$0")/../../deploy/crds"
digest=$(cat ./*.yaml | sha256sum | cut -d' ' -f1)
number=$(sed -n 1p SCHEMA 2>/dev/null || echo 0) known=$(sed -n 2p SCHEMA 2>/dev/null || true)
[ "$digest" = "$known" ] || printf '%d\n%s\n' "$((number + 1))" "$digest" >SCHEMA
