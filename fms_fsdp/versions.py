"""The versions and the hardware that a result depends on."""

from __future__ import annotations

import os
import platform
import subprocess
import zlib
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist


def versions() -> dict[str, str]:
    """Returns the versions and the hardware that a result depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"platform": platform.machine(), **_git_state()}
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
        if dist.is_nccl_available():
            nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            found["nccl"] = ".".join(map(str, nccl))
    return found


@cache
def _git_state() -> dict[str, str]:
    """Returns the commit and a hash of the difference from it; {} outside of a repository."""
    try:
        commit = _ask_git("rev-parse", "HEAD")
        diff = _ask_git("diff", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit.decode()[:12] + (f"+{zlib.crc32(diff):08x}" if diff else "")}


def _ask_git(*command: str) -> bytes:
    # GIT_DIR and others would name another repository, for example in a hook of git.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.check_output(
        ["git", "-C", str(Path(__file__).parent), *command],
        stderr=subprocess.DEVNULL,
        timeout=10,
        env=variables,
    )
