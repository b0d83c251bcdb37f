"""What a run says where memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fms_fsdp.config import BF16, BatchPlan, ParallelConfig, TrainConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.errors import RunFailed
from fms_fsdp.models.variants import VARIANTS
from tests.specs import budget, resolved


@pytest.mark.parametrize(
    ("flags", "accum", "warns"),
    [
        ({}, 1, True),
        ({"recompute": "cheap"}, 1, True),
        ({"recompute": "cheap"}, 2, True),
        ({"recompute": "blocks"}, 2, False),
        ({"fsdp_activation_checkpointing": True}, 1, False),
    ],
)
def test_step_that_hardly_fits_warns_with_advice(
    flags: dict[str, Any], accum: int, warns: bool
) -> None:
    """7b with 4 sequences: 100.5 GiB of state, and 64 GiB of activations without recomputation."""
    cfg = TrainConfig(parallel=ParallelConfig(use_torch_compile=True, **flags))
    model, batch = VARIANTS["7b"], BatchPlan(4, accum, 1)
    run = resolved(cfg, model=model, batch=batch, precision=BF16, device="cuda")
    warning = budget(cuda=110 * 2**30, cpu=2**60).warning(run)
    assert bool(warning) == warns
    if not flags:
        assert "and 110 GiB are available; what would help: --recompute=cheap with " in warning
    assert budget(cuda=190 * 2**30, cpu=2**60).warning(run) == ""


@pytest.mark.parametrize(
    ("strategy", "flags"), [("none", " --sharding_strategy=fsdp"), ("fsdp", "")]
)
def test_the_advice_to_offload_is_a_command_that_runs(
    monkeypatch: pytest.MonkeyPatch, strategy: str, flags: str
) -> None:
    """An unsharded model cannot be offloaded."""
    run = resolved(TrainConfig(), model=VARIANTS["7b"], dims=ParallelDims(strategy), precision=BF16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with (
        pytest.raises(RunFailed, match=rf"--cpu_offload=True{flags} moves about"),
        budget().explaining_out_of_memory(run),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
