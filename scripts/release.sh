#!/usr/bin/env bash
# Makes a release of the commit that is checked out: builds sdist and wheel, checks that each works in an
# empty environment, and writes the notes of this version. It publishes nothing.
#
#   bash scripts/release.sh [FOLDER]    # default: dist
#
# The version is that of pyproject.toml; CITATION.cff and a section of CHANGELOG.md must have it too.
# Exit status: 0, 1 if a check failed, 2 bad input.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
folder="${1:-dist}"

bad_input() { say "error: $*"; exit 2; }

[[ ! -e "$folder" ]] || bad_input "$folder must not exist; remove it, or name another folder"
[[ -z "$(git status --porcelain)" ]] || bad_input "the checkout has changes; commit them first"
version="$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)"
grep -qx "version: $version" CITATION.cff ||
    bad_input "CITATION.cff must have version: $version, as pyproject.toml; edit one of them"
notes="$(awk -v head="## $version" '$0 == head {on = 1; next} /^## / {on = 0} on' CHANGELOG.md)"
[[ -n "$notes" ]] || bad_input "CHANGELOG.md has no section ## $version; write it"

use_environment test
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
git archive HEAD | tar -x -C "$scratch" --one-top-level=source
(
    cd "$scratch/source"
    build='import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])'
    "$PYTHON" -c "$build" "$scratch/dist" >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }
)
"$PYTHON" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$scratch/dist" "$scratch"/dist/*.tar.gz

# The packages that the project needs come from the environment of the tests; the project does not.
packages="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
for file in "$scratch"/dist/*; do
    venv="$scratch/venv-${file##*.}"
    "$PYTHON" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --no-deps --target "$venv/project" "$file"
    for command in "-m fms_fsdp --version" "-m main_training --model_variant=tiny --use_dummy_dataset=True --seq_length=64 --num_steps=2"; do
        # shellcheck disable=SC2086 # the words of a command
        (cd "$scratch" && PYTHONPATH="$venv/project:$packages" "$venv/bin/python" $command) >"$scratch/log" 2>&1 ||
            { cat "$scratch/log" >&2; give_up "$(basename "$file") does not work: $command"; }
        [[ "$command" != *--version ]] || grep -q "^fms_fsdp $version," "$scratch/log" ||
            give_up "$(basename "$file") has another version: $(cat "$scratch/log")"
    done
    say "$(basename "$file") works in an empty environment"
    rm -rf "$scratch/runs"
done

mkdir -p "$folder"
cp "$scratch"/dist/* "$folder/"
printf '%s\n' "$notes" >"$folder/NOTES.md"
say "$folder has sdist, wheel and NOTES.md of version $version"
say "next: git tag v$version && git push origin v$version, and attach the files to the release"
