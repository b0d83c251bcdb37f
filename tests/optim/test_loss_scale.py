"""The loss scale of fp16: its rule against plain Python, and steps and runs that are made with it."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fms_fsdp.config import (
    OptimConfig,
    ParallelConfig,
    Precision,
    PrecisionConfig,
    TrainConfig,
    TrainingConfig,
)
from fms_fsdp.data.batch import Batch
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.dtensor import local_shards
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.errors import RunFailed
from fms_fsdp.metrics.timer import PhaseTimer
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import Llama
from fms_fsdp.optim.loss_scale import LossScale
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.run.health import NonFiniteGuard
from fms_fsdp.state import StepResult, TrainState
from fms_fsdp.train import StepSettings, train_step
from tests.cli import TINY, metrics, run, trained
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import mesh_of
from tests.states import bare_state

CPU, ALONE = torch.device("cpu"), Mesh(ParallelDims("none"), 0, "cpu")
FP32, FP16 = Precision(), Precision(compute="fp16")
CONFIG = TransformerConfig(2, 64, 96, 4, 2, 120, max_seq_len=16)


def new_scale(initial: float, window: int, hysteresis: int, floor: float) -> LossScale:
    moving = {"loss_scale_window": window, "loss_scale_hysteresis": hysteresis}
    return LossScale(PrecisionConfig(loss_scale=initial, min_loss_scale=floor, **moving), CPU)


def loss_scale(
    initial: float = 0, hysteresis: int = 2, floor: float = 1.0, first: float = 0
) -> LossScale:
    """Returns a scale that moves after three steps; a dynamic one begins with `first`."""
    scale = new_scale(initial, 3, hysteresis, floor)
    scale.load_state_dict({"scale": first or scale.scale.item(), "steps": 0, "left": hysteresis})
    return scale


def after(scale: LossScale, norms: str) -> list[float]:
    """The scale after each step; "x" is an overflow."""
    found = []
    for norm in norms:
        scale.update(torch.tensor(math.inf if norm == "x" else 1.0))
        found.append(scale.scale.item())
    return found


def expected(norms: str, window: int, hysteresis: int, floor: float) -> list[tuple[float, bool]]:
    """Scale and whether it is stuck after each step, by the rule as it is told."""
    scale, steps, left, found = max(2.0**16, floor), 0, hysteresis, []
    for norm in norms:
        stuck = False
        if norm == "x":
            steps = 0
            left -= 1
            if left <= 0:
                stuck = scale == floor
                scale = max(scale / 2, floor)
        else:
            steps += 1
            if steps == window:
                scale, steps, left = min(2 * scale, 2.0**64), 0, hysteresis
        found.append((scale, stuck))
    return found


def test_loss_scale_follows_its_rule() -> None:
    draw = random.Random(1)
    stuck = 0
    for window, hysteresis, floor in itertools.product(
        (1, 2, 5), (1, 2, 4), (0.25, 1.0, 3000.0, 2.0**17)
    ):
        norms = "".join(draw.choices("x.", (draw.random(), 0.5), k=120))
        scale = new_scale(0, window, hysteresis, floor)
        for norm, (value, is_stuck) in zip(
            norms, expected(norms, window, hysteresis, floor), strict=True
        ):
            scale.update(torch.tensor(draw.choice((math.inf, math.nan)) if norm == "x" else 1.0))
            assert (scale.scale.item(), scale.is_stuck.item()) == (value, is_stuck)
            stuck += is_stuck
    assert stuck > 10


def test_fixed_scale_never_moves() -> None:
    scale = new_scale(128, 1, 1, 1.0)
    scale.load_state_dict({"scale": 4.0, "steps": 0, "left": 1})
    assert after(scale, "xxxx....") == [128] * 8 and not scale.is_stuck and not scale.is_dynamic


def test_scale_resumes_above_its_floor() -> None:
    norms = "x..x...xx.x"
    wanted = after(loss_scale(), norms)
    for cut in range(len(norms)):
        first, second = loss_scale(), loss_scale()
        found = after(first, norms[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert found + after(second, norms[cut:]) == wanted
    high = loss_scale(floor=256.0)
    high.load_state_dict({"scale": 2.0, "steps": 0, "left": 9})
    assert high.state_dict() == {"scale": 256.0, "steps": 0, "left": 2}


def state_of(
    precision: Precision, mesh: Mesh = ALONE, scale: LossScale | None = None
) -> TrainState:
    section = ParallelConfig(sharding_strategy=mesh.dims.strategy)
    model = parallelize(CONFIG, section, mesh, device=CPU, precision=precision, seed=1)
    stream: Any = None
    return TrainState(model, build_optimizers(OptimConfig(), model), stream, 9, loss_scale=scale)


def make(state: TrainState, mesh: Mesh = ALONE, grad_clip: float = 1.0) -> StepResult:
    """One step of two micro-steps."""
    settings = StepSettings(
        mesh, CPU, lambda step, tokens, base: 1e-2, 2, grad_clip, document_mask=False
    )
    tokens = (torch.arange(4 * 16) ** 2 % 119).view(4, 16)
    return train_step(
        settings, state, Batch(tokens, tokens.roll(-1, 1), None, None), PhaseTimer(CPU)
    )


def numbers(state: TrainState) -> list[torch.Tensor]:
    return [*state.model.parameters(), *state.optimizers.state_dict().values()]


@pytest.mark.parametrize(("size", "grad_clip"), [(1.0, 0.1), (2.0**10, 0.0), (3000.0, 0.1)])
def test_fp32_step_ignores_the_scale(size: float, grad_clip: float) -> None:
    plain, scaled = state_of(FP32), state_of(FP32, scale=new_scale(size, 1, 1, 1))
    for _ in range(3):
        one, other = make(plain, grad_clip=grad_clip), make(scaled, grad_clip=grad_clip)
        torch.testing.assert_close(one.grad_norm, other.grad_norm, rtol=1e-5, atol=0)
        assert one.loss_scale is None and other.loss_scale == size
    for left, right in zip(numbers(plain), numbers(scaled), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def test_loss_gets_the_scale_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head computes its gradient at the scale, over the 64 labels of two micro-steps."""
    scales: list[float] = []
    state = state_of(FP16, scale=loss_scale(first=2.0**10))
    assert isinstance(state.model, Llama) and state.model.head is not None
    plain = state.model.head.loss

    def loss(*args: Any, scale: torch.Tensor, **others: Any) -> Any:
        scales.append(scale.item())
        return plain(*args, scale=scale, **others)

    monkeypatch.setattr(state.model.head, "loss", loss)
    assert make(state).grad_norm.isfinite() and scales == [2.0**10 / 64] * 2


def test_overflow_skips_the_step_and_halves_scale() -> None:
    state = state_of(FP16, scale=loss_scale(first=2.0**26, hysteresis=1))
    before = [tensor.detach().clone() for tensor in numbers(state)]
    result = make(state)
    assert not result.grad_norm.isfinite() and result.loss_scale == 2.0**26
    assert all(torch.equal(one, other) for one, other in zip(before, numbers(state), strict=True))
    assert state.loss_scale is not None and state.loss_scale.scale == 2.0**25
    for _ in range(20):
        result = make(state)
    assert result.grad_norm.isfinite() and 2.0**8 < state.loss_scale.scale < 2.0**25
    assert not torch.equal(before[0], numbers(state)[0])


def step_where_one_rank_overflows() -> tuple[bool, bool, float]:
    mesh = mesh_of(ParallelConfig(sharding_strategy="fsdp"))
    state = state_of(FP16, mesh, loss_scale(first=64, hysteresis=1))
    assert make(state, mesh).grad_norm.isfinite()
    before = [shard.clone() for shard in local_shards(numbers(state))]
    if mesh.is_main:
        state.model.blocks["1"].register_forward_hook(
            lambda module, inputs, output: output * 6e4 * 6e4
        )
    bad = make(state, mesh)
    same = all(
        torch.equal(*pair) for pair in zip(before, local_shards(numbers(state)), strict=True)
    )
    assert state.loss_scale is not None
    return bool(bad.grad_norm.isfinite()), same, state.loss_scale.scale.item()


def test_overflow_on_one_rank_skips_everywhere() -> None:
    assert run_ranks(step_where_one_rank_overflows, 2) == [(False, True, 32.0)] * 2


def guarded(scale: LossScale, norms: str, limit: int = 2) -> int:
    """Returns the consecutive non-finite steps after steps of these norms, "x" for a NaN."""
    state, folder = bare_state(0, 9), Path("nowhere")
    state.loss_scale = scale
    state.stream = SimpleNamespace(batch_at=lambda step: None)  # type: ignore[assignment]
    cfg = TrainConfig(training=TrainingConfig(max_bad_steps=limit))
    guard = NonFiniteGuard(cfg, folder, ALONE, state)
    for step, norm in enumerate(norms, start=1):
        grad_norm = torch.tensor(math.nan if norm == "x" else 1.0)
        scale.update(grad_norm)
        guard.check(step, grad_norm, torch.tensor(8))
    return state.non_finite_steps


def test_overflows_are_logged_but_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fms_fsdp")
    assert guarded(loss_scale(first=64), "xxx") == 0
    lines = [record.getMessage() for record in caplog.records]
    scales = [line.rpartition("scale ")[2] for line in lines]
    assert scales == ["64 -> 64", "64 -> 32", "32 -> 16"]
    assert lines[0].startswith("step 1: ")


def test_overflow_at_lowest_scale_is_an_error() -> None:
    with pytest.raises(
        RunFailed,
        match=r"step 3: .* 32 is --min_loss.*The data come.*--precision=bf16.*\(--run_name=\S+\) with a lower",
    ):
        guarded(loss_scale(first=64, floor=32.0), "xxxx")
    assert guarded(loss_scale(64.0), "x.x.x", limit=2) == 1
    with pytest.raises(RunFailed, match="2 of at most 2 consecutive"):
        guarded(loss_scale(64.0), "xx")


FP16_RUN = (*TINY, "--precision=fp16", "--batch_size=2", "--loss_scale_window=4", "--num_steps=12")
FP16_RUN += ("--num_layers=1",)  # products in fp16 are slow on most CPUs


@pytest.mark.slow
def test_resumed_run_continues_its_loss_scale(tmp_path: Path) -> None:
    trained(*FP16_RUN, f"--output_dir={tmp_path}/whole")
    assert run(*FP16_RUN, f"--output_dir={tmp_path}/halves", "--exit_step=6").returncode == 75
    trained(*FP16_RUN, f"--output_dir={tmp_path}/halves")
    whole, halves = (list(metrics(tmp_path / name).values()) for name in ("whole", "halves"))
    assert [record["loss_scale"] for record in whole] == [
        2.0**exponent for exponent in (16, 17, 18) for _ in range(4)
    ]
    for key in ("loss", "loss_scale", "grad_norm", "skipped_steps"):
        assert [record[key] for record in whole] == [record[key] for record in halves]
    assert max(record["grad_norm"] for record in whole) < 50
