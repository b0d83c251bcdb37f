"""The check of layouts accepts and rejects what it did before it was rewritten."""

from __future__ import annotations

import lzma
from pathlib import Path

import torch

from fms_fsdp.config import BatchPlan
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.errors import UserError
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.parallel.layout import check_layout
from tests.parallel.layout_cases import NUM_CASES, Case, cases

RECORD = Path(__file__).with_name("layouts.bin.xz")


def is_accepted(case: Case) -> bool:
    batch = BatchPlan(case.batch["batch_size"], 1, 1, (), case.batch["cuts_micro_steps"])
    dims = ParallelDims("fsdp", **case.dims)
    model, cpu = TransformerConfig(**case.model), torch.device("cpu")
    try:
        check_layout(case.config, model, dims, batch, cpu)
    except UserError:
        return False
    return True


def may_differ(case: Case) -> bool:
    """Zero-bubble pipelines with --recompute=ops died in the first step and are rejected now; compiled
    blocks of tp that recompute in fp32 were rejected and train now."""
    parallel = case.config.parallel
    is_zbv = case.dims["pp"] > 1 and parallel.pp_schedule == "zbv"
    if is_zbv and parallel.recomputes == "ops":
        return True
    return case.had_wide_norm or (
        case.dims["tp"] > 1
        and bool(parallel.use_torch_compile)
        and parallel.recomputes in ("ops", "blocks")
    )


def test_verdicts_of_40000_layouts_are_recorded() -> None:
    record = lzma.decompress(RECORD.read_bytes())
    differing, num_accepted = 0, 0
    for number, case in enumerate(cases()):
        was_accepted = bool(record[number // 8] >> (7 - number % 8) & 1)
        now = is_accepted(case)
        num_accepted += now
        if now != was_accepted:
            assert may_differ(case), (number, case, was_accepted)
            differing += 1
    assert num_accepted > NUM_CASES // 5 and 0 < differing < 1000
