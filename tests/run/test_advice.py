"""What a run says where memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fms_fsdp.config import BF16, BatchPlan, ParallelConfig, TrainConfig
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.errors import RunFailed
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.spec.advice import explaining_out_of_memory, warning_of_memory
from tests.predict.test_memory import fake_gpu
from tests.specs import resolved


@pytest.mark.parametrize(
    ("flags", "accum", "told"),
    [
        ({}, 1, "about 145.6 GiB a rank, and 110.0 are available; what would help: --recompute=cheap with "),
        ({"recompute": "cheap"}, 1, "about 125.9 GiB"),  # 46,592 numbers a token and block: 45.5 GiB
        ({"recompute": "cheap"}, 2, "about 152.2 GiB"),  # those of the first micro-step are there already
        ({"recompute": "blocks"}, 2, ""),
        ({"fsdp_activation_checkpointing": True}, 1, ""),
    ],
)
def test_a_step_that_will_hardly_fit_is_told_beforehand_with_what_would_help(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], accum: int, told: str
) -> None:
    """7b, 4 rows: 100.5 GiB of state, 25.1 of them gradients, that come while 64 GiB of activations go; the
    rest is the loss and the allocator's."""
    cfg = TrainConfig(parallel=ParallelConfig(use_torch_compile=True, **flags))
    model, batch = VARIANTS["7b"], BatchPlan(4, accum, 1)
    state = 8 * num_params(model)
    spec = resolved(cfg, model=model, batch=batch, precision=BF16, device="cuda:0", optimizer_bytes=state)
    faked = fake_gpu(monkeypatch, 110)
    warning = warning_of_memory(spec)
    assert told in warning and bool(told) == bool(warning)
    faked.total = 180
    assert warning_of_memory(spec) == ""


@pytest.mark.parametrize(("strategy", "flags"), [("none", " --sharding_strategy=fsdp"), ("fsdp", "")])
def test_the_advice_to_offload_is_a_command_that_runs(
    monkeypatch: pytest.MonkeyPatch, strategy: str, flags: str
) -> None:
    """An unsharded model cannot be offloaded."""
    spec = resolved(TrainConfig(), model=VARIANTS["7b"], dims=ParallelDims(strategy), precision=BF16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with (
        pytest.raises(RunFailed, match=rf"--cpu_offload=True{flags} moves about"),
        explaining_out_of_memory(spec),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
