"""Trains a row of table.py, as main_training.py does but in a process group that many rows share."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.parse import parse
from fms_fsdp.data.batch import IGNORED_LABEL, Batch
from fms_fsdp.data.validation import close_held_out, open_held_out, scan_held_out
from fms_fsdp.distributed.dtensor import global_norm, local_shard, shard_slices
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import gather_objects
from fms_fsdp.distributed.world import World
from fms_fsdp.evaluate import evaluate
from fms_fsdp.generate import Sampling, generate
from fms_fsdp.metrics.interval import IntervalMetrics, count_zero_gradients
from fms_fsdp.metrics.timer import LaunchPhases, PhaseTimer
from fms_fsdp.models.init import clean_name
from fms_fsdp.models.loss import CHUNK_BYTES
from fms_fsdp.parallel.fsdp import evaluating
from fms_fsdp.plan import plan
from fms_fsdp.run.data_stream import open_stream
from fms_fsdp.run.machine import Machine
from fms_fsdp.run.memory_budget import MemoryBudget
from fms_fsdp.run.run_dir import RunDir
from fms_fsdp.run.setup import Found, Launch
from fms_fsdp.stages import build
from fms_fsdp.state import TrainState
from fms_fsdp.train import StepSettings, next_batch, train_step
from tests.parallel.layouts import with_documents
from tests.parallel.table import Row


@dataclass
class Trained:
    """What a row gives, identical on every rank but for tensors, which rank 0 alone returns.

    weights      parameter → digest of its full initial values
    gradients    parameter → its full gradient in the first step
    steps        the values of each step
    state        the optimizer's tensors, without their values: name → full shape
    evaluations  losses on held-out data, after the first step
    texts        token ids that were generated then
    """

    weights: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    state: dict[str, tuple[int, ...]] = field(default_factory=dict)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    texts: list[Any] = field(default_factory=list)

    def values(self, name: str) -> list[float]:
        """Returns a value of every step."""
        return [step[name] for step in self.steps]


# Returns the batch of this rank in a step, in place of the stream's synthetic tokens.
BatchOf = Callable[[Batch, StepSettings, TrainState], Batch]


def open_launch(row: Row, world: World, device: torch.device, at_end: ExitStack, n: int) -> Launch:
    """Plans the row with `n` steps; `at_end` closes its data (collective)."""
    parsed = parse(TrainConfig, row.launch_flags(device.type, n))
    cfg = parsed.config
    machine = Machine.here(world, device).measured(device)
    found = Found()
    run = plan(cfg, machine, found)
    stream, _ = open_stream(
        cfg,
        run.batch,
        run.model.vocab_size,
        None,
        found.resume,
        dp_rank=run.dims.axis_rank(world.rank, "dp"),
        pin_memory=device.type == "cuda",
    )
    at_end.callback(stream.close)
    return Launch(
        parsed=parsed,
        phases=LaunchPhases(),
        device=device,
        found=found,
        run=run,
        budget=MemoryBudget(machine, None),
        run_dir=RunDir(cfg),
        stream=stream,
        data_changes=[],
        held_out=(),
    )


def train_row(
    row: Row,
    world: World,
    device: torch.device,
    num_steps: int,
    *,
    batch_of: BatchOf,
    is_watched: bool = False,
) -> Trained:
    """Trains the row (collective).

    `is_watched`: the values also have gradients and weights, whose full tensors must be small, and
    evaluations, if the row has them.
    """
    # Groups of earlier rows stay: torch caches layouts with their meshes, and may use them again.
    torch.compiler.reset()
    found = Trained()
    with ExitStack() as at_end:
        launch = open_launch(row, world, device, at_end, num_steps)
        mesh, state = build(launch)
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
            expected = dict(row.layout.sizes).get(axis, 1)
            assert mesh.size(axis) == expected, f"axis {axis}: {mesh.size(axis)}, not {expected}"

        settings = StepSettings.of(launch.run, mesh, device)
        zeros = list[torch.Tensor]()
        if is_watched:
            zeros = watch(found, state, mesh)
        interval = IntervalMetrics(mesh, device)
        timer = PhaseTimer(device)
        for step in range(num_steps):
            if is_watched and launch.run.config.eval.eval_interval and step == 1:
                look(found, launch, mesh, state)
            batch = batch_of(next_batch(settings, state), settings, state)
            result = train_step(settings, state, batch, timer)
            num_sequences, length = batch.tokens_BS.shape
            state.count(num_sequences * mesh.size("dp"), num_sequences * mesh.size("dp") * length)
            interval.add(result)
            values = interval.read(result)
            names = ["loss", "grad_norm", "z_loss"]
            found.steps.append({name: values[name] for name in names if name in values})
            if result.loss_scale is not None:
                found.steps[-1]["loss_scale"] = float(result.loss_scale)
            if is_watched:
                norm = global_norm(list(state.model.parameters()), mesh)
                found.steps[-1]["param_norm"] = norm.item()
                found.steps[-1]["grad_zeros"] = zeros[-1].item()
        if is_watched:
            tensors = state.optimizers.state_dict()
            for shapes in gather_objects({name: tuple(t.shape) for name, t in tensors.items()}):
                found.state |= shapes
    return found


def watch(found: Trained, state: TrainState, mesh: Mesh) -> list[torch.Tensor]:
    """Notes the initial weights, and the gradients of the first step before its update (collective).

    Returns a list that gets the number of zeros in the gradient of each step. From here on norm weights
    differ from one and biases from zero, so that each counts.
    """
    rope = getattr(state.model, "rope", None)  # a pipeline's is in its stages
    assert rope is None or rope.dtype == torch.float32  # no precision casts it
    full = full_tensors(dict(state.model.named_parameters()), mesh)
    for name, weight in full.items():
        found.weights[name] = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    with torch.no_grad():
        for parameter in state.model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.25)
    step = state.optimizers.step
    zeros = list[torch.Tensor]()

    def watched(*args: Any) -> None:
        named = dict(state.model.named_parameters())
        zeros.append(count_zero_gradients(list(named.values()), mesh))
        if not found.gradients:
            gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
            found.gradients.update(full_tensors(gradients, mesh))
        step(*args)

    state.optimizers.step = watched  # type: ignore[method-assign]
    return zeros


def look(found: Trained, launch: Launch, mesh: Mesh, state: TrainState) -> None:
    """Evaluates the model and generates text (collective)."""
    cfg = launch.run.config
    scanned = scan_held_out(cfg.eval, cfg.data, None, vocab_size=launch.run.model.vocab_size)
    sources = open_held_out(cfg.eval, scanned, 1)
    losses = evaluate(
        state.model,
        sources,
        batch_size=3,
        document_mask=cfg.data.document_mask,
        device=launch.device,
        mesh=mesh,
    )
    close_held_out(sources)
    found.evaluations.append(losses)
    with evaluating(state.model):
        prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
        model: Any = state.model
        texts = generate(model, prompts, Sampling(temperature=0.8), max_new_tokens=6)
        found.texts.append(list(texts))
    assert state.model.training


def full_tensors(shards: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Returns the full tensors, in fp32, of shards that all ranks together hold (collective).

    Asserts that copies of a shard are equal.
    """
    parts = []
    for name, tensor in shards.items():
        shard = local_shard(tensor).detach().float().clone()
        parts.append((clean_name(name), tuple(tensor.shape), shard_slices(tensor), shard))
    full = dict[str, torch.Tensor]()
    for parts_of_rank in gather_objects(parts):
        for name, shape, slices, shard in parts_of_rank:
            known = full.setdefault(name, torch.full(shape, math.nan))[slices]
            assert torch.equal(known, shard) or known.isnan().all(), name
            known.copy_(shard)
    return {name: full[name] for name in sorted(full)}


def random_batch(batch: Batch, settings: StepSettings, state: TrainState) -> Batch:
    """Returns another batch, whose global batch is the same in every layout: most tokens are some of a
    few, others any of the vocabulary; labels are masked, and documents cut, unevenly."""
    num_sequences, length = batch.tokens_BS.shape
    mesh = settings.mesh
    num_global = num_sequences * mesh.size("dp")
    assert settings.vocab_size is not None
    generator = torch.Generator().manual_seed(state.step)
    tokens_BS = torch.randint(settings.vocab_size, (num_global, length), generator=generator)
    few_BS = torch.randint(20, (num_global, length), generator=generator)
    is_any_BS = torch.rand(num_global, length, generator=generator) < 0.3
    tokens_BS = torch.where(is_any_BS, tokens_BS, few_BS)
    labels_BS = tokens_BS.roll(-1, 1)
    labels_BS[0, 3:] = IGNORED_LABEL
    for row in range(num_global):
        labels_BS[row, : row % 5] = IGNORED_LABEL
    is_first_BS = torch.rand(num_global, length, generator=generator) < 0.2
    documents = with_documents(Batch(tokens_BS, labels_BS, None, None), is_first_BS)
    first = mesh.axis_rank("dp") * num_sequences
    return Batch(*(column[first : first + num_sequences] for column in documents))


def cut_into_documents(batch: Batch, settings: StepSettings, _: TrainState) -> Batch:
    """Returns the batch with a new document at every token that 16 divides: synthetic tokens are one
    document. The cuts follow from the tokens alone, so that they are the same in every layout."""
    if not settings.document_mask:
        return batch
    return with_documents(batch, batch.tokens_BS % 16 == 0)


def train_on_rank(rows: list[Row], num_steps: int) -> list[Trained]:
    """Trains the rows on the CPU, one after the other, as a rank of a group or alone (collective)."""
    world = World(0, 0, 1, 1)
    if dist.is_initialized():
        size = dist.get_world_size()
        world = World(dist.get_rank(), dist.get_rank(), size, size)
        CHUNK_BYTES["cpu"] = 1  # the loss of one process is not chunked
        torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    found = []
    for row in rows:
        try:
            trained = train_row(
                row,
                world,
                torch.device("cpu"),
                num_steps,
                batch_of=random_batch,
                is_watched=True,
            )
        except Exception as error:
            raise RuntimeError(f"row {row.name}") from error
        if world.rank > 0:
            trained.gradients = {}
        found.append(trained)
    return found
