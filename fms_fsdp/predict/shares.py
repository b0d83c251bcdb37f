"""What a rank of tp, cp and pp holds of a model before FSDP shards it, and what the axes send: arithmetic
alone.

    tp   the matrices of blocks, and the vocabulary, by the number of ranks; norms are copies
    cp   tokens alone
    pp   layers, the embedding on the first rank, the head on the last one of the last stage

As in communication.py a message counts with the least that any algorithm sends.
Source: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198 (tp); Jacobs et al. 2023,
https://arxiv.org/abs/2309.14509 (Ulysses); Narayanan et al. 2021, https://arxiv.org/abs/2104.04473 (pp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fms_fsdp.config import NUM_BYTES, BatchPlan, ParallelConfig, Precision
from fms_fsdp.config.axes import ParallelDims, cp_method
from fms_fsdp.models.flops import num_params_by_unit
from fms_fsdp.models.stages import layers_of_stages, stages_of_rank
from fms_fsdp.models.variants import LlamaConfig


@dataclass(frozen=True)
class Share:
    """The part of a model that a rank holds: `units`, parameters of its embedding, of a block, of its head;
    the numbers of its stages, and of its layers."""

    units: Mapping[str, int]
    stages: tuple[int, ...]
    layers: int

    @property
    def params(self) -> int:
        return self.units["embed"] + self.layers * self.units["block"] + self.units["head"]


def share_of(
    config: LlamaConfig, dims: ParallelDims, section: ParallelConfig, place: int | None = None
) -> Share:
    """The share of the rank at a place on pp; by default of the rank that holds most."""
    if place is None:
        shares = [share_of(config, dims, section, rank) for rank in range(dims.pp)]
        return max(shares, key=lambda share: share.params)
    num_stages = dims.pp * dims.virtual_stages
    layers = layers_of_stages(config, config.max_seq_len, num_stages)
    own = stages_of_rank(place, dims.pp, dims.virtual_stages, section.pp_schedule)
    units = _units_of_tp(config, dims.tp)
    units["embed"] *= 0 in own
    units["head"] *= num_stages - 1 in own
    return Share(units, tuple(own), sum(len(layers[stage]) for stage in own))


def _units_of_tp(config: LlamaConfig, tp: int) -> dict[str, int]:
    """Parameters of each unit on a rank of tp, the first one: its part of the vocabulary is largest."""
    units = num_params_by_unit(config)
    if tp == 1:
        return units
    hidden, ffn, rows = config.hidden_size, config.ffn_hidden_size, -(-config.padded_vocab_size // tp)
    inner = (2 if config.activation == "swiglu" else 1) * ffn
    queries = config.num_attention_heads * config.head_dim
    keys = 2 * config.num_kv_heads * config.head_dim
    heads = queries + (keys if config.num_kv_heads >= tp else 0)  # fewer heads are copied
    split = hidden * (heads + inner + queries + ffn) + config.bias * inner
    split += (config.bias or config.qkv_bias) * heads
    vocabulary, own_vocabulary = config.padded_vocab_size * hidden, rows * hidden
    head = 0 if config.tie_embeddings else vocabulary - own_vocabulary
    return {
        "embed": units["embed"] - vocabulary + own_vocabulary,
        "block": units["block"] - split + split // tp,
        "head": units["head"] - head,
    }


def copied_params(config: LlamaConfig, share: Share) -> int:
    """Parameters that every rank of tp holds whole, whose gradients tp adds up."""
    num_norms = 2 * share.layers + bool(share.units["head"])
    return num_norms * config.hidden_size * {"rmsnorm": 1, "layernorm": 2}.get(config.norm, 0)


def copied_keys(config: LlamaConfig, dims: ParallelDims, share: Share) -> int:
    """Parameters of key/value heads that every rank of tp holds whole, because they are fewer than ranks.
    Each rank computes with some of them: tp adds up their gradients."""
    if config.num_kv_heads % dims.tp == 0:
        return 0
    has_bias = config.bias or config.qkv_bias
    return share.layers * 2 * config.num_kv_heads * config.head_dim * (config.hidden_size + has_bias)


def kept_activations(
    config: LlamaConfig, dims: ParallelDims, section: ParallelConfig, batch: BatchPlan
) -> float:
    """The part of the activations of a micro-step of the whole model that a rank keeps at once.

    Without sequence parallelism what lies between the matrices is on every rank of tp. A pipeline keeps what
    the micro-batches under way have left in its stages.
    """
    hidden, heads = 4 * config.hidden_size, config.num_attention_heads + config.num_kv_heads
    inner = 2 * heads * config.head_dim + 3 * config.ffn_hidden_size
    whole = 0.0 if dims.sequence_parallel else hidden / (hidden + inner)
    part = (whole + (1 - whole) / dims.tp) / dims.cp
    if dims.pp == 1:
        return part
    count = max(1, batch.batch_size // section.pp_micro_batch_size)
    under_way = {"gpipe": float(count), "interleaved": dims.pp + (dims.pp - 1) / dims.virtual_stages}.get(
        section.pp_schedule, float(dims.pp)
    )
    layers = share_of(config, dims, section).layers / config.num_layers
    return part * layers * min(count, under_way) / count


def axis_bytes(
    config: LlamaConfig,
    dims: ParallelDims,
    section: ParallelConfig,
    precision: Precision,
    batch: BatchPlan,
    seq_length: int,
    place: int | None = None,
) -> dict[str, int]:
    """Bytes that a rank sends in a step over tp, cp and pp, by axis; axes of one rank send none.

    `place`: of the rank on pp, by default the rank that holds most. The compiler may compute a message of tp
    or cp again, which is left out here.
    """
    share, number = share_of(config, dims, section, place), NUM_BYTES[precision.compute]
    tokens, accum = batch.batch_size * seq_length // dims.cp, batch.grad_accum_steps
    stream = tokens * config.hidden_size * number
    again = float(section.recomputed_share) if section.recomputes in ("blocks", "ops") else 0.0
    sent = {
        "tp": accum * _tp_messages(dims, share, stream, tokens, again),
        "cp": accum * _cp_messages(config, dims, section, share, tokens * number, again),
        "pp": accum * stream * _pp_messages(dims, section, share),
    }
    if dims.tp > 1:
        copied = copied_params(config, share) * dims.sequence_parallel + copied_keys(config, dims, share)
        reduced = number * copied
        times = accum if dims.sync_each_micro_step else 1
        sent["tp"] += times * reduced * 2 * (dims.tp - 1) / dims.tp
    if dims.sequence_parallel:
        sent["pp"] /= dims.tp
    return {axis: round(size) for axis, size in sent.items() if size}


def _tp_messages(dims: ParallelDims, share: Share, stream: float, tokens: int, again: float) -> float:
    """Bytes of a micro-step: around attention and feed-forward of a block, embedding, head, and three fp32
    numbers a token for the loss."""
    part = (dims.tp - 1) / dims.tp
    of_block = 8 + again * (3 if dims.sequence_parallel else 2)
    ends = 2 * bool(share.units["embed"]) + 2 * bool(share.units["head"])
    loss = 2 * 12 * tokens * bool(share.units["head"])
    return part * (stream * (share.layers * of_block + ends) + loss)


def _cp_messages(
    config: LlamaConfig,
    dims: ParallelDims,
    section: ParallelConfig,
    share: Share,
    a_number: float,
    again: float,
) -> float:
    """Bytes of a micro-step; `a_number`: those of one number for each token of this rank."""
    heads, kv_heads = config.num_attention_heads // dims.tp, max(1, config.num_kv_heads // dims.tp)
    passes = share.layers * (2 + again)
    if cp_method(section.cp_method, config.num_attention_heads, dims.tp, dims.cp) == "gather":
        return passes * 2 * kv_heads * config.head_dim * a_number * (dims.cp - 1)
    copies = next(n for n in range(1, dims.cp + 1) if kv_heads * n % dims.cp == 0)
    traded = 2 * (heads + kv_heads * copies) * config.head_dim
    return passes * traded * a_number * (dims.cp - 1) / dims.cp


def _pp_messages(dims: ParallelDims, section: ParallelConfig, share: Share) -> int:
    """Times that a rank sends what lies between two stages, forward and backward."""
    last = dims.pp * dims.virtual_stages - 1
    forward = [stage for stage in share.stages if stage < last and stage + 1 not in share.stages]
    backward = [stage for stage in share.stages if stage > 0 and stage - 1 not in share.stages]
    return len(forward) + len(backward)
