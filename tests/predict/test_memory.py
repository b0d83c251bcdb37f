"""The memory estimate and the refusal built on it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fms_fsdp.config import BF16, BatchPlan, ParallelConfig
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.mesh import resolve_dims
from fms_fsdp.models.flops import num_params, num_params_by_unit
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.predict import room
from fms_fsdp.predict.memory import estimate_memory
from fms_fsdp.predict.room import available_memory, check_memory
from fms_fsdp.runtime import World

CPU, PLAIN = torch.device("cpu"), ParallelConfig()


def test_estimate_is_state_over_shards_plus_the_largest_unit() -> None:
    config = VARIANTS["7b"]
    n, block = num_params(config), num_params_by_unit(config)["block"]
    assert estimate_memory(config, ParallelDims("fsdp", 1, 8), PLAIN).total == 16 * n // 8 + 4 * block
    assert (
        estimate_memory(config, ParallelDims("hsdp", 2, 4), PLAIN, precision=BF16).total
        == 16 * n // 4 + 2 * block
    )
    assert estimate_memory(config, ParallelDims("none", 1, 1), PLAIN).total == 16 * n
    assert estimate_memory(config, ParallelDims("none", 1, 1), PLAIN, precision=BF16).total == (
        16 * n + 2 * num_params_by_unit(config)["embed"]
    )
    tied = VARIANTS["llama3.2_1b"]
    assert estimate_memory(tied, ParallelDims("fsdp", 1, 2), PLAIN).unit == 4 * (
        128256 * 2048 + 2048
    )  # embedding and final norm
    assert estimate_memory(config, ParallelDims("ddp", 8, 1), PLAIN, precision=BF16).unit == 2 * block
    grouped = ParallelConfig(fsdp_blocks_per_group=3)
    assert estimate_memory(config, ParallelDims("fsdp", 1, 8), grouped).unit == 3 * 4 * block


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_whole_weights_and_gradients_count_where_a_strategy_keeps_them(dtype: str, size: int) -> None:
    config, section = VARIANTS["7b"], ParallelConfig(sharding_strategy="zero1")
    n, dims = num_params(config), resolve_dims(section, "7b", World(0, 0, 8, 8))
    for accum, whole in ((1, 0), (4, size * n - 4 * n // 8)):
        batch = BatchPlan(1, accum, 8)
        estimate = estimate_memory(config, dims, section, precision=replace(BF16, reduce=dtype), batch=batch)
        assert (estimate.unit, estimate.gradients) == (2 * n, whole)
        assert estimate.total == 2 * n + 16 * n // 8 + whole + estimate.rows


def test_a_block_takes_in_the_part_of_a_row_or_batch_that_the_axes_leave() -> None:
    """A pipeline was refused for the rows of a whole step, of which one micro-batch passes at a time."""
    config, rows = VARIANTS["70b"], 64
    stream = 2 * config.hidden_size * 4096

    def taken_in(**flags: int) -> int:
        section = ParallelConfig(**flags)  # type: ignore[arg-type]
        batch, dims = BatchPlan(rows, 1, 1), resolve_dims(section, "70b", World(0, 0, 16, 8))
        need = estimate_memory(config, dims, section, precision=BF16, batch=batch, seq_length=4096)
        return need.rows - 8 * config.rotary_dim * config.max_seq_len - 32 * rows * 4096

    assert taken_in() == rows * stream
    assert taken_in(tp_size=8, cp_size=2) == rows * stream // 16
    assert taken_in(pp_size=4, pp_micro_batch_size=2) == 2 * stream
    assert taken_in(pp_size=4, tp_size=2, sequence_parallel=False) == stream


def test_what_is_offloaded_must_fit_the_host_and_the_rest_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, section = torch.device("cuda", 0), ParallelConfig(cpu_offload=True)
    estimate = estimate_memory(VARIANTS["7b"], ParallelDims("fsdp", 1, 2), section)
    parts = estimate.by_holder(gpu, section)
    assert [part.total for part in parts.values()] == [estimate.state, estimate.unit]
    assert list(parts) == [CPU, gpu] and estimate.by_holder(CPU, section) == {CPU: estimate}
    assert estimate.by_holder(gpu, ParallelConfig()) == {gpu: estimate}
    fake_gpu(monkeypatch, 1)
    kept = estimate_memory(VARIANTS["7b"], ParallelDims("zero2", 1, 2, reshard_after_forward=False), section)
    with pytest.raises(
        ValueError, match=r"25.1 GiB per rank, 0.0 of .*; gather one block at a time \(--shard"
    ):
        check_memory(kept.by_holder(gpu, section)[gpu], gpu, 1, "7b")


def test_a_model_that_cannot_fit_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_free_ram", lambda: 64 * 2**30)
    monkeypatch.setattr(room, "_cgroup_limit", lambda: 32 * 2**30)
    with pytest.raises(
        ValueError,
        match=r"--model_variant \(70b, 68,976,648,192 parameters a rank: 1027.8 GiB per rank, .*\) must fit "
        r"the 16.0 GiB .* at least 65 ",
    ) as error:
        check_memory(estimate_memory(VARIANTS["70b"], ParallelDims("none", 1, 1), PLAIN), CPU, 2, "70b")
    assert "\n" not in str(error.value)
    check_memory(
        estimate_memory(replace(VARIANTS["7b"], num_layers=1), ParallelDims("none", 1, 1), PLAIN),
        CPU,
        2,
        "7b",
    )
    check_memory(estimate_memory(VARIANTS["7b"], ParallelDims("fsdp", 1, 16), PLAIN), CPU, 2, "7b")


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
    monkeypatch.setattr(room, "_read", lambda path: files.get(str(path), ""))
    assert room._cgroup_limit() == limit


def test_this_machines_memory_is_shared_among_its_ranks() -> None:
    whole = available_memory(CPU, 1)
    assert 2**28 < whole < 2**46
    assert available_memory(CPU, 4) == pytest.approx(whole / 4, rel=0.2)


def fake_gpu(monkeypatch: pytest.MonkeyPatch, gib: float) -> SimpleNamespace:
    """A GPU of which another program may use some; all in GiB, to be changed."""
    faked = SimpleNamespace(total=gib, others=0.0, reserved=0.0)

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        return int((faked.total - faked.others - faked.reserved) * 2**30), int(faked.total * 2**30)

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(faked.reserved * 2**30))
    return faked


def test_a_gpu_offers_all_its_memory_and_a_model_that_fills_it_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8B in fp32 on one GPU of 139.8 GiB: 16 bytes a parameter and one weight in bf16, no copy of all."""
    faked = fake_gpu(monkeypatch, 143_771 / 2**10)
    gpu, dims = torch.device("cuda", 0), ParallelDims("none")
    assert available_memory(gpu, 8) == 143_771 * 2**20
    check_memory(estimate_memory(VARIANTS["llama3_8b"], dims, PLAIN, precision=BF16), gpu, 1, "llama3_8b")
    faked.total = 80
    check_memory(estimate_memory(VARIANTS["llama3.2_3b"], dims, PLAIN, precision=BF16), gpu, 1, "3b")
    with pytest.raises(ValueError, match=r"must fit the 80.0 GiB"):
        check_memory(estimate_memory(VARIANTS["llama3_8b"], dims, PLAIN, precision=BF16), gpu, 1, "8b")


def test_what_other_programs_hold_of_a_gpu_is_not_there_and_what_this_one_holds_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faked, gpu = fake_gpu(monkeypatch, 80), torch.device("cuda", 0)
    faked.reserved = 10
    need = estimate_memory(VARIANTS["llama3.2_3b"], ParallelDims("none"), PLAIN, precision=BF16)
    check_memory(need, gpu, 1, "3b")
    faked.others = 49
    assert available_memory(gpu, 1) == 31 * 2**30
    words = r"must fit the 31.0 GiB of memory available to it, beside 49.0 GiB in use by other programs; "
    with pytest.raises(ValueError, match=words):
        check_memory(need, gpu, 1, "3b")
