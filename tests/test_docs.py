"""Every command in a bash block of the README and of docs/ runs in a copy of the repository."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTS_THEMSELVES = ("bash scripts/test.sh", "bash scripts/check.sh")


def commands() -> list[str]:
    """All commands of all bash blocks, in order, comments and continuation lines resolved, each once."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s+#.*", "", line).strip()
                if line and not line.startswith(("#", *TESTS_THEMSELVES)):
                    found.append(line)
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files of the repository, and the prepared quickstart data where there are some."""
    folder = tmp_path_factory.mktemp("copy")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def test_there_are_commands_to_run() -> None:
    assert "bash scripts/train.sh" in commands() and len(commands()) > 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_finished_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"\b(TODO|FIXME|XXX|TBD)\b", text)
    links = re.findall(r"\]\(([^)#:\s]+)\)", text)
    assert all((page.parent / link).exists() for link in links), links


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_a_documented_command_works(copy: Path, command: str) -> None:
    if command.startswith("bash scripts/train.sh") and "--num_steps" not in command:
        command += " --num_steps=2 --run_name=docs"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(copy)}
    result = subprocess.run(
        shlex.split(command), cwd=copy, env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
