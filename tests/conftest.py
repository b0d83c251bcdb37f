"""Settings of the test processes, before torch is imported: idle threads sleep; tests share cores."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)
