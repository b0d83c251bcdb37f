"""One step of the loop by itself."""

from __future__ import annotations

from typing import Any

import torch

from fms_fsdp.config import FP32, OptimConfig, ParallelConfig
from fms_fsdp.data.batch import IGNORED_LABEL, Batch
from fms_fsdp.mesh import Mesh, ParallelDims
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.observe.metrics import Clock, Interval
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.state import Progress, TrainState
from fms_fsdp.train import TrainStep, train_step

CPU, ALONE = torch.device("cpu"), Mesh(ParallelDims("none"), 0, "cpu")


def test_a_global_batch_without_a_label_has_loss_and_norm_zero_and_is_no_skipped_step() -> None:
    model = parallelize(
        LlamaConfig(1, 16, 16, 2, 1, 32, max_seq_len=8),
        ParallelConfig(),
        ALONE,
        device=CPU,
        precision=FP32,
        seed=1,
    )
    optimizers = build_optimizers(OptimConfig(), model)
    recipe = TrainStep(ALONE, CPU, lambda step, tokens, base: 1e-3, 1, grad_clip=1.0, document_mask=False)
    nothing: Any = None
    state = TrainState(model, optimizers, nothing, Progress(0, 1))
    tokens = torch.arange(16).view(2, 8)
    batch = Batch(tokens, torch.full_like(tokens, IGNORED_LABEL), None, None)
    result = train_step(recipe, state, batch, Clock(CPU))
    assert result.loss_sum.item() == 0 and result.grad_norm.item() == 0
    assert {state["step"].item() for state in optimizers.parts[0].state.values()} == {1}
    interval = Interval(ALONE, CPU)
    interval.add(result)
    values = interval.read(result, 0.0, 0, {})
    assert (values["loss"], values["loss_mean"], values["grad_norm_mean"], values["skipped_steps"]) == (
        0,
        0,
        0,
        0,
    )
