# shellcheck shell=bash
# Finds or makes a Python that has the project's packages. The other scripts source this file.
#
#   source scripts/environment.sh        # sets ROOT, the repository
#   use_environment [EXTRA ...]          # sets PYTHON; EXTRA is one of pyproject.toml, such as dev
#
# It takes PYTHON if that is set, otherwise the active environment if that has all packages, otherwise .venv
# in the repository, which it makes if it is missing. If the script then sets TORCH_VERSION, such as 2.11, it
# takes .venv-torch-2.11, with the newest torch of that version.
#
# Write the settings of a site (modules, proxies, NCCL_SOCKET_IFNAME) into scripts/site.sh, which this file
# reads if it exists. On a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# saves gigabytes.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV=.venv TORCH_VERSION=""
# shellcheck source=/dev/null
[[ ! -f "$ROOT/scripts/site.sh" ]] || source "$ROOT/scripts/site.sh"

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
give_up() { say "error: $*"; exit 1; }

# Sets the variable named $1 to the whole number that it holds, or to $2 if it is empty. Ends the script if it
# holds anything but a number from $3 to $4. It checks before any arithmetic, because that would run commands
# in the text.
check_number() {
    local text="${!1:-$2}"
    [[ -n "$text" ]] || return 0
    if [[ ! "$text" =~ ^[0-9]{1,9}$ ]] || ((10#$text < $3 || 10#$text > $4)); then
        say "error: $1 ($(printf '%.100q' "$text")) must be a whole number from $3 to $4; unset or correct it"
        exit 2
    fi
    printf -v "$1" '%d' "$((10#$text))"
}

# Sets LEAST_NODES and MOST_NODES from NNODES, a number or MIN:MAX, and ELASTIC to yes for MIN:MAX. Ends the
# script if NNODES is neither.
read_nodes() {
    ELASTIC=""
    if [[ "${NNODES:-}" != *:* ]]; then
        check_number NNODES "" 1 999999
        LEAST_NODES="${NNODES:-1}" MOST_NODES="${NNODES:-1}"
        return
    fi
    LEAST_NODES="${NNODES%%:*}" MOST_NODES="${NNODES##*:}"
    if [[ "$NNODES" =~ ^[0-9]{1,6}:[0-9]{1,6}$ ]] &&
        ((1 <= 10#$LEAST_NODES && 10#$LEAST_NODES <= 10#$MOST_NODES)); then
        # shellcheck disable=SC2034 # the scripts that source this file use it
        ELASTIC=yes LEAST_NODES="$((10#$LEAST_NODES))" MOST_NODES="$((10#$MOST_NODES))"
    else
        say "error: NNODES ($(printf '%.100q' "$NNODES")) must be MIN:MAX with 1 <= MIN <= MAX," \
            "such as 2:4; correct it"
        exit 2
    fi
}

# Says whether the given Python has the packages of pyproject.toml and of the extras; silent, less than a
# second.
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
extras = project["optional-dependencies"]
for line in sum((extras[name] for name in sys.argv[2:]), project["dependencies"]):
    needed = Requirement(line)
    if not needed.specifier.contains(metadata.version(needed.name), prereleases=True):
        sys.exit(1)
' "$ROOT/pyproject.toml" "$@" 2>/dev/null
}

# Of several nodes (srun, or NODE_RANK without SLURM) only the first one prints the results.
is_first_node() { [[ "${SLURM_PROCID:-${NODE_RANK:-0}}" == 0 ]]; }

# Runs a command that makes something which nodes, jobs and terminals share. Only one runs at a time; the
# others wait and then find it made.
under_lock() {
    (
        flock -w 1800 9 || say "$ROOT/.setup.lock cannot be locked; the script continues without the lock"
        "$@"
    ) 9>"$ROOT/.setup.lock"
}

newest_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "$candidate"
            return
        fi
    done
    give_up "no python3 of version 3.11 or later on PATH; install one, or set PYTHON"
}

use_environment() {
    local candidate candidates=(python3 "$ROOT/$VENV/bin/python")
    if [[ -n "$TORCH_VERSION" ]]; then
        VENV=".venv-torch-$TORCH_VERSION"
        candidates=("$ROOT/$VENV/bin/python")
    elif [[ -n "${PYTHON:-}" ]]; then
        satisfies "$PYTHON" "$@" ||
            give_up "PYTHON ($PYTHON) lacks packages of pyproject.toml; install them or unset it"
        return
    fi
    for candidate in "${candidates[@]}"; do
        if satisfies "$candidate" "$@"; then
            PYTHON="$candidate"
            return
        fi
    done
    PYTHON="$ROOT/$VENV/bin/python"
    under_lock make_environment "$@"
}

# Shows on a terminal, in one line, how long pip has been at work and what it does, by its output in the file
# $1; ends with the script.
watch_pip() {
    local what
    while [[ -t 2 ]] && sleep 1 && kill -0 $$ 2>/dev/null; do
        what="$(grep -oE '(Collecting|Downloading|Building|Installing) .*' "$1" | tail -n 1)" || true
        printf '\r\e[K%s: %d s  %.60s' "$(basename "$0")" "$SECONDS" "$what" >&2
    done
}

make_environment() {
    satisfies "$PYTHON" "$@" && return
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        local base
        base="$(newest_python)"
        say "makes an environment in $VENV with $("$base" --version)"
        "$base" -m venv "$ROOT/$VENV" ||
            give_up "python venv failed; install python3-venv, or activate an environment of your own"
    fi
    local extras constraints="$ROOT/constraints.txt" torch=()
    extras="$(IFS=,; echo "$*")"
    if [[ -n "$TORCH_VERSION" ]]; then  # with what that version of torch needs
        constraints="$(mktemp)"
        grep -vE '^(torch|setuptools)==' "$ROOT/constraints.txt" >"$constraints"
        torch=("torch==$TORCH_VERSION.*")
    fi
    say "installing packages into $VENV${extras:+ ($extras)}; this happens once and takes a minute or more"
    local output watcher code=0
    output="$(mktemp)"
    watch_pip "$output" &
    watcher=$!
    # pip would compile every module of every package for as long as it installs them
    "$PYTHON" -m pip install --no-input --disable-pip-version-check --progress-bar=off --no-compile \
        --constraint "$constraints" "${torch[@]}" --editable "$ROOT${extras:+[$extras]}" >"$output" 2>&1 ||
        code=$?
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    [[ ! -t 2 ]] || printf '\r\e[K' >&2
    ((code == 0)) || tail -n 15 "$output" >&2
    rm -f "$output"
    [[ -z "$TORCH_VERSION" ]] || rm -f "$constraints"
    ((code == 0)) || give_up "pip could not install the packages; see its message above"
    satisfies "$PYTHON" "$@" ||
        give_up "$VENV still lacks packages of pyproject.toml; remove the folder $VENV and try again"
    # here, once, Python compiles the modules that a training imports: not in every rank of the first one
    (cd "$ROOT" && "$PYTHON" -c "import main_training, torch._dynamo, torch.utils.tensorboard") ||
        give_up "the packages in $VENV cannot be imported; see the message above"
}
