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
# The output of train.sh is read by train.slurm: what the file prints does not belong to it.
# shellcheck source=/dev/null
[[ ! -f "$ROOT/scripts/site.sh" ]] || source "$ROOT/scripts/site.sh" >&2

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
give_up() { say "error: $*"; exit 1; }

# Returns whether the Python $1 has the packages of pyproject.toml, and those of the extras.
has_packages() {
    command -v "$1" >/dev/null && "$1" "$ROOT/scripts/has_packages.py" "${@:2}" 2>/dev/null
}

use_environment() {
    local candidate candidates=(python3 "$ROOT/$VENV/bin/python")
    if [[ -n "$TORCH_VERSION" ]]; then
        VENV=".venv-torch-$TORCH_VERSION"
        candidates=("$ROOT/$VENV/bin/python")
    elif [[ -n "${PYTHON:-}" ]]; then
        has_packages "$PYTHON" "$@" ||
            give_up "PYTHON ($PYTHON) lacks packages of pyproject.toml; install them or unset it"
        return
    fi
    for candidate in "${candidates[@]}"; do
        if has_packages "$candidate" "$@"; then
            PYTHON="$candidate"
            return
        fi
    done
    PYTHON="$ROOT/$VENV/bin/python"
    ( # nodes, jobs and terminals share the environment: the others wait, and then find it made
        flock -w 1800 9 || say "$ROOT/.setup.lock cannot be locked; the script continues without the lock"
        has_packages "$PYTHON" "$@" || make_environment "$@"
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
    local base extras constraints="$ROOT/constraints.txt" torch=() output watcher code=0
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        base="$(newest_python)"
        say "Creating $VENV with $("$base" --version) …"
        "$base" -m venv "$ROOT/$VENV" ||
            give_up "python venv failed; install python3-venv, or activate an environment of your own"
    fi
    extras="$(IFS=,; echo "$*")" output="$(mktemp)"
    if [[ -n "$TORCH_VERSION" ]]; then # with the setuptools that this version needs
        constraints="$output.constraints"
        sed -E '/^(torch|setuptools)==/d' "$ROOT/constraints.txt" >"$constraints"
        torch=("torch==$TORCH_VERSION.*")
    fi
    say "Installing packages into $VENV${extras:+ ($extras)} (once, a minute or more) …"
    watch_pip "$output" &
    watcher=$!
    # pip would compile every module of every package for as long as it installs them
    "$PYTHON" -m pip install --no-input --disable-pip-version-check --progress-bar=off --no-compile \
        --constraint "$constraints" "${torch[@]}" --editable "$ROOT${extras:+[$extras]}" \
        >"$output" 2>&1 || code=$?
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    [[ ! -t 2 ]] || printf '\r\e[K' >&2
    ((code == 0)) || tail -n 15 "$output" >&2
    rm -f "$output" "$output.constraints"
    ((code == 0)) || give_up "pip could not install the packages; see its message above"
    has_packages "$PYTHON" "$@" ||
        give_up "$VENV still lacks packages of pyproject.toml; remove the folder $VENV and try again"
    # here, once, Python compiles the modules that a training imports: not in every rank of the first one
    (cd "$ROOT" && "$PYTHON" -c "import main_training, torch._dynamo, torch.utils.tensorboard") ||
        give_up "the packages in $VENV cannot be imported; see the message above"
}
