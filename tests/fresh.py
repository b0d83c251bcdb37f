"""A fresh virtual environment, as a user's own is, onto the packages of this one: nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import entry_points
from pathlib import Path

from tests.cli import ROOT


def copy_tracked(folder: Path) -> list[str]:
    """Copies what git tracks into the folder, as a bare clone has it; returns the names."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    names = [name for name in listed.splitlines() if (ROOT / name).is_file()]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return names


def make_environment(folder: Path, *project: str) -> None:
    """Makes a virtual environment in which pip has installed `project`, and all packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    inside = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(inside, capture_output=True, text=True, check=True).stdout.strip()
    Path(packages, "present.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    quiet = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
        "install",
        *quiet,
    ]
    subprocess.run([*pip, *project], check=True, env=outside(), timeout=300)
    for entry in entry_points(group="console_scripts"):
        if entry.name in ("torchrun", "tensorboard"):
            script = folder / "bin" / entry.name
            call = (
                f"import sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n"
            )
            script.write_text(f"#!{python}\n{call}")
            script.chmod(0o755)


def outside() -> dict[str, str]:
    """The variables of a shell in which no environment is active: this one's is not on its PATH."""
    own = str(Path(sys.executable).parent)
    kept = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder != own]
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHON")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    return variables | {"PATH": os.pathsep.join(kept), "OMP_NUM_THREADS": "1"}
