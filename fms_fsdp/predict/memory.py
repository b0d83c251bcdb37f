"""What a rank needs, part by part, in bytes: arithmetic alone.

    least    = (parameters, gradients and the optimizer's state) / (dp_shard x cp)
               + the weights that FSDP gathers: its largest unit, or all where they are kept
               + whole gradients, where they wait for the last micro-step
               + rows
    expected = least + what a step holds beside it at its fullest moment + the allocator's share

Ranks of tp and pp have a share of the model (shares.py) in place of the whole. Of the activations the least
has only the input of one block. The fullest moment is one of four:

    the loss        all activations, the logits and the gradients that the loss makes in the forward pass
    the head        all activations, the head's whole gradient and the buffer that reduces it
    the last block  all activations, what the block computes again, its temporaries, units on their way
    the embedding   no activations; all gradients, the embedding's whole one and its buffer

Between two of them activations go as gradients come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fms_fsdp.config import FP32, NUM_BYTES, BatchPlan, ParallelConfig, Precision
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.models.flops import num_params, num_params_by_unit
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parts import load_part
from fms_fsdp.predict.activations import BlockActivations, activation_bytes, loss_bytes

if TYPE_CHECKING:
    import torch

_ADAMW_BYTES = 8  # per parameter: two moments in fp32
# Of what comes and goes within a step. CPU: glibc finds no second use for a freed piece that lies alone,
# since it asks for a few bytes more than an aligned tensor has; 0.05 to 0.43 in tests/predict/test_peaks.py.
# GPU: torch rounds what it requests; not measured.
ALLOCATOR_SHARE = {"cpu": 0.27, "cuda": 0.05}
_BETWEEN_KEPT = 0.5  # more on a CPU where single results are kept, each between two that are freed


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank: `state` is its share of weights, gradients and optimizer state (of which `weights`
    and `optimizer`), `unit` the weights gathered at once.

    `gradients`: whole ones, beyond the rank's share of them. `rows`: the table of positions, the rows of a
    step and what a block takes in at once. The rest is no part of the total. `activations`: what the blocks
    keep for the backward pass. `loss`: logits, and the gradients that the loss makes. `buffers`: of FSDP,
    beside the unit in use. `working`: what one block computes again, and the temporaries of its backward
    pass. `beside`: the most that a step holds of these four while it holds the whole total, `on_device`:
    while it holds no state. `slack`: the allocator's. `host_saves`: copies of background saves in host
    memory. `params`: of the model, or of the share of a rank of tp and pp.
    """

    state: int
    unit: int
    dims: ParallelDims
    rows: int = 0
    gradients: int = 0
    activations: int = 0
    beside: int = 0
    params: int = 0
    weights: int = 0
    optimizer: int = 0
    loss: int = 0
    buffers: int = 0
    working: int = 0
    on_device: int = 0
    slack: int = 0
    host_saves: int = 0
    device_type: str = "cuda"

    @property
    def total(self) -> int:
        """The least with which a step can be taken."""
        return self.state + self.unit + self.rows + self.gradients

    @property
    def expected(self) -> int:
        """The most that a step is expected to hold at once."""
        saves = self.host_saves if self.device_type == "cpu" else 0
        return self.total + self.beside + self.slack + saves

    def by_holder(self, device: torch.device, section: ParallelConfig) -> dict[torch.device, MemoryEstimate]:
        """What each device has to hold; with `cpu_offload` the state lies in host memory."""
        import torch  # `--list_variants` works without it

        if not section.cpu_offload or device.type == "cpu":
            return {device: self}
        host = MemoryEstimate(self.state, 0, self.dims, host_saves=self.host_saves, device_type="cpu")
        rest = replace(self, state=0, weights=0, optimizer=0, beside=self.on_device)
        return {torch.device("cpu"): host, device: rest}


def estimate_memory(
    config: LlamaConfig,
    dims: ParallelDims,
    section: ParallelConfig,
    *,
    precision: Precision = FP32,
    batch: BatchPlan | None = None,
    seq_length: int = 0,
    optimizer_bytes: int | None = None,
    compiled: bool = True,
    device_type: str = "cuda",
    saved_bytes: int = 0,
) -> MemoryEstimate:
    """What a rank needs. Under `none` nothing is gathered; what computes in another dtype than that of
    weights casts one weight at a time.

    `optimizer_bytes`: of the optimizer's state of the whole model (default: AdamW's). `compiled`: whether the
    blocks are. `saved_bytes`: of a checkpoint of the whole model that is written in the background.
    """
    weight_bytes, units, whole = NUM_BYTES[precision.compute], num_params_by_unit(config), num_params(config)
    params, shards = whole, dims.size("shard")
    if dims.divides_model:
        share = load_part("shares", folder="predict").share_of(config, dims, section)
        units, params = share.units, share.params
    if dims.strategy == "none":
        casts = precision.compute != precision.weights
        unit = weight_bytes * units["embed"] if casts else 0  # the head's weight has that size too
    elif dims.keeps_weights:
        unit = weight_bytes * params
    else:
        unit = weight_bytes * max(_fsdp_units(config, section, units).values())
    if optimizer_bytes is None:
        optimizer_bytes = _ADAMW_BYTES * whole
    weights = NUM_BYTES[precision.weights] * params // shards
    optimizer = optimizer_bytes * params // whole // shards
    kept = NUM_BYTES[precision.weights] + NUM_BYTES[precision.gradients] + 2 * precision.rounded_copy
    state = -(-(kept * params + optimizer_bytes * params // whole) // shards)
    need = MemoryEstimate(
        state,
        unit,
        dims,
        params=params,
        weights=weights,
        optimizer=optimizer,
        host_saves=saved_bytes * params // whole // shards,
        device_type=device_type,
    )
    if batch is None:
        return need
    return _Step(config, section, precision, batch, seq_length, compiled, units, need).estimate()


def _fsdp_units(config: LlamaConfig, section: ParallelConfig, units: Mapping[str, int]) -> dict[str, int]:
    """Parameters of what FSDP gathers at once; a tied embedding is in the root, with the final norm."""
    group = units["block"] * min(section.blocks_per_group, config.num_layers)
    if config.tie_embeddings:
        return {
            "embed": units["embed"] + units["head"],
            "block": group,
            "head": units["embed"] + units["head"],
        }
    return {"embed": units["embed"], "block": group, "head": units["head"]}


@dataclass(frozen=True)
class _Step:
    """A step of a batch, and what a rank `holds` before it."""

    config: LlamaConfig
    section: ParallelConfig
    precision: Precision
    batch: BatchPlan
    seq_length: int
    compiled: bool
    units: Mapping[str, int]
    holds: MemoryEstimate

    @property
    def number(self) -> int:
        return NUM_BYTES[self.precision.compute]

    @property
    def reduced(self) -> int:
        """Bytes of a number in the input of a reduction; gloo adds up in a copy of the whole input."""
        return NUM_BYTES[self.precision.reduce] * (2 if self.holds.device_type == "cpu" else 1)

    @property
    def at_once(self) -> int:
        """Tokens of the rows that pass a block at a time."""
        rows = self.section.pp_micro_batch_size if self.holds.dims.pp > 1 else self.batch.batch_size
        return rows * self.seq_length

    @property
    def shard(self) -> int:
        """Bytes of this rank's gradients."""
        gradient = NUM_BYTES[self.precision.gradients]
        return gradient * self.holds.params // self.holds.dims.size("shard")

    def estimate(self) -> MemoryEstimate:
        """What the rank holds, with the parts that a batch adds."""
        dims, accum, config = self.holds.dims, self.batch.grad_accum_steps, self.config
        tokens, gradients = self.batch.batch_size * self.seq_length, 0
        if (accum > 1 or dims.pp > 1) and not dims.sync_each_micro_step:
            # takes the place of the whole ones, part by part
            gradients = max(0, NUM_BYTES[self.precision.reduce] * self.holds.params - self.shard)
        cut = dims.cp * (dims.tp if dims.sequence_parallel else 1)
        # the table, four int64 columns of the stream, the input of a block
        rows = 8 * config.rotary_dim * config.max_seq_len + 32 * accum * tokens
        rows += self.number * config.hidden_size * self.at_once // cut
        how = dict(compiled=self.compiled, device_type=self.holds.device_type)
        a_model = (config, tokens, self.seq_length, self.precision, self.section)
        activations = activation_bytes(*a_model, **how)  # type: ignore[arg-type]
        if config.pos_emb == "relative":
            activations += load_part("distance_bias:bias_bytes")(config, tokens, self.seq_length, self.number)
        if dims.divides_model:
            part = load_part("shares", folder="predict")
            activations = int(part.kept_activations(config, dims, self.section, self.batch) * activations)
        need = replace(
            self.holds,
            rows=rows,
            gradients=gradients,
            activations=activations,
            loss=self._loss(),
            working=self._working(),
            buffers=self._buffers(),
        )
        full, end = activations + self._fullest(need), self._end()
        # gradients come as activations go, unless a micro-step before has left them
        beside = max(0, full - (self.shard if accum == 1 else 0), end)
        moves = need.total + beside - need.weights - need.optimizer
        share = ALLOCATOR_SHARE.get(need.device_type, 0.05)
        if self.section.recomputes == "ops" and need.device_type == "cpu" and not self.compiled:
            share += _BETWEEN_KEPT
        slack = int(share * moves)
        return replace(need, beside=beside, on_device=max(0, full, end), slack=slack)

    def _working(self) -> int:
        number = self.number
        block = BlockActivations(self.config, self.seq_length, number, self.compiled, self.holds.device_type)
        cut = self.holds.dims.cp * self.holds.dims.tp
        return self.at_once * (block.again(self.section) + block.temporaries) // cut

    def _loss(self) -> int:
        dims = self.holds.dims
        if not self.units["head"] or not self.at_once:
            return 0  # a rank of pp without the head
        own_dtype = self.precision.weights if dims.strategy == "none" else self.precision.compute
        return loss_bytes(
            self.config,
            self.at_once // dims.cp,
            -(-self.config.vocab_size // dims.tp),
            self.precision,
            NUM_BYTES[own_dtype],
            compiled=self.compiled,
            device_type=self.holds.device_type,
        )

    def _buffers(self) -> int:
        """Of FSDP: the units that it gathers ahead, each flat before it is cut into weights, and the input of
        the last reduction, which stays until the next one."""
        if self.holds.dims.strategy == "none":
            return 0
        units = _fsdp_units(self.config, self.section, self.units)
        ahead = 0 if self.holds.dims.keeps_weights else 2 * self.number * units["block"]
        return ahead + self.reduced * max(units["head"], units["block"])

    def _fullest(self, need: MemoryEstimate) -> int:
        """What stands beside all activations and the total."""
        units = _fsdp_units(self.config, self.section, self.units)
        head, number, dims = units["head"], self.number, need.dims
        if dims.strategy == "none":
            of_head = NUM_BYTES[self.precision.gradients] * head if self.batch.grad_accum_steps == 1 else 0
            return max(need.loss, need.working + of_head)
        of_head = NUM_BYTES[self.precision.gradients] * head // dims.size("shard")
        at_loss, at_block = need.loss, need.working + need.buffers + of_head
        at_head = (number + self.reduced) * head
        at_head += number * self.at_once * self.config.hidden_size
        if not dims.keeps_weights:
            at_loss += 2 * number * head - need.unit
            at_head += number * (head + units["block"]) - need.unit
            at_block += number * units["block"] - need.unit
        return max(at_loss, at_head, at_block)

    def _end(self) -> int:
        """What stands beside the total where the backward pass ends, at the embedding."""
        embed, number, dims = self.units["embed"], self.number, self.holds.dims
        if dims.strategy == "none":  # the sum takes a second gradient of the whole embedding
            adds = self.batch.grad_accum_steps > 1 or self.config.tie_embeddings
            return NUM_BYTES[self.precision.weights] * embed * adds
        kept = 0 if dims.keeps_weights else self.holds.unit
        return (number + self.reduced) * embed - kept
