"""docs/guides/python.md is true: its commands, then its Python, run in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import ROOT


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/python.md").read_text()
    (tmp_path / "fms_fsdp").symlink_to(ROOT / "fms_fsdp")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    (commands,) = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = commands.replace("main_training.py", "-m main_training")
    subprocess.run(
        ["bash", "-ec", commands], cwd=tmp_path, env=environment, check=True, timeout=300
    )
    (tmp_path / "page.py").write_text(
        "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
    )
    ended = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^\d\.\d\d nats per token$", ended.stdout, re.MULTILINE)
    assert "def save(" in ended.stdout and "finished 3 steps: runs/python" in ended.stdout
