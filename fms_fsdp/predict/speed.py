"""The time of a step by part, on a device that need not be there: counts of FLOPs and bytes over what the
device reaches of its data sheet (curves.py). Arithmetic alone.

    products     2·T·m·n / (peak·share)  +  what their reads and writes are not hidden
    attention    4·T·H·K·keys / (peak·share), causal; backward 2.5 times that
    memory       norms, activations, rotations, sums, logits: bytes / bandwidth
    kernels      waiting for the host, a layer and pass
    optimizer    weights and moments, read and written once; gradients, read twice
    exposed      messages that computation does not hide, by axis
    bubble       ranks of a pipeline that wait for their first and last micro-batches

T tokens of a micro-batch on a rank, m × n a matrix, H K the width of the query heads.
Source: Williams et al. 2009, "Roofline" (products and memory); Dao 2023, https://arxiv.org/abs/2307.08691
(attention); Narayanan et al. 2021, https://arxiv.org/abs/2104.04473 (pipelines).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fms_fsdp.config import NUM_BYTES, BatchPlan, ParallelConfig, Precision
from fms_fsdp.config.axes import AXES, JOINED, ParallelDims
from fms_fsdp.models.flops import keeps_product
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.predict.communication import bytes_sent
from fms_fsdp.predict.curves import CURVES, Curves
from fms_fsdp.predict.hardware import DeviceKind
from fms_fsdp.predict.shares import Share, axis_bytes, share_of

_LOADER_TOKENS_PER_S = 13e6  # of one rank: half of what benchmarks/results/data.json has measured
_BACKWARD_OF_ATTENTION = 2.5  # times the forward pass: five products for two


@dataclass(frozen=True)
class Program:
    """How a program computes, as far as its speed depends on it; the default is this project on a GPU.

    `repeats_all`: a recomputed block repeats its last product too, whose result nobody needs.
    """

    compiled: bool = True
    old_attention: bool = False
    repeats_all: bool = False


@dataclass(frozen=True)
class Work:
    """What is to be computed, how it is divided, and on which devices."""

    model: LlamaConfig
    dims: ParallelDims
    section: ParallelConfig
    precision: Precision
    batch: BatchPlan
    seq_length: int
    hardware: DeviceKind
    devices_per_node: int = 8
    program: Program = Program()

    @property
    def curves(self) -> Curves:
        return CURVES[self.hardware.curves]

    @property
    def micro_batch(self) -> int:
        """Rows that pass through a rank at a time."""
        return self.section.pp_micro_batch_size if self.dims.pp > 1 else self.batch.batch_size

    @property
    def num_micro_batches(self) -> int:
        """Of a step, on a rank."""
        return self.batch.grad_accum_steps * max(1, self.batch.batch_size // self.micro_batch)

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a rank."""
        return self.micro_batch * self.seq_length // self.dims.cp

    @property
    def number(self) -> int:
        """Bytes of a number in products."""
        return NUM_BYTES[self.precision.compute]

    @property
    def bandwidth(self) -> float:
        return 1e9 * self.hardware.memory_gb_s


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part; `repeated`: of what recomputation adds, which the first four hold."""

    products: float
    attention: float
    memory: float
    kernels: float
    optimizer: float
    exposed: Mapping[str, float]
    bubble: float
    data: float
    repeated: float

    @property
    def computing(self) -> float:
        return self.products + self.attention + self.memory + self.kernels

    @property
    def parts(self) -> dict[str, float]:
        """All parts by name; those of messages by axis."""
        names = ("products", "attention", "memory", "kernels", "optimizer", "bubble", "data")
        return {name: getattr(self, name) for name in names} | {
            f"messages of {axis}": seconds for axis, seconds in self.exposed.items()
        }

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def step_time(work: Work, curves: Curves | None = None) -> StepTime:
    """The time of a step on the rank that computes longest."""
    reached, dims = curves or work.curves, work.dims
    shares = [share_of(work.model, dims, work.section, place) for place in {0, dims.pp - 1}]
    parts = max((_computing(work, reached, share) for share in shares), key=lambda each: sum(each[:4]))
    count = work.num_micro_batches
    products, attention, memory, kernels, repeated = (count * each for each in parts)
    computing = products + attention + memory + kernels
    held = share_of(work.model, dims, work.section)
    sent = messages(work, reached, held)
    exposed = dict(_exposed(work, reached, sent, computing))
    tokens = work.batch.batch_size * work.batch.grad_accum_steps * work.seq_length
    optimizer = _optimizer(work, reached, held)
    busy = computing + optimizer + sum(exposed.values())
    return StepTime(
        products=products,
        attention=attention,
        memory=memory,
        kernels=kernels,
        optimizer=optimizer,
        exposed=exposed,
        bubble=_bubble(work) * computing / count,
        data=max(0.0, tokens / _LOADER_TOKENS_PER_S - busy),
        repeated=repeated,
    )


def _computing(work: Work, curves: Curves, share: Share) -> tuple[float, float, float, float, float]:
    """Seconds of a micro-batch on a rank with this share: products, attention, what memory bounds, kernels;
    and of these what is repeated."""
    config, dims, layers = work.model, work.dims, share.layers
    again = float(work.section.recomputed_share) if work.section.recomputes in ("blocks", "ops") else 0.0
    matrices = block_matrices(config, dims.tp)
    repeated = set(_repeated(work, len(matrices)))
    of_blocks = [_product(work, curves, out, inner, work.precision.float8 != "") for out, inner in matrices]
    repeats = again * sum(seconds for i, seconds in enumerate(of_blocks) if i in repeated)
    if not work.program.repeats_all:  # blocks within a segment repeat their last product too
        repeats += again * (1 - 1 / work.section.segment) * of_blocks[-1]
    head = bool(share.units["head"])
    of_head = _product(work, curves, -(-config.vocab_size // dims.tp), config.hidden_size, False)
    products = layers * (3 * sum(of_blocks) + repeats) + 3 * head * of_head
    attended = _attention(work, curves)
    keeps_attention = "attention" in work.section.kept_ops(work.seq_length)
    again_attended = 0.0 if keeps_attention else again * attended
    attention = (1 + _BACKWARD_OF_ATTENTION) * layers * attended + layers * again_attended
    forward, backward = _memory_bound(work, curves)
    again_bound = 0.5 if work.section.recomputes == "cheap" else again  # half of it was kept
    logits = head * curves.logits * work.tokens * config.vocab_size / dims.tp / work.bandwidth
    memory = layers * (forward * (1 + again_bound) + backward) + logits
    kernels = layers * curves.kernels * (3 + again)
    extra = layers * (repeats + again_attended + again_bound * forward + again * curves.kernels)
    return products, attention, memory, kernels, extra


def block_matrices(config: LlamaConfig, tp: int = 1) -> list[tuple[int, int]]:
    """Outputs and inputs of the matrices of a block on a rank of tp: queries, keys, values, attention's
    output, and the feed-forward's two or three."""
    hidden, ffn = config.hidden_size, -(-config.ffn_hidden_size // tp)
    queries = config.num_attention_heads * config.head_dim // tp
    keys = max(config.head_dim, config.num_kv_heads * config.head_dim // tp)
    up = [(ffn, hidden)] * (2 if config.activation == "swiglu" else 1)
    return [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries), *up, (hidden, ffn)]


def _repeated(work: Work, count: int) -> Iterator[int]:
    """The places of the products that a recomputed block repeats."""
    kept = work.section.kept_ops(work.seq_length)
    for place in range(count if work.program.repeats_all else count - 1):
        if not keeps_product(kept, place):
            yield place


def _product(work: Work, curves: Curves, outputs: int, inputs: int, float8: bool) -> float:
    """Seconds of a product of all tokens with one matrix, in one direction."""
    peak = work.hardware.peak(work.precision.compute) * work.hardware.clock * curves.products
    flops = 2 * work.tokens * outputs * inputs
    moved = work.number * (work.tokens * (outputs + inputs) + outputs * inputs)
    return flops / (peak * (curves.float8 if float8 else 1)) + curves.edges * moved / work.bandwidth


def _attention(work: Work, curves: Curves) -> float:
    """Seconds of the forward pass in a layer, of the mean of the windows; each token sees the keys before."""
    config, length = work.model, work.seq_length
    reach = [min(window or length, length) for window in config.windows]
    keys = sum(width - width * width / (2 * length) for width in reach) / len(reach)
    flops = 4 * work.tokens * keys * config.num_attention_heads * config.head_dim / work.dims.tp
    rate = curves.old_attention if work.program.old_attention else curves.attention
    rate *= curves.small_heads if config.head_dim <= 64 else 1
    return flops / (work.hardware.peak(work.precision.compute) * work.hardware.clock * rate)


def _memory_bound(work: Work, curves: Curves) -> tuple[float, float]:
    """Seconds of a layer in the forward and in the backward pass, by the values that are read and written for
    each token. The compiler reads each value once for all that is done with it."""
    config, dims = work.model, work.dims
    hidden = config.hidden_size / (dims.tp if dims.sequence_parallel else 1)
    heads = (config.num_attention_heads + config.num_kv_heads) * config.head_dim / dims.tp
    ffn, branches = config.ffn_hidden_size / dims.tp, 2 if config.activation == "swiglu" else 1
    rotated = heads if config.pos_emb == "rope" else 0.0
    if work.program.compiled:
        forward = 8 * hidden + (1 + branches) * ffn + 2 * rotated
        backward = 12 * hidden + (2 + 2 * branches) * ffn + 2 * rotated
    else:
        norm = 6 if config.norm == "rmsnorm" else 2  # eager: many kernels, or one
        forward = (2 * norm + 6) * hidden + (5 if branches == 2 else 2) * ffn + 6 * rotated
        backward = (3 * norm + 6) * hidden + (9 if branches == 2 else 3) * ffn + 6 * rotated
    backward += config.bias * (2 * hidden + heads + config.num_kv_heads * config.head_dim / dims.tp + ffn)
    a_value = work.number * work.tokens / work.bandwidth
    factor = curves.compiled if work.program.compiled else curves.eager
    return factor * a_value * forward, factor * a_value * backward


def _optimizer(work: Work, curves: Curves, share: Share) -> float:
    """Seconds of AdamW's step and of the norm: weights and moments are read and written, gradients read
    twice."""
    precision = work.precision
    a_parameter = 2 * NUM_BYTES[precision.weights] + 2 * NUM_BYTES[precision.gradients]
    a_parameter += 4 * NUM_BYTES[precision.state]
    return curves.optimizer * a_parameter * share.params / work.dims.size("shard") / work.bandwidth


def _bubble(work: Work) -> float:
    """Micro-batches' worth of time that a rank waits in a step."""
    dims, micro_steps = work.dims, work.batch.grad_accum_steps
    if work.section.pp_schedule == "zbv":  # its split backward passes fill most of it
        return micro_steps * (dims.pp - 1) / 4
    return micro_steps * (dims.pp - 1) / dims.virtual_stages


@dataclass(frozen=True)
class Message:
    """What a rank sends over an axis in a step: bytes, whether they leave the node, and seconds."""

    num_bytes: int
    leaves_node: bool
    seconds: float


def messages(work: Work, curves: Curves, share: Share) -> dict[str, Message]:
    """What the rank with this share sends in a step, by axis, as if nothing was hidden."""
    dims = work.dims
    sent = bytes_sent(work.model, dims, work.precision, work.batch.grad_accum_steps, share)
    args = (work.model, dims, work.section, work.precision, work.batch, work.seq_length)
    if dims.divides_model:
        sent |= axis_bytes(*args)
    return {axis: _message(work, curves, axis, size, share) for axis, size in sent.items()}


def _message(work: Work, curves: Curves, axis: str, size: int, share: Share) -> Message:
    """A ring passes through each node once, with as many links as it has ranks there."""
    hardware, dims = work.hardware, work.dims
    count, innermost = dims.size(axis), JOINED.get(axis, (axis,))[-1]
    stride = 1
    for inner in AXES[AXES.index(innermost) + 1 :]:
        stride *= dims.size(inner)
    together = min(count, max(1, work.devices_per_node // stride))  # ranks of a group in one node
    nodes = -(-count // together)
    seconds = size / (1e9 * hardware.node_gb_s * curves.node) if together > 1 else 0.0
    if nodes > 1:
        between = size / (1e9 * hardware.net_gb_s * curves.net * together)
        passes = 1 if axis == "dp_replicate" else 3 * work.batch.grad_accum_steps
        hops = passes * share.layers * nodes * curves.hop if axis != "pp" else 0.0
        seconds = max(seconds, between + hops)
    return Message(size, nodes > 1, seconds)


def _exposed(
    work: Work, curves: Curves, sent: Mapping[str, Message], computing: float
) -> Iterator[tuple[str, float]]:
    """What computation does not hide of the messages of each axis. Those of tp and cp stand between two
    computations; the rest goes on beside them."""
    accum = work.batch.grad_accum_steps
    for axis, message in sent.items():
        window = computing
        if axis in ("tp", "cp"):
            hides = axis == "tp" and work.section.async_tp and work.program.compiled
            yield axis, message.seconds * (curves.overlapped if hides else 1)
            continue
        elif axis == "dp_replicate" or not work.dims.sync_each_micro_step:
            window = computing / accum * 2 / 3  # the last backward pass
        hidden = min((1 - curves.exposed) * message.seconds, window)
        yield axis, message.seconds - hidden
