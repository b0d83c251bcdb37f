# shellcheck shell=bash
# Finds or makes a Python that has the project's packages; sourced by the other scripts.
#
#   source scripts/environment.sh        # sets ROOT, the repository
#   use_environment [EXTRA ...]          # sets PYTHON; EXTRA is one of pyproject.toml, such as dev
#
# Taken is, in this order: PYTHON if it is set, the active environment if it has all packages, .venv in the repository, which is made
# where it is missing. What a site needs first (modules, proxies, NCCL_SOCKET_IFNAME) goes into scripts/site.sh, read here if it is there. On a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves gigabytes.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=/dev/null
[[ ! -f "$ROOT/scripts/site.sh" ]] || source "$ROOT/scripts/site.sh"

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
give_up() { say "error: $*"; exit 1; }

# Sets the variable named $1 to the whole number that it holds, or to $2 where it is empty; anything but a number from $3 to $4 ends the script
# here. What comes from outside is checked before any arithmetic, which would run the commands in it.
check_number() {
    local text="${!1:-$2}"
    [[ -n "$text" ]] || return 0
    if [[ ! "$text" =~ ^[0-9]{1,9}$ ]] || ((10#$text < $3 || 10#$text > $4)); then
        say "error: $1 ($(printf '%.100q' "$text")) must be a whole number from $3 to $4; unset it or mend it"
        exit 2
    fi
    printf -v "$1" '%d' "$((10#$text))"
}

# Whether the Python given meets pyproject.toml and the extras; silent and well under a second.
satisfies() {
    local python="$1"
    shift
    command -v "$python" >/dev/null && "$python" -c '
import importlib.metadata as metadata, sys
if sys.version_info < (3, 11):
    sys.exit(1)
import tomllib
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
for line in sum((project["optional-dependencies"][extra] for extra in sys.argv[2:]), project["dependencies"]):
    needed = Requirement(line)
    if not needed.specifier.contains(metadata.version(needed.name), prereleases=True):
        sys.exit(1)
' "$ROOT/pyproject.toml" "$@" 2>/dev/null
}

# Of several nodes (srun, or NODE_RANK without SLURM) the first one tells the results.
is_first_node() { [[ "${SLURM_PROCID:-${NODE_RANK:-0}}" == 0 ]]; }

# Runs a command that makes what nodes, jobs and terminals share: one at a time, the others wait and then find it made.
under_lock() {
    (
        flock -w 1800 9 || say "no lock on $ROOT/.setup.lock; going on without"
        "$@"
    ) 9>"$ROOT/.setup.lock"
}

newest_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "$candidate"
            return
        fi
    done
    give_up "no python3 of version 3.11 or later on PATH; install one, or set PYTHON"
}

use_environment() {
    if [[ -n "${PYTHON:-}" ]]; then
        satisfies "$PYTHON" "$@" || give_up "PYTHON ($PYTHON) lacks packages of pyproject.toml; install them or unset it"
        return
    fi
    local candidate
    for candidate in python3 "$ROOT/.venv/bin/python"; do
        if satisfies "$candidate" "$@"; then
            PYTHON="$candidate"
            return
        fi
    done
    PYTHON="$ROOT/.venv/bin/python"
    under_lock make_environment "$@"
}

make_environment() {
    satisfies "$PYTHON" "$@" && return
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        local base
        base="$(newest_python)"
        say "making an environment in .venv with $("$base" --version)"
        "$base" -m venv "$ROOT/.venv" || give_up "python venv failed; install python3-venv, or activate an environment of yours"
    fi
    local extras
    extras="$(IFS=,; echo "$*")"
    say "installing packages into .venv${extras:+ ($extras)}; once, a minute or more"
    "$PYTHON" -m pip install -qq --no-input --disable-pip-version-check \
        --constraint "$ROOT/constraints.txt" --editable "$ROOT${extras:+[$extras]}" ||
        give_up "pip could not install the packages; see its message above"
    satisfies "$PYTHON" "$@" || give_up ".venv still lacks packages of pyproject.toml; remove the folder .venv and try again"
}
