#!/usr/bin/env bash
# Puts small faults into a copy of the code, one at a time, and shows which of them the quick tests notice. If
# it was stopped, it continues where it stopped.
#
#   bash scripts/mutate.sh --sample=60 --seed=1 [--budget_s=300] [--nearest] [--work=FOLDER]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
use_environment dev
exec "$PYTHON" -m tests.mutate "$@"
