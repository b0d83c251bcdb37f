"""Everything here needs one NVIDIA GPU and is skipped elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.launch import with_gpu

_LOOK = "import sys, torch; sys.exit(not torch.cuda.is_available())"


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Skips where there is none."""
    if (
        not Path("/dev/nvidiactl").exists()
        or subprocess.run([sys.executable, "-c", _LOOK], env=with_gpu()).returncode
    ):
        pytest.skip("needs a GPU")
