"""Checks sizes and features that the axes tp, cp and pp cannot divide."""

from __future__ import annotations

import torch

from fms_fsdp.config import BatchPlan, ParallelConfig, Precision, TrainConfig
from fms_fsdp.config.batch import divisors
from fms_fsdp.distributed.axes import ParallelDims, cp_method, row_multiple
from fms_fsdp.errors import UserError
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel.compile import compiles


def check_layout(
    cfg: TrainConfig,
    model: LlamaConfig,
    dims: ParallelDims,
    batch: BatchPlan,
    precision: Precision,
    device: torch.device,
) -> None:
    """Raises UserError for a size that an axis cannot divide, or a feature that it cannot shard."""
    section, heads, kv_heads = cfg.parallel, model.num_attention_heads, model.num_kv_heads
    tp, cp, pp, length = dims.tp, dims.cp, dims.pp, cfg.data.seq_length
    is_compiled, is_fp32 = compiles(section, device), precision.compute == "fp32"
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        valid = [n for n in divisors(heads, heads) if not (kv_heads % n and n % kv_heads)]
        raise UserError(
            f"--tp_size={tp} must divide {heads} query heads and {kv_heads} key/value heads (or be a "
            f"multiple of the latter); valid sizes: {', '.join(map(str, valid))}"
        )
    if model.ffn_hidden_size % tp:
        raise UserError(
            f"--tp_size={tp} must divide ffn_hidden_size={model.ffn_hidden_size}; change one of them"
        )
    if (tp - 1) * -(-model.padded_vocab_size // tp) >= model.vocab_size:
        raise UserError(f"--tp_size={tp} is too large for {model.vocab_size} tokens; lower it")

    method = cp_method(section.cp_method, heads, tp, cp)
    if cp > 1 and method == "ulysses" and heads % (tp * cp):
        raise UserError(
            f"--cp_size={cp} must divide {heads // tp} heads per tp rank for --cp_method=ulysses; "
            f"valid sizes: {', '.join(map(str, divisors(heads // tp, heads)))}; or use gather"
        )
    if cp > 1 and method == "gather" and cfg.model.attn_impl != "auto":
        raise UserError(
            f"--attn_impl={cfg.model.attn_impl} has no effect with --cp_method=gather; remove it"
        )
    if length % (unit := row_multiple(method, tp, cp, dims.sequence_parallel)):
        raise UserError(
            f"--seq_length={length} must be divisible by {unit} (because of --cp_size, --tp_size); "
            f"closest valid values: {max(1, length // unit) * unit}, {(length // unit + 1) * unit}"
        )
    if pp > 1:
        _check_pipeline(section, model.num_layers, dims, batch, is_compiled)

    unsupported = {  # feature: whether it is on, the axes that cannot shard it
        "--qk_norm_wide": (model.qk_norm_wide, ("tp",)),
        "--pos_emb=relative": (model.pos_emb == "relative", ("cp", "pp")),
        "--tie_embeddings": (model.tie_embeddings, ("pp",)),
        "--rampup_micro_batch": (batch.cuts_micro_steps, ("pp",)),
        "--model_builder": (model.model_builder, ("tp", "cp", "pp")),
        "--teacher_path": (cfg.training.teacher_path, ("tp", "cp", "pp")),
        # torch 2.13: "expected all tensors_saved_with_vc_check to be Tensors"
        f"--recompute={section.recomputes}, compiled in fp32": (
            is_fp32
            and is_compiled
            and section.recomputes in ("blocks", "ops")
            and _torch() >= (2, 12),
            ("tp",),
        ),
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
    schedule, size, pp = section.pp_schedule, section.pp_micro_batch_size, dims.pp
    if (stages := pp * dims.virtual_stages) > num_layers:
        raise UserError(
            f"--pp_size={pp} makes {stages} stages of {num_layers} layers; use fewer stages"
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
    if _torch() < (2, 13):  # gradients through our autograd functions fail before
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


def min_micro_batches(schedule: str, pp: int) -> int:
    """Returns the minimum number of micro-batches of a schedule on `pp` ranks."""
    return pp if schedule == "1f1b" else 1


def _torch() -> tuple[int, int]:
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)
