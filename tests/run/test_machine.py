"""The memory that a rank of this machine may use."""

from __future__ import annotations

import pytest
import torch

from fms_fsdp.run import machine
from fms_fsdp.run.machine import available_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "files, limit",
    [
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/memory.max": "500\n",
                "/sys/fs/cgroup/a/b/memory.max": "max\n",
            },
            500,
        ),
        (
            {
                "/proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n",
                "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "700\n",
            },
            700,
        ),
        ({"/sys/fs/cgroup/memory.max": "300\n"}, 300),
        ({}, None),
    ],
)
def test_control_group_limits_of_both_versions(
    files: dict[str, str], limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_text", lambda path: files.get(str(path), ""))
    assert machine._cgroup_limit() == limit


def test_this_machines_memory_is_shared_among_its_ranks() -> None:
    whole = available_memory(CPU, 1)
    assert 2**28 < whole < 2**46
    assert available_memory(CPU, 4) == pytest.approx(whole / 4, rel=0.2)
