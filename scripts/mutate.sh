#!/usr/bin/env bash
# Puts small faults into a copy of the code, one at a time, and shows which of them the tests notice. If it was
# stopped, it continues where it stopped.
#
#   bash scripts/mutate.sh --sample=60 --seed=1           60 faults, and the quick tests that run their lines
#   bash scripts/mutate.sh --per_package=10 --nearest     10 faults of each package, and its quick tests
#   bash scripts/mutate.sh --faults=VERDICTS.jsonl ...    the faults of an earlier run again
#
# More options: --slow (slow tests for faults that survive), --work=FOLDER (copies and verdicts), and the seconds
# per fault --budget_s=600 (quick tests), --slow_budget_s=1200, --hang_s=400 (a test without output).
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
use_environment dev
exec "$PYTHON" -m tests.mutate "$@"
