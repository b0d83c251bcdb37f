"""The memory estimate and the refusal built on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fms_fsdp.mesh import ParallelDims
from fms_fsdp.models.flops import num_params, num_params_by_unit
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.predict import memory
from fms_fsdp.predict.memory import available_memory, check_memory, estimate_memory

CPU = torch.device("cpu")


def test_estimate_is_state_over_shards_plus_the_largest_unit() -> None:
    config = VARIANTS["7b"]
    n, block = num_params(config), num_params_by_unit(config)["block"]
    assert estimate_memory(config, ParallelDims("fsdp", 1, 8)).total == 16 * n // 8 + 4 * block
    assert (
        estimate_memory(config, ParallelDims("hsdp", 2, 4), mixed_precision=True).total
        == 16 * n // 4 + 2 * block
    )
    assert estimate_memory(config, ParallelDims("none", 1, 1)).total == 16 * n
    assert estimate_memory(config, ParallelDims("none", 1, 1), mixed_precision=True).total == (
        16 * n + 2 * num_params_by_unit(config)["embed"]
    )
    tied = VARIANTS["llama3.2_1b"]
    assert estimate_memory(tied, ParallelDims("ddp", 2, 1)).unit == 4 * (
        128256 * 2048 + 2048
    )  # embedding and final norm


def test_a_model_that_cannot_fit_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free_ram", lambda: 64 * 2**30)
    monkeypatch.setattr(memory, "_cgroup_limit", lambda: 32 * 2**30)
    with pytest.raises(
        ValueError,
        match=r"--model_variant \(70b: 1027.8 GiB per rank, .*\) must fit the 16.0 GiB .* at least 65 ",
    ) as error:
        check_memory(estimate_memory(VARIANTS["70b"], ParallelDims("none", 1, 1)), CPU, 2, "70b")
    assert "\n" not in str(error.value)
    check_memory(
        estimate_memory(replace(VARIANTS["7b"], num_layers=1), ParallelDims("none", 1, 1)), CPU, 2, "7b"
    )
    check_memory(estimate_memory(VARIANTS["7b"], ParallelDims("fsdp", 1, 16)), CPU, 2, "7b")


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
    monkeypatch.setattr(memory, "_read", lambda path: files.get(str(path), ""))
    assert memory._cgroup_limit() == limit


def test_this_machines_memory_is_shared_among_its_ranks() -> None:
    whole = available_memory(CPU, 1)
    assert 2**28 < whole < 2**46
    assert available_memory(CPU, 4) == pytest.approx(whole / 4, rel=0.2)
