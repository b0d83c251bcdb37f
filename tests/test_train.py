"""One step of the loop by itself."""

from __future__ import annotations

import copy
import math
import traceback
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fms_fsdp.config import FP32, OptimConfig, ParallelConfig, Precision
from fms_fsdp.config.optim import OPTIMIZERS
from fms_fsdp.data.batch import IGNORED_LABEL, Batch
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.errors import UserError
from fms_fsdp.metrics.interval import IntervalMetrics
from fms_fsdp.metrics.timer import PhaseTimer
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.llama import Llama
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.state import TrainState
from fms_fsdp.train import StepSettings, next_batch, train_step

CPU, ALONE = torch.device("cpu"), Mesh(ParallelDims("none"), 0, "cpu")


class Once:
    """A stream of one batch."""

    def __init__(self, batch: Batch) -> None:
        self._batches = [batch]

    def next_batch(self) -> Batch:
        return self._batches.pop()


def small(precision: Precision) -> Llama:
    shape = TransformerConfig(2, 16, 16, 2, 1, 32, max_seq_len=8)
    return parallelize(shape, ParallelConfig(), ALONE, device=CPU, precision=precision, seed=1)


def settings() -> StepSettings:
    """Returns a training step of one process."""
    return StepSettings(ALONE, CPU, lambda *_: 1e-3, 1, 1.0, document_mask=False, vocab_size=32)


def test_step_without_labels_changes_nothing() -> None:
    model, nothing = small(FP32), cast(Any, None)
    state = TrainState(model, build_optimizers(OptimConfig(), model), nothing, 2)
    tokens = torch.arange(16).view(2, 8)
    train_step(settings(), state, Batch(tokens, tokens, None, None), PhaseTimer(CPU))
    kept = [*model.parameters(), *state.optimizers.state_dict().values()]
    before = copy.deepcopy(kept)
    batch = Batch(tokens, torch.full_like(tokens, IGNORED_LABEL), None, None)
    result = train_step(settings(), state, batch, PhaseTimer(CPU))
    assert result.loss_sum.item() == 0 and result.grad_norm.item() == 0
    after = [*model.parameters(), *state.optimizers.state_dict().values()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    interval = IntervalMetrics(ALONE, CPU)
    interval.add(result)
    values = interval.read(result, 0.0, 0, {})
    assert all(math.isnan(values[name]) for name in ("loss", "loss_mean", "perplexity"))
    assert values["grad_norm_mean"] == values["skipped_steps"] == 0


def run_on(tokens: torch.Tensor, labels: torch.Tensor) -> TrainState:
    """Trains one step on the batch of `Once`."""
    own, model = cast(Any, Once(Batch(tokens, labels, None, None))), small(FP32)
    state = TrainState(model, build_optimizers(OptimConfig(), model), own, 7, step=6)
    batch = next_batch(settings(), state)
    train_step(settings(), state, batch, PhaseTimer(CPU))
    state.count(*batch.tokens_BS.shape)
    return state


@pytest.mark.parametrize("name", ["token", "label"])
@pytest.mark.parametrize("value", [-1, -101, 32, 1 << 40])
def test_token_beyond_vocabulary_names_its_place(value: int, name: str) -> None:
    """A stream that masks with -1 finished without a word: its -1 were trained as token 0."""
    tokens = torch.arange(16).view(2, 8)
    labels = tokens.clone()
    (tokens if name == "token" else labels)[1, 5] = value
    place = rf"{name} {value} at step 7, sequence 1, position 5 is outside the vocabulary \(32\)"
    with pytest.raises(UserError, match=place) as refused:
        run_on(tokens, labels)
    assert refused.value.data_step == 7 and refused.value.on_one_rank


def test_masked_and_extreme_labels_are_accepted() -> None:
    tokens = torch.arange(16).view(2, 8)
    labels = tokens.clone()
    labels[0, :3] = torch.tensor([IGNORED_LABEL, 0, 31])
    assert run_on(tokens, labels).step == 7


class Reads(TorchDispatchMode):
    """Notes which line of the program makes a number of a tensor, or a shape that depends on one."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, name = torch.ops.aten, func.overloadpacket
        if name in (
            aten._local_scalar_dense,
            aten.nonzero,
            aten.masked_select,
            aten._unique2,
            aten.equal,
        ):
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/fms_fsdp/" in frame.filename]
        self.places.append((Path(frames[-1].filename).name, frames[-1].line or ""))


PURE = Precision("bf16", weights="bf16", gradients="bf16", state="bf16")
COUNTED = 'own_labels = int((batch.labels_BS != IGNORED_LABEL).sum()) * mesh.counts_for("dp")'
HOST = [
    ("train.py", COUNTED),
    (
        "optimizers.py",
        'if shards and (factor.device.type != "cpu" or factor != 1):',
    ),  # of CPUs alone
]
# Step counts, which are kept on the host.
COUNT = (
    "sharded_optimizers.py",
    'params, states = by_step.setdefault(int(state["step"]), ([], []))',
)
COUNT_OF_TORCH = ("optimizers.py", "optimizer.step()")
LATE = ("runtime.py", "return self._values.tolist()")  # the step before
IS_FINITE = (
    "optimizers.py",
    "skips_on_host = not all(map(_skips_on_device, self.optimizers)) and bool(is_bad.item())",
)
WAITING = {"sgd", "adagrad", "adadelta", "adamax", "rmsprop", "rprop"}  # as train.py says


@pytest.mark.parametrize(
    ("name", "precision"),
    [("adamw", Precision("bf16")), ("adamw", PURE), *((name, FP32) for name in OPTIMIZERS)],
)
def test_host_reads_nothing_of_the_running_step(
    name: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So on a GPU it is a step ahead. The labels are counted before they go there."""
    allowed = {*HOST, COUNT_OF_TORCH}
    if name in WAITING:
        allowed.add(IS_FINITE)
    elif precision == PURE or name not in ("adamw", "adam"):
        allowed |= {LATE, COUNT}
    model = small(precision)
    optimizers = build_optimizers(OptimConfig(optimizer=name), model, precision)
    state = TrainState(model, optimizers, cast(Any, None), 2)
    interval, tokens = IntervalMetrics(ALONE, CPU), torch.arange(16).view(2, 8)
    batch = Batch(tokens, tokens, None, None)
    train_step(settings(), state, batch, PhaseTimer(CPU))
    seen, to_list = Reads(), torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: (seen.note(), to_list(tensor))[1])
    with seen:
        interval.add(train_step(settings(), state, batch, PhaseTimer(CPU)))
    assert {*HOST} <= {*seen.places} <= allowed
    assert (IS_FINITE in seen.places) == (name in WAITING)
