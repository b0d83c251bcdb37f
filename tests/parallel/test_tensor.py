"""Tensor parallelism whose collectives overlap matmuls. test_layouts.py trains with tensor parallelism."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fms_fsdp.config import FP32, ParallelConfig
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.parallel.tensor import _mask_of_heads
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


def test_bias_of_heads_is_that_of_the_rank() -> None:
    """A bias (1 H S T) per head is divided; a mask (B 1 S T) would be too, so none has 4 dims."""
    bias = torch.arange(4 * 3 * 3).view(1, 4, 3, 3)
    mask = torch.ones(3, 3, dtype=torch.bool)
    for rank in range(2):
        tp: Any = SimpleNamespace(size=2, rank=rank)
        own = _mask_of_heads(lambda: bias, tp)
        assert torch.equal(own, bias[:, 2 * rank : 2 * rank + 2])
        assert _mask_of_heads(lambda: mask, tp) is mask
        assert _mask_of_heads(lambda: None, tp) is None
