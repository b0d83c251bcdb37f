"""Tensor parallelism whose collectives overlap matmuls. test_layouts.py trains with tensor parallelism."""

from __future__ import annotations

from fms_fsdp.config import FP32, ParallelConfig
from fms_fsdp.parallel.parallelize import parallelize
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import CPU, SHAPE, mesh_of


def overlaps() -> list[bool]:
    """Returns whether torch overlaps collectives and matmuls, without and with compiled blocks (collective)."""
    from torch._inductor import config

    found = []
    for is_compiled in (False, True):
        section = ParallelConfig(tp_size=2, async_tp=True, use_torch_compile=is_compiled)
        parallelize(SHAPE, section, mesh_of(section), device=CPU, precision=FP32, seed=5)
        found.append(config._micro_pipeline_tp)
    return found


def test_async_tp_overlaps_in_compiled_blocks_only() -> None:
    assert run_ranks(overlaps, 2) == [[False, True]] * 2
