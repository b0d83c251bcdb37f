"""How the axes tp, cp and pp divide a model, and checks of shapes that they cannot divide.

layers          0 1 2 3 4 │ 5 6 7 8 9 │ 10 11 12 13 14 15 │ 16 17 18 + head
loop, 2 ranks   rank 0    │ rank 1    │ rank 0            │ rank 1
V, 2 ranks      rank 0    │ rank 1    │ rank 1            │ rank 0
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch

from fms_fsdp.config import BatchPlan, ParallelConfig, Precision, TrainConfig
from fms_fsdp.config.batch_plan import divisors
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.errors import UserError
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import num_params_by_unit

_FLOAT8_MULTIPLE = 16  # of the matrix sizes that float8 kernels of GPUs take
# by scaling: the lowest compute capability of a GPU that has the kernels
FLOAT8_CAPABILITY = {"row": (9, 0), "tensor": (8, 9)}


def check_layout(
    cfg: TrainConfig,
    model: TransformerConfig,
    dims: ParallelDims,
    batch: BatchPlan,
    *,
    is_compiled: bool,
) -> None:
    """Raises UserError for a size that an axis cannot divide, or a feature that it cannot shard."""
    if not dims.divides_model:
        return
    section = cfg.parallel
    heads = model.num_attention_heads
    kv_heads = model.num_kv_heads
    tp = dims.tp
    cp = dims.cp
    pp = dims.pp
    length = cfg.data.seq_length

    def divides_heads(size: int) -> bool:
        # With more ranks than key/value heads, several ranks share a head.
        divides_kv_heads = kv_heads % size == 0 or size % kv_heads == 0
        return heads % size == 0 and divides_kv_heads

    if not divides_heads(tp):
        valid = [size for size in divisors(heads, heads) if divides_heads(size)]
        raise UserError(
            f"--tp_size={tp} must divide {heads} query heads and {kv_heads} key/value heads (or be a "
            f"multiple of the latter); valid sizes: {', '.join(map(str, valid))}"
        )
    if model.ffn_hidden_size % tp:
        raise UserError(
            f"--tp_size={tp} must divide ffn_hidden_size={model.ffn_hidden_size}; change one of them"
        )
    tokens_per_rank = -(-model.padded_vocab_size // tp)  # rounded up
    if (tp - 1) * tokens_per_rank >= model.vocab_size:  # the last rank would have none
        raise UserError(
            f"--tp_size={tp} leaves ranks without rows of the vocabulary ({model.vocab_size}); lower "
            "--tp_size, or raise --vocab_size"
        )

    method = resolve_cp_method(section.cp_method, heads, tp, cp)
    if cp > 1 and method == "ulysses" and heads % (tp * cp):
        raise UserError(
            f"--cp_size={cp} must divide {heads // tp} heads per tp rank for --cp_method=ulysses; "
            f"valid sizes: {', '.join(map(str, divisors(heads // tp, heads)))}; or use gather"
        )
    if cp > 1 and method == "gather" and cfg.model.attn_impl != "auto":
        raise UserError(
            f"--attn_impl={cfg.model.attn_impl} has no effect with --cp_method=gather; remove it"
        )
    unit = sequence_multiple(method, tp, cp, dims.sequence_parallel)
    if length % unit:
        below = max(1, length // unit) * unit
        above = (length // unit + 1) * unit
        raise UserError(
            f"--seq_length={length} must be divisible by {unit} (because of --cp_size, --tp_size); "
            f"closest valid values: {below}, {above}"
        )
    drops_shards = model.attn_dropout > 0 or model.ffn_dropout > 0
    if tp > 1 and drops_shards and not dims.sequence_parallel:
        raise UserError(
            f"--sequence_parallel=False is not supported with --attn_dropout={model.attn_dropout:g} "
            f"--ffn_dropout={model.ffn_dropout:g}: ranks of tp would drop the same places of "
            "different heads and columns; remove it, or set both to 0"
        )
    if pp > 1:
        _check_pipeline(section, model.num_layers, dims, batch, is_compiled)

    unsupported = {  # feature: whether it is on, the axes that cannot shard it
        "--pos_emb=relative": (model.pos_emb == "relative", ("cp", "pp")),
        "--tie_embeddings": (model.tie_embeddings, ("pp",)),
        "--rampup_micro_batch": (batch.ramps_micro_batch, ("pp",)),
        "--model_builder": (model.model_builder, ("tp", "cp", "pp")),
        "--teacher_path": (cfg.training.teacher_path, ("tp", "cp", "pp")),
    }
    for flag, (is_on, axes) in unsupported.items():
        for axis in axes:
            if is_on and dims.size(axis) > 1:
                raise UserError(
                    f"{flag} is not supported with --{axis}_size={dims.size(axis)}; remove one of them"
                )


def _check_pipeline(
    section: ParallelConfig,
    num_layers: int,
    dims: ParallelDims,
    batch: BatchPlan,
    is_compiled: bool,
) -> None:
    schedule = section.pp_schedule
    size = section.pp_micro_batch_size
    pp = dims.pp
    num_stages = pp * dims.virtual_stages
    if num_stages > num_layers:
        raise UserError(
            f"--pp_size={pp} makes {num_stages} stages of {num_layers} layers; use fewer stages"
        )
    if batch.batch_size % size:
        raise UserError(
            f"--pp_micro_batch_size={size} must divide --batch_size={batch.batch_size}; change one"
        )
    count = batch.batch_size // size
    is_uneven = schedule == "interleaved" and count % max(1, count // pp)
    if is_uneven or count < min_micro_batches(schedule, pp):
        raise UserError(
            f"--pp_schedule={schedule} cannot use {count} micro-batches on {pp} ranks; set "
            f"--batch_size={pp * size} or a multiple, or another --pp_micro_batch_size"
        )
    if schedule != "zbv":
        return
    # Before, autograd functions got no gradient of their weights when backward passes are split:
    # https://github.com/pytorch/pytorch/issues/166577
    if _torch() < (2, 13):
        raise UserError(
            f"--pp_schedule=zbv requires torch 2.13 (this is {torch.__version__}); use 1f1b"
        )
    if is_compiled:
        raise UserError(
            "--pp_schedule=zbv splits backward passes, which compiled blocks cannot; add "
            "--use_torch_compile=False, or use 1f1b"
        )
    if section.recomputes == "ops":
        raise UserError(
            "--pp_schedule=zbv runs a block's backward pass twice, which --recompute=ops cannot; use "
            "--recompute=blocks, or --pp_schedule=1f1b"
        )


def check_float8(
    model: TransformerConfig,
    precision: Precision,
    tp: int = 1,
    capability: tuple[int, int] | None = None,
    device_name: str = "",
) -> None:
    """Raises UserError for matrices that float8 kernels do not take, and GPUs without such kernels.

    `capability`: of the GPU; None is not checked.
    """
    if not precision.float8:
        return
    sizes = {
        "hidden_size": model.hidden_size,
        "num_attention_heads x head_dim": model.num_attention_heads // tp * model.head_dim,
        "num_kv_heads x head_dim": max(1, model.num_kv_heads // tp) * model.head_dim,
        "ffn_hidden_size": model.ffn_hidden_size // tp,
    }
    for name, size in sizes.items():
        if size % _FLOAT8_MULTIPLE:
            raise UserError(
                f"--precision (float8) needs sizes that are multiples of {_FLOAT8_MULTIPLE}, and "
                f"{name} is {size}{' on each rank of tp' if tp > 1 else ''}; change the size, or use "
                "--precision=bf16"
            )
    needed = FLOAT8_CAPABILITY[precision.float8]
    if capability is not None and capability < needed:
        remedy = "--float8_scaling=tensor" if capability >= (8, 9) else "--precision=bf16"
        raise UserError(
            f"--precision (float8) by {precision.float8} needs compute capability "
            f"{needed[0]}.{needed[1]}, and {device_name} has "
            f"{capability[0]}.{capability[1]}; use {remedy}"
        )


def resolve_cp_method(method: str, heads: int, tp: int, cp: int) -> str:
    """Returns the method of context parallelism: auto is ulysses if tp and cp divide the heads."""
    if method != "auto":
        return method
    return "gather" if heads % (tp * cp) else "ulysses"


def sequence_multiple(method: str, tp: int, cp: int, sequence_parallel: bool) -> int:
    """Returns the number that must divide the sequence length."""
    num_chunks = cp
    if method == "gather" and cp > 1:
        num_chunks = 2 * cp  # a rank has two of them
    if sequence_parallel:
        return math.lcm(num_chunks, cp * tp)
    return num_chunks


@functools.cache
def layers_of_stages(
    config: TransformerConfig, seq_length: int, num_stages: int
) -> tuple[range, ...]:
    """Returns the consecutive layers of each stage, at least one.

    Minimizes the FLOPs of the most expensive stage, then the sum of the squares; the head counts as
    a part of the last layer.

    Example of 19 layers, a head as expensive as three, and 4 stages: 5, 5, 6 and 3 layers.
    """
    assert num_stages <= config.num_layers, (num_stages, config.num_layers)
    block = num_params_by_unit(config)["block"]
    q_size = config.num_attention_heads * config.head_dim
    windows = [min(window or seq_length, seq_length) for window in config.windows]
    costs = [6 * block + 12 * q_size * window for window in windows]
    costs[-1] += 6 * config.hidden_size * config.vocab_size
    cost_before = list(itertools.accumulate(costs, initial=0))
    # The best split of the first `end` layers: (most expensive stage, sum of squares, boundaries).
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    for _ in range(num_stages):
        splits: dict[int, list[Any]] = {}
        for begin, (maximum, squares, boundaries) in best.items():
            for end in range(begin + 1, config.num_layers + 1):
                cost = cost_before[end] - cost_before[begin]
                split = (max(maximum, cost), squares + cost**2, (*boundaries, end))
                splits.setdefault(end, []).append(split)
        best = {end: min(candidates) for end, candidates in splits.items()}
    _, _, boundaries = best[config.num_layers]
    return tuple(itertools.starmap(range, itertools.pairwise(boundaries)))


def stages_of_rank(rank: int, num_ranks: int, stages_per_rank: int, schedule: str) -> list[int]:
    """Returns the stages of a pp rank, in order: a V for `zbv`, otherwise a loop."""
    if schedule == "zbv" and num_ranks > 1:
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank + turn * num_ranks for turn in range(stages_per_rank)]


def min_micro_batches(schedule: str, pp: int) -> int:
    """Returns the minimum number of micro-batches of a schedule on `pp` ranks."""
    return pp if schedule == "1f1b" else 1


def _torch() -> tuple[int, int]:
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)
