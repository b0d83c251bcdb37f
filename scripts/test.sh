#!/usr/bin/env bash
# Runs the tests: the quick ones, or with --all the slow ones too. Further arguments go to pytest.
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
