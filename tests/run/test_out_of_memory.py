"""What a run says where memory runs out."""

from __future__ import annotations

import pytest
import torch

from fms_fsdp.config import BF16, BatchPlan, TrainConfig
from fms_fsdp.errors import RunFailed
from fms_fsdp.mesh import ParallelDims
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.run.out_of_memory import explaining_out_of_memory
from fms_fsdp.run.plan import Plan
from fms_fsdp.run.resume import Start
from fms_fsdp.runtime import World


@pytest.mark.parametrize(("strategy", "flags"), [("none", " --sharding_strategy=fsdp"), ("fsdp", "")])
def test_the_advice_to_offload_is_a_command_that_runs(
    monkeypatch: pytest.MonkeyPatch, strategy: str, flags: str
) -> None:
    """An unsharded model cannot be offloaded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    world, dims, batch = World(0, 0, 1, 1), ParallelDims(strategy), BatchPlan(1, 1, 1)
    fresh = Start(None, False, "")
    plan = Plan(world, torch.device("cpu"), dims, batch, BF16, None, VARIANTS["7b"], fresh, 10, 4096)
    with (
        pytest.raises(RunFailed, match=rf"--cpu_offload=True{flags} moves about"),
        explaining_out_of_memory(TrainConfig(), plan),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
