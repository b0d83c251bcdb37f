#!/usr/bin/env bash
# Checks format, lint and types; changes no file.
# To correct the format: .venv/bin/ruff format . && .venv/bin/ruff check --fix .
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
use_environment dev
failed=0
"$PYTHON" -m ruff format --check . || failed=1
"$PYTHON" -m ruff check . || failed=1
"$PYTHON" -m mypy || failed=1
exit "$failed"
