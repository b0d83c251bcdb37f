"""The memory estimate: by hand, and its laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fms_fsdp.config import BF16, FP32, ParallelConfig, Precision, TrainConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.world import World
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import num_params, num_params_by_unit
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.plan import recomputations
from fms_fsdp.predict.memory import (
    GIB,
    Step,
    _expected,
    _in_flight,
    estimate_memory,
    minimum_memory,
)
from fms_fsdp.predict.meter import ModelSetup
from fms_fsdp.run.memory_budget import MemoryBudget
from tests.specs import budget, resolved


def step(
    model: str | TransformerConfig = "7b",
    dims: ParallelDims | None = None,
    *,
    devices: int = 8,
    rows: int = 1,
    accum: int = 1,
    precision: Precision = BF16,
    **flags: Any,
) -> Step:
    """Returns a step on GPUs in nodes of 8, of sequences of 4096 tokens."""
    section = ParallelConfig(**flags)
    dims = dims or plan_dims(section, "", World(0, 0, devices, min(8, devices)))
    config = VARIANTS[model] if isinstance(model, str) else model
    return Step(ModelSetup(config, section, precision, dims, 4096), rows, accum)


def without_sequences(step: Step) -> int:
    need = minimum_memory(step)
    return need.total - need.sequences


def test_minimum_is_sharded_state_and_the_largest_unit() -> None:
    config = VARIANTS["7b"]
    n, units = num_params(config), num_params_by_unit(config)
    block = units["block"]
    for dims, precision, expected in (
        (ParallelDims("fsdp", 1, 8), FP32, 16 * n // 8 + 4 * block),
        (ParallelDims("hsdp", 2, 4), BF16, 16 * n // 4 + 2 * block),
        (ParallelDims("none"), FP32, 16 * n),
        (ParallelDims("none"), BF16, 16 * n + 2 * units["embed"]),
    ):
        assert without_sequences(step("7b", dims, precision=precision)) == expected
    tied = minimum_memory(step("llama3.2_1b", ParallelDims("fsdp", 1, 2), precision=FP32))
    assert tied.gathered >= 4 * 128256 * 2048
    grouped = step("7b", ParallelDims("fsdp", 1, 8), fsdp_blocks_per_group=3)
    assert minimum_memory(grouped).gathered == 3 * 2 * block


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_zero1_keeps_unsharded_weights_and_gradients(dtype: str, size: int) -> None:
    n, precision = num_params(VARIANTS["7b"]), replace(BF16, reduce=dtype)
    for accum, gradients in ((1, 4 * n // 8), (4, size * n)):
        found = step(precision=precision, accum=accum, sharding_strategy="zero1")
        need = minimum_memory(found)
        assert (need.gathered, need.gradients) == (2 * n, gradients)


def test_axes_divide_the_input_of_a_block() -> None:
    config, rows = VARIANTS["70b"], 64
    hidden = 2 * config.hidden_size * 4096

    def taken_in(**flags: Any) -> int:
        need = minimum_memory(step("70b", devices=16, rows=rows, **flags))
        return need.sequences - 8 * config.rotary_dim * config.max_seq_len - 32 * rows * 4096

    assert taken_in() == rows * hidden
    assert taken_in(tp_size=8, cp_size=2) == rows * hidden // 16
    assert taken_in(pp_size=4, pp_micro_batch_size=2) == 2 * hidden
    assert taken_in(pp_size=4, tp_size=2, sequence_parallel=False) == hidden


def test_offloaded_state_is_in_host_memory() -> None:
    need = estimate_memory(step(), saves=100)
    parts = need.by_device("cuda", offload=True)
    assert parts["cpu"].total == need.state + 100
    assert parts["cuda"].total == need.total - need.state - 100
    assert need.by_device("cpu", offload=True) == {"cpu": need}
    assert need.by_device("cuda", offload=False)["cuda"].total == need.total - 100


@pytest.mark.parametrize(
    "flags",
    [
        dict(pp_size=4, tp_size=2, pp_schedule="interleaved"),
        dict(pp_size=2, cp_size=2, tp_size=2, pp_schedule="zbv"),
    ],
)
def test_axes_need_less_than_one_device(flags: dict[str, Any]) -> None:
    alone, divided = (
        estimate_memory(each) for each in (step(devices=1, rows=8), step(rows=8, **flags))
    )
    assert divided.state <= alone.state / 5 and divided.total < alone.total / 2


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [  # forward passes before the first backward pass, in the order of operations of torch's schedules
        ("1f1b", [4, 3, 2, 1]),
        ("gpipe", [10, 10, 10, 10]),
        ("interleaved", [6, 5, 4, 3]),
        ("zbv", [4, 4, 4, 4]),
    ],
)
def test_pipeline_keeps_micro_batches_in_flight(schedule: str, expected: list[float]) -> None:
    setup = step("llama3_8b", devices=4, pp_size=4, pp_schedule=schedule).setup
    assert [_in_flight(setup, rank, 10) for rank in range(4)] == expected


def test_middle_rank_of_a_pipeline_can_hold_most() -> None:
    flags: dict[str, Any] = dict(devices=4, pp_size=4, pp_schedule="gpipe", recompute="none")
    found = step("llama3_8b", rows=16, **flags)
    totals = [_expected(found, rank).total for rank in range(4)]
    assert max(totals) == estimate_memory(found).total > max(totals[0], totals[-1])


def test_recomputation_needs_less_and_less() -> None:
    found = step(rows=4)
    sizes = [
        estimate_memory(replace(found, setup=replace(found.setup, section=section))).total
        for section in recomputations(found.setup.section, compiled=True)
    ]
    assert sizes[0] > sizes[1] > sizes[-1] == min(sizes)
    more = [estimate_memory(step(rows=rows)).total for rows in (1, 2, 4, 8)]
    assert more == sorted(more)


def test_model_that_cannot_fit_is_rejected_with_both_sizes() -> None:
    cfg = TrainConfig()
    run = resolved(cfg, model=VARIANTS["70b"])
    text = (
        r"must fit the 16.0 GiB .*, but its 68,976,648,192 parameters require 1,02\d.\d GiB .* "
        r"at least 6\d "
    )
    with pytest.raises(ValueError, match=text) as error:
        budget(cpu=16 * GIB).check(run)
    assert "\n" not in str(error.value)
    budget(cpu=2000 * GIB).check(run)
    run = resolved(cfg, model=VARIANTS["llama3_8b"], device="cuda", precision=BF16)
    part = budget(cuda=31 * GIB, cpu=2**60).machine
    with pytest.raises(ValueError, match=r"31.0 GiB .* \(other programs use 49.0 GiB\), "):
        MemoryBudget(replace(part, total_memory=80 * GIB)).check(run)
