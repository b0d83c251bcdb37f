"""The memory of a rank in a step, in bytes: the measured costs of the parts, put together.

    state     weights + gradients + optimizer, sharded
    minimum   state + unsharded weights and gradients + sequences: without it no step is possible
    expected  minimum + activations + the working memory of the fullest moment + the allocator's

The fullest moment is one of three: the loss, with all activations and the logits; the backward pass
of the last block, with its recomputed activations; the end at the embedding, with all gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from fms_fsdp.config import NUM_BYTES
from fms_fsdp.config.values import rounded_bytes
from fms_fsdp.models.flops import num_params
from fms_fsdp.optim.optimizers import state_bytes
from fms_fsdp.parallel.activation_checkpointing import select_blocks
from fms_fsdp.parallel.layout import layers_of_stages, stages_of_rank
from fms_fsdp.predict.meter import ModelSetup, cost, units
from fms_fsdp.state import RunConfig

GIB = 2**30
# Fraction of the memory that comes and goes in a step which the allocator adds. On a CPU glibc
# cannot use every gap again (tests/predict/test_peaks.py); torch on a GPU rounds sizes up (not
# measured).
_ALLOCATOR = {"cpu": 0.27, "cuda": 0.05}
_GAPS = 0.5  # on a CPU with --recompute=ops: each kept result is between two freed ones


@dataclass(frozen=True)
class Step:
    """A step of a rank: `accum` gradient-accumulation steps of `micro_batch` sequences.

    optimizer_bytes   of the optimizer's state per parameter; 8 are those of AdamW in fp32
    """

    setup: ModelSetup
    num_sequences: int
    accum: int
    optimizer_bytes: float = 8.0

    @staticmethod
    def of(run: RunConfig, *, compiled: bool) -> Step:
        """Returns the step of a resolved run."""
        setup = ModelSetup(
            run.model,
            run.config.parallel,
            run.precision,
            run.dims,
            run.seq_length,
            compiled,
            run.device_type,
        )
        state = state_bytes(run.config.optim, run.model, run.precision)
        return Step(
            setup,
            run.batch.batch_size,
            run.batch.grad_accum_steps,
            optimizer_bytes=state / num_params(run.model),
        )

    @property
    def micro_batch(self) -> int:
        """The sequences that pass through a rank at a time."""
        setup = self.setup
        return setup.section.pp_micro_batch_size if setup.dims.pp > 1 else self.num_sequences

    @property
    def num_micro_batches(self) -> int:
        return self.accum * self.num_sequences // self.micro_batch

    @property
    def tokens(self) -> int:
        """The tokens of a step on all devices."""
        return self.num_sequences * self.accum * self.setup.dims.size("dp") * self.setup.seq_length


def checkpoint_bytes(run: RunConfig) -> int:
    """Returns the approximate size of a checkpoint: weights and optimizer state."""
    weights = NUM_BYTES[run.precision.weights] * num_params(run.model)
    return weights + state_bytes(run.config.optim, run.model, run.precision)


@dataclass(frozen=True)
class Held:
    """The number of parts of the model that a rank of the pipeline holds."""

    embed: int
    plain: int  # blocks that are not recomputed
    recomputed: int
    head: int
    stages: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return self.plain + self.recomputed

    def params(self, setup: ModelSetup) -> int:
        """Returns the parameters before FSDP shards them."""
        sizes = units(setup)
        return (
            self.embed * sizes["embed"] + self.blocks * sizes["block"] + self.head * sizes["head"]
        )


@cache
def held_by(setup: ModelSetup, stage: int) -> Held:
    """Returns the parts that the rank at this stage of the pipeline holds."""
    config = setup.config
    dims = setup.dims
    section = setup.section
    num_stages = dims.pp * dims.virtual_stages
    stages = stages_of_rank(stage, dims.pp, dims.virtual_stages, section.pp_schedule)
    # `config.max_seq_len`, as parallelize divides the layers before it knows a batch.
    stage_layers = layers_of_stages(config, config.max_seq_len, num_stages)
    layers = [layer for stage in stages for layer in stage_layers[stage]]

    fraction = section.recomputed_share
    if section.recomputes == "cheap":
        fraction = Fraction(int(setup.compiled))  # the compiler does it, in every block
    num_recomputed = 0
    if fraction:
        is_recomputed = select_blocks(config.num_layers, fraction, section.segment)
        num_recomputed = sum(is_recomputed[layer] for layer in layers)
    return Held(
        embed=0 in stages,
        plain=len(layers) - num_recomputed,
        recomputed=num_recomputed,
        head=num_stages - 1 in stages,
        stages=tuple(stages),
    )


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank by kind.

    gradients    sharded ones, and unsharded ones until the last accumulation step reduces them
    gathered     unsharded weights
    sequences    the tokens of a step, the table of positions, and the input of a block
    activations  kept for the backward pass at the fullest moment
    working      logits, gradients, recomputed activations and buffers at that moment
    saves        copies of background saves, in host memory
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int = 0
    sequences: int = 0
    activations: int = 0
    working: int = 0
    allocator: int = 0
    saves: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def by_device(self, device_type: str, *, offload: bool) -> dict[str, Memory]:
        """Returns the memory of the device and of the host by type; with `offload` the host holds
        the state."""
        if device_type == "cpu":
            return {"cpu": self}
        host = Memory(0, 0, 0, saves=self.saves)
        device = replace(self, saves=0)
        if offload:
            host = Memory(self.weights, self.gradients, self.optimizer, saves=self.saves)
            device = replace(device, weights=0, gradients=0, optimizer=0)
        return {device_type: device, "cpu": host}

    def summary(self, available: int | None = None) -> str:
        """Returns the line at the start of a run; `available` are the bytes that a rank may use."""
        names = ("weights", "gathered", "gradients", "optimizer", "activations", "saves")
        sizes = {name: getattr(self, name) for name in names}
        sizes["other"] = self.total - sum(sizes.values())
        parts = ", ".join(f"{name} {rounded_bytes(size)}" for name, size in sizes.items() if size)
        limit = "" if available is None else f" of {rounded_bytes(available)}"
        return f"{rounded_bytes(self.total)}{limit} per rank ({parts})"


def minimum_memory(step: Step) -> Memory:
    """Returns the memory without which no step is possible, on the rank that holds most; runs no
    part of the model."""
    found = (_minimum(step, stage) for stage in range(step.setup.dims.pp))
    return max(found, key=lambda memory: memory.total)


def estimate_memory(step: Step, saves: int = 0) -> Memory:
    """Returns the expected memory, in bytes, of the rank that holds most.

    `saves`: bytes of background saves.
    """
    found = (_expected(step, stage) for stage in range(step.setup.dims.pp))
    return replace(max(found, key=lambda memory: memory.total), saves=saves)


def _minimum(step: Step, stage: int) -> Memory:
    setup = step.setup
    accum = step.accum
    config = setup.config
    dims = setup.dims
    precision = setup.precision
    sizes = units(setup)
    params = held_by(setup, stage).params(setup)
    shards = dims.size("shard")
    compute = NUM_BYTES[precision.compute]

    bytes_per_weight = NUM_BYTES[precision.weights]
    if precision.rounded_copy:
        bytes_per_weight += 2
    weights = bytes_per_weight * params // shards
    optimizer = int(step.optimizer_bytes * params) // shards
    gradients = NUM_BYTES[precision.gradients] * params // shards
    if (accum > 1 or dims.pp > 1) and not dims.sync_each_micro_step:
        gradients = max(gradients, NUM_BYTES[precision.reduce] * params)  # unsharded ones

    if dims.strategy == "none":
        gathered = 0
        if precision.compute != precision.weights:
            gathered = compute * sizes["embed"]  # modules cast one weight at a time
    elif dims.keeps_weights:
        gathered = compute * params
    else:
        tied = sizes["embed"] if config.tie_embeddings else 0  # the root stays gathered
        group = sizes["block"] * min(setup.section.blocks_per_group, config.num_layers)
        gathered = compute * (tied + max(group, sizes["embed"] - tied, sizes["head"]))

    columns = 32 * accum * step.num_sequences * setup.seq_length  # four of int64 for each token
    rope = 8 * config.rotary_dim * config.max_seq_len
    tokens = step.micro_batch * setup.seq_length // dims.cp
    if dims.sequence_parallel:
        tokens //= dims.tp
    block_input = compute * config.hidden_size * tokens
    return Memory(weights, gradients, optimizer, gathered, sequences=columns + rope + block_input)


def _expected(step: Step, stage: int) -> Memory:
    setup = step.setup
    micro = step.micro_batch
    config = setup.config
    dims = setup.dims
    section = setup.section
    minimum = _minimum(step, stage)
    held = held_by(setup, stage)
    sizes = units(setup)
    compute = NUM_BYTES[setup.precision.compute]
    reduce = NUM_BYTES[setup.precision.reduce]

    # Blocks: what all keep, and the most that one adds in its backward pass. A segment keeps its
    # input alone, and its backward pass recomputes all of its blocks.
    segment = min(section.segment, max(1, held.recomputed))
    block = cost(setup, "block", micro)
    recomputed = cost(setup, "recomputed", micro) if held.recomputed else block
    num_segments = -(-held.recomputed // segment)
    kept = held.plain * block.kept + num_segments * recomputed.kept
    kept *= _in_flight(setup, stage, step.num_sequences // micro)
    working = max(0, recomputed.peak - recomputed.kept)
    if held.plain:
        working = max(working, block.peak - block.kept)
    working += (segment - 1) * block.kept
    at_loss = cost(setup, "head", micro).peak if held.head else 0
    at_end = cost(setup, "embed", micro).peak if held.embed else 0

    gathered = minimum.gathered
    if dims.strategy == "none":
        if step.accum == 1 and not config.tie_embeddings:
            at_end = 0  # its gradient is one of the gradients
    else:
        group = sizes["block"] * min(section.blocks_per_group, config.num_layers)
        if dims.keeps_weights:
            gathered = compute * held.params(setup)
        else:
            gathered = compute * 2 * group  # the group in use, and the next one
            if config.tie_embeddings:
                gathered += compute * sizes["embed"]
            at_loss += compute * held.head * sizes["head"]
        working += reduce * max(group, held.head * sizes["head"])  # the input of a reduction
        at_end += reduce * sizes["embed"]

    if config.pos_emb in ("alibi", "relative"):
        num_masks = len(set(config.windows))  # one for each window, which all layers share
        if config.pos_emb == "relative":
            num_masks = 2 * num_masks + micro  # its gradient, and what a layer adds to it
        heads = config.num_attention_heads // dims.tp
        kept += num_masks * compute * heads * setup.seq_length**2

    # Gradients of this step exist from the second gradient-accumulation step on, and grow in the
    # backward pass. Those of FSDP are in memory of another stream of the GPU, which activations
    # cannot use before either.
    gradients = minimum.gradients
    early = 0
    if step.accum > 1 or dims.pp > 1:
        early = gradients
    elif dims.strategy != "none" and setup.device_type == "cuda" and not section.cpu_offload:
        early = gradients

    fullest = max(early + kept + at_loss, early + kept + working, gradients + at_end)
    activations = int(min(kept, fullest - gradients))
    fraction = _ALLOCATOR[setup.device_type]
    if setup.device_type == "cpu" and section.recomputes == "ops" and not setup.compiled:
        fraction += _GAPS
    return replace(
        minimum,
        gathered=gathered,
        activations=activations,
        working=int(fullest) - gradients - activations,
        allocator=int(fraction * (fullest + gathered)),
    )


def _in_flight(setup: ModelSetup, stage: int, micro_batches: int) -> float:
    """Returns the micro-batches whose activations a rank keeps, in units of all its stages.

    Example: with 1f1b over 4 ranks the first one keeps 4, before the first gradient reaches it, and
    the last one 1. Source: torch.distributed.pipelining.schedules.
    """
    dims = setup.dims
    later_ranks = dims.pp - 1 - stage
    match setup.section.pp_schedule:
        case "gpipe":  # all forward passes come first
            return micro_batches
        case "interleaved":
            rounds = max(1, micro_batches // dims.pp)
            before_last_stage = (dims.virtual_stages - 1) * (micro_batches // rounds)
            return min(
                micro_batches, (before_last_stage + 2 * later_ranks + 1) / dims.virtual_stages
            )
        case "zbv":  # a rank holds an early and a late stage, so all keep the same
            return min(micro_batches, dims.pp)
        case _:
            return min(micro_batches, later_ranks + 1)
