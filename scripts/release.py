"""Makes a release of the commit that is checked out: sdist, wheel and the notes of its version.

    python scripts/release.py [FOLDER]      # default: dist; publishes nothing

Both archives are installed into empty folders outside the repository, and train two steps there. The
version is that of pyproject.toml; CITATION.cff and a section of CHANGELOG.md must have it too.
Exit status: 0, 1 if a check failed, 2 bad input.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TWO_STEPS = "--model_variant=tiny --use_dummy_dataset=True --seq_length=64 --num_steps=2"
BUILD = "import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])"


class BadInput(Exception):
    """The release cannot begin; the message names the fix."""


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0] if arguments else "dist").absolute()
    try:
        version, notes = check_input(folder)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        try:
            archives = build(Path(scratch))
            for archive in archives:
                check_works(archive, version, Path(scratch))
                print(f"{archive.name} works in an empty environment")
        except subprocess.CalledProcessError as error:
            print(f"{error.output}failed: {error}", file=sys.stderr)
            return 1
        folder.mkdir(parents=True)
        for archive in archives:
            shutil.copy(archive, folder)
    (folder / "NOTES.md").write_text(notes, encoding="utf-8")
    print(f"{folder} has sdist, wheel and NOTES.md of version {version}")
    print(f"next: git tag v{version}, push the tag, and attach the files to the release")
    return 0


def check_input(folder: Path) -> tuple[str, str]:
    """Returns the version, and its notes in CHANGELOG.md.

    Raises:
        BadInput: the checkout has changes, files have another version, or the folder exists.
    """
    if folder.exists():
        raise BadInput(f"{folder} must not exist; remove it, or name another folder")
    if run("git", "status", "--porcelain", cwd=ROOT):
        raise BadInput("the checkout has changes; commit them first")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    version: str = project["project"]["version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    if f"\nversion: {version}\n" not in citation:
        raise BadInput(f"CITATION.cff must have version: {version}, as pyproject.toml; edit it")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(version)}\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if section is None:
        raise BadInput(f"CHANGELOG.md must have a section ## {version}; write it")
    return version, section[1].strip() + "\n"


def build(scratch: Path) -> list[Path]:
    """Returns the sdist of the commit, and the wheel that is made of it."""
    dist = scratch / "dist"
    source = scratch / "source"
    source.mkdir()
    run("git", "archive", "--output", str(scratch / "source.tar"), "HEAD", cwd=ROOT)
    run("tar", "-x", "-f", str(scratch / "source.tar"), cwd=source)
    run(sys.executable, "-c", BUILD, str(dist), cwd=source)
    (sdist,) = dist.glob("*.tar.gz")
    pip("wheel", f"--wheel-dir={dist}", str(sdist), cwd=scratch)
    (wheel,) = dist.glob("*.whl")
    return [sdist, wheel]


def check_works(archive: Path, version: str, scratch: Path) -> None:
    """Installs the archive alone, without this checkout, and trains two steps.

    Its packages are those of this environment.

    Raises:
        CalledProcessError: a command fails, or the version is another one.
    """
    place = Path(tempfile.mkdtemp(dir=scratch))
    project = place / "project"
    pip("install", f"--target={project}", str(archive), cwd=place)
    shown = run(sys.executable, "-m", "fms_fsdp", "--version", cwd=place, path=project)
    if not shown.startswith(f"fms_fsdp {version},"):
        raise subprocess.CalledProcessError(1, f"{archive.name} --version", shown)
    run(sys.executable, "-m", "main_training", *TWO_STEPS.split(), cwd=place, path=project)


def pip(command: str, *arguments: str, cwd: Path) -> None:
    quiet = ["--quiet", "--no-deps", "--no-build-isolation"]
    run(sys.executable, "-m", "pip", command, *quiet, *arguments, cwd=cwd)


def run(*command: str, cwd: Path, path: Path | None = None) -> str:
    """Runs a command; returns what it printed."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    ).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
