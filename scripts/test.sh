#!/usr/bin/env bash
# Runs the quick tests, with --all also the slow ones. pytest gets all further arguments.
#
#   bash scripts/test.sh [--all] [tests/data -k resume ...]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
use_environment dev
selection=(-m "not slow")
arguments=()
for argument in "$@"; do
    if [[ "$argument" == --all ]]; then
        selection=()
    else
        arguments+=("$argument")
    fi
done
exec "$PYTHON" -m pytest -q "${selection[@]}" "${arguments[@]}"
