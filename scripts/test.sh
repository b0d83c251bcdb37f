#!/usr/bin/env bash
# Runs the quick tests, with --all also the slow ones, with --torch=2.11 under another version of torch, in an
# environment of its own. Three files of tests run at a time on two cores, since ranks wait for each other, and at
# most four (one: -n0); the tests of some files run apart (SPREAD in tests/conftest.py). pytest gets all further
# arguments.
#
#   bash scripts/test.sh [--all] [--torch=VERSION] [tests/data -k resume ...]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
selection=(-m "not slow")
extra="test"
arguments=()
for argument in "$@"; do
    case "$argument" in
        --all)
            selection=()
            extra="dev"
            ;;
        --torch=*) TORCH_VERSION="${argument#*=}" ;;
        *) arguments+=("$argument") ;;
    esac
done
if [[ ! "${TORCH_VERSION:-2.11}" =~ ^2\.[0-9]+(\.[0-9]+)?$ ]]; then
    say "error: --torch ($TORCH_VERSION) must be a version such as 2.11"
    exit 2
fi
use_environment "$extra"
# Without bytecode each process of a test compiles the sources of torch again, half the time of a start.
if [[ -n "${PYTHONDONTWRITEBYTECODE:-}" ]]; then
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$ROOT/.pytest_cache/bytecode}" # not next to the sources
fi
cores="$(getconf _NPROCESSORS_ONLN)"
workers=$((cores > 2 ? 4 : cores * 3 / 2))
exec "$PYTHON" -m pytest -q -n "$workers" --dist=loadfile "${selection[@]}" "${arguments[@]}"
