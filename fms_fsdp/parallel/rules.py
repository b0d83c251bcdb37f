"""What the axes tp, cp and pp ask of a run: sizes that they can divide, and features that they refuse.

`FEATURES` is the one table of features and axes: what works, and the words of what is refused.
docs/parallelism.md shows the table, and a test trains every cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fms_fsdp.config import BatchPlan, Precision, TrainConfig
from fms_fsdp.config.axes import ParallelDims, cp_method, row_multiple
from fms_fsdp.config.batch import divisors
from fms_fsdp.config.flag import flag_values
from fms_fsdp.config.rule import Rule, judge
from fms_fsdp.models.variants import LlamaConfig
from fms_fsdp.parallel.compile import compiles

MODEL_AXES = ("tp", "cp", "pp")  # those that divide the model or its rows
_ZBV_TORCH = (2, 13)  # before, gradients through an autograd function of our own fail


@dataclass(frozen=True)
class Layout:
    """What the axes divide."""

    config: TrainConfig
    model: LlamaConfig
    dims: ParallelDims
    batch: BatchPlan
    precision: Precision
    device: torch.device

    @property
    def stages(self) -> int:
        return self.dims.pp * self.dims.virtual_stages

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one schedule of the pipeline, rounded down."""
        return self.batch.batch_size // self.config.parallel.pp_micro_batch_size

    @property
    def sequence_unit(self) -> int:
        """What a row's length must be a multiple of."""
        dims = self.dims
        return row_multiple(self.cp_method, dims.tp, dims.cp, dims.sequence_parallel)

    @property
    def cp_method(self) -> str:
        """How attention sees a divided row."""
        heads, dims = self.model.num_attention_heads, self.dims
        return cp_method(self.config.parallel.cp_method, heads, dims.tp, dims.cp)

    @property
    def torch_version(self) -> tuple[int, int]:
        """Major and minor version of the installed torch."""
        major, minor, *_ = torch.__version__.split(".")
        return int(major), int(minor)


class Feature(NamedTuple):
    """A feature, the flags that turn it on, and for each axis that refuses it the words of the refusal.

    `is_on` tells where a refusal holds. `flag`: what the refusal names.
    """

    name: str
    flags: str = ""
    refused: Mapping[str, str] = {}
    flag: str = ""
    is_on: Callable[[Layout], Any] = lambda layout: False


_SWITCHES = ("document_mask", "qk_norm", "parallel_residual", "bias", "qkv_bias")
_POSITIONS = ("learned", "sinusoidal", "alibi", "none")
_OWN_MODEL = "builds a model that brings no plan for --{axis}_size"


def _is_compiled_in_fp32(layout: Layout) -> bool:
    """Whether blocks that are computed again are compiled in fp32, for which torch 2.13 asserts what is not
    so: "expected all tensors_saved_with_vc_check to be Tensors"."""
    section = layout.config.parallel
    is_fp32 = layout.precision.compute == "fp32" and layout.torch_version >= (2, 12)
    return is_fp32 and section.recomputes in ("blocks", "ops") and compiles(section, layout.device)


FEATURES: tuple[Feature, ...] = (
    *(Feature(name, f"--{name}=True") for name in _SWITCHES),
    *(Feature(f"{kind} positions", f"--pos_emb={kind}") for kind in _POSITIONS),
    Feature("relative positions", "--pos_emb=relative",
        {"cp": "adds biases of a whole row, which --cp_size cuts",
         "pp": "has one table for all layers, which --pp_size gives to different ranks"},
        "pos_emb", lambda layout: layout.model.pos_emb == "relative"),
    *(Feature(kind, f"--norm={kind}") for kind in ("layernorm", "scalenorm")),
    Feature("GELU blocks", "--activation=gelu"),
    Feature("windows", "--attn_window=24 --attn_window_pattern=LG"),
    Feature("layers without positions", "--rope_pattern=RN"),
    Feature("norms behind", "--norm_place=after"),
    Feature("factors", "--embedding_multiplier=12 --attention_multiplier=0.02 --residual_multiplier=0.22 "
        "--logits_scaling=8"),
    Feature("norm over all heads", "--qk_norm=True --qk_norm_wide=True",
        {"tp": "needs the sum over all heads, which --tp_size gives to different ranks"},
        "qk_norm_wide", lambda layout: layout.model.qk_norm_wide),
    Feature("capped logits", "--logit_softcap=20"),
    Feature("z-loss", "--z_loss=0.001"),
    Feature("dropout", "--dropout=0.1 --ffn_dropout=0.1 --attn_dropout=0.1"),
    Feature("grouped queries", "--num_kv_heads=1"),
    Feature("odd vocabulary", "--vocab_size=511"),
    Feature("bestfit packing", "--packing=bestfit"),
    *(Feature(f"recompute {kind}", f"--recompute={kind}") for kind in ("blocks", "ops")),
    Feature("recompute segments", "--recompute=blocks --recompute_segment=2"),
    Feature("recompute cheap", "--recompute=cheap --use_torch_compile=True"),
    Feature("accumulation", "--grad_accum_steps=2"),
    Feature("ramp", "--rampup_batch_size=4,4,8"),
    Feature("ramp of micro-steps", "--rampup_batch_size=4,4,8 --batch_size=8 --rampup_micro_batch=True",
        {"pp": "changes the number of micro-batches, which the schedule of --pp_size needs"},
        "rampup_micro_batch", lambda layout: layout.batch.cuts_micro_steps),
    *(Feature(kind, f"--precision={kind}")
        for kind in ("bf16", "fp16", "bf16_pure", "bf16_mixed_sr", "float8")),
    *(Feature(name, f"--optimizer={name}") for name in ("muon", "adafactor", "lamb", "sm3", "adamax")),
    *(Feature(name, f"--sharding_strategy={name}") for name in ("ddp", "hsdp", "zero1", "zero2")),
    Feature("cpu_offload", "--cpu_offload=True --sharding_strategy=fsdp"),
    Feature("whole build", "--low_cpu_fsdp=False"),
    Feature("norms and zeros", "--log_param_norm=True --log_num_zeros=True"),
    Feature("evaluation", "--eval_interval=2 --eval_steps=2"),
    Feature("samples", "--sample_interval=2"),
    Feature("exports", "--export_interval=2 --checkpoint_interval=2"),
    Feature("import", "--init_from_hf=FOLDER"),
    Feature("profiler", "--use_profiler=True"),
    Feature("fp32, compiled and recomputed", "--recompute=blocks --use_torch_compile=True --precision=fp32",
        {"tp": "cannot be compiled in fp32 with --tp_size by torch 2.13"},
        "recompute", _is_compiled_in_fp32),
    Feature("tied embeddings", "--tie_embeddings=True",
        {"pp": "lie in the first and in the last stage, which --pp_size makes two"},
        "tie_embeddings", lambda layout: layout.model.tie_embeddings),
    Feature("teacher", "--teacher_path=FOLDER",
        {axis: f"runs a second model, which --{axis}_size does not divide" for axis in MODEL_AXES},
        "teacher_path", lambda layout: layout.config.training.teacher_path),
    Feature("model of your own", "--model_builder=MODULE:FUNCTION",
        {axis: _OWN_MODEL.format(axis=axis) for axis in MODEL_AXES},
        "model_builder", lambda layout: layout.model.model_builder),
)  # fmt: skip


def _refusals() -> Iterator[Rule[Layout]]:
    """A rule for each cell of the table that is no `works`."""
    for feature in FEATURES:
        for axis, words in feature.refused.items():

            def holds(layout: Layout, feature: Feature = feature, axis: str = axis) -> bool:
                return layout.dims.size(axis) == 1 or not feature.is_on(layout)

            def facts(layout: Layout, flag: str = feature.flag) -> Mapping[str, Any]:
                return {flag: flag_values(layout.config)[flag] or getattr(layout.model, flag, "")}

            remedy = f"leave one flag out, or use --{axis}_size=1"
            yield Rule(feature.flag, holds, words, remedy, f"{axis}_size", facts)


def _facts(layout: Layout) -> Mapping[str, Any]:
    """The figures of messages on axes."""
    model, dims, batch = layout.model, layout.dims, layout.batch
    heads, unit, micro = model.num_attention_heads, layout.sequence_unit, layout.config.parallel
    length = layout.config.data.seq_length
    both = [n for n in divisors(heads, heads) if not (model.num_kv_heads % n and n % model.num_kv_heads)]
    return {
        "tp_size": dims.tp,
        "cp_size": dims.cp,
        "pp_size": dims.pp,
        "heads": heads,
        "heads_of_tp": divisors(heads, heads),
        "heads_of_cp": divisors(heads // dims.tp, heads),
        "kv_heads": model.num_kv_heads,
        "heads_of_both": both,
        "width": model.ffn_hidden_size,
        "vocabulary": model.vocab_size,
        "rows": model.padded_vocab_size,
        "unit": unit,
        "lengths": f"{max(1, length // unit) * unit} or {(length // unit + 1) * unit}",
        "num_layers": model.num_layers,
        "stages": layout.stages,
        "batch_size": batch.batch_size,
        "micro_batches": layout.micro_batches,
        "least": dims.pp * micro.pp_micro_batch_size,
        "torch": torch.__version__,
    }


def least_micro_batches(schedule: str, dims: ParallelDims) -> int:
    """The fewest micro-batches that a schedule can use."""
    return dims.pp if schedule == "1f1b" else 1


def _schedule_can_use(layout: Layout) -> bool:
    schedule, count, ranks = layout.config.parallel.pp_schedule, layout.micro_batches, layout.dims.pp
    if schedule == "interleaved" and count % max(1, count // ranks):
        return False
    return count >= least_micro_batches(schedule, layout.dims)


AXIS_RULES: tuple[Rule[Layout], ...] = (
    Rule("tp_size", lambda layout: layout.model.num_attention_heads % layout.dims.tp == 0,
        "must divide num_attention_heads ({heads})", "valid: {heads_of_tp}", "num_attention_heads", _facts),
    Rule("tp_size",
        lambda layout: layout.model.num_kv_heads % layout.dims.tp == 0
        or layout.dims.tp % layout.model.num_kv_heads == 0,
        "must divide num_kv_heads ({kv_heads}) or be a multiple of it", "valid: {heads_of_both}",
        "num_kv_heads", _facts),
    Rule("tp_size", lambda layout: layout.model.ffn_hidden_size % layout.dims.tp == 0,
        "must divide ffn_hidden_size ({width})", "choose another size or width", "ffn_hidden_size", _facts),
    Rule("tp_size",
        lambda layout: (layout.dims.tp - 1) * -(-layout.model.padded_vocab_size // layout.dims.tp)
        < layout.model.vocab_size,
        "must leave every rank a part of the vocabulary ({vocabulary} of {rows} rows)", "use a smaller size",
        "vocab_size", _facts),
    Rule("cp_size",
        lambda layout: layout.dims.cp == 1 or layout.cp_method == "gather"
        or layout.model.num_attention_heads % (layout.dims.tp * layout.dims.cp) == 0,
        "must divide the heads of a rank of tp for --cp_method=ulysses", "valid: {heads_of_cp}, or gather",
        "cp_method num_attention_heads", _facts),
    Rule("attn_impl",
        lambda layout: layout.dims.cp == 1 or layout.cp_method == "ulysses"
        or layout.config.model.attn_impl == "auto",
        "has no effect where cp gathers keys", "leave the flag out, or use --cp_method=ulysses",
        "cp_size cp_method", lambda layout: {"attn_impl": layout.config.model.attn_impl}),
    Rule("seq_length", lambda layout: layout.config.data.seq_length % layout.sequence_unit == 0,
        "must be a multiple of {unit}, by --cp_size ({cp_size}) and --tp_size ({tp_size})",
        "choose {lengths}", "cp_size tp_size sequence_parallel cp_method",
        lambda layout: {**_facts(layout), "seq_length": layout.config.data.seq_length}),
    Rule("pp_size", lambda layout: layout.stages <= layout.model.num_layers,
        "makes {stages} stages of {num_layers} layers, and each stage needs one",
        "choose fewer stages or more layers", "pp_virtual_stages pp_schedule num_layers", _facts),
    Rule("pp_micro_batch_size",
        lambda layout: layout.dims.pp == 1
        or layout.batch.batch_size % layout.config.parallel.pp_micro_batch_size == 0,
        "must divide the rows of a micro-step ({batch_size})", "change one flag", "batch_size pp_size",
        lambda layout: {**_facts(layout),
            "pp_micro_batch_size": layout.config.parallel.pp_micro_batch_size}),
    Rule("pp_schedule", lambda layout: layout.dims.pp == 1 or _schedule_can_use(layout),
        "cannot use {micro_batches} micro-batches on {pp_size} ranks",
        "take a --batch_size of {least} or a multiple, or another --pp_micro_batch_size",
        "pp_size batch_size pp_micro_batch_size",
        lambda layout: {**_facts(layout), "pp_schedule": layout.config.parallel.pp_schedule}),
    Rule("pp_schedule",
        lambda layout: layout.dims.pp == 1 or layout.config.parallel.pp_schedule != "zbv"
        or layout.torch_version >= _ZBV_TORCH,
        "needs torch 2.13, and this is torch {torch}", "use interleaved or 1f1b", "pp_size",
        lambda layout: {**_facts(layout), "pp_schedule": layout.config.parallel.pp_schedule}),
    Rule("pp_schedule",
        lambda layout: layout.dims.pp == 1 or layout.config.parallel.pp_schedule != "zbv"
        or not compiles(layout.config.parallel, layout.device),
        "splits a backward pass that the compiler made whole", "add --use_torch_compile=False, or use 1f1b",
        "use_torch_compile pp_size",
        lambda layout: {"pp_schedule": layout.config.parallel.pp_schedule}),
    *_refusals(),
)  # fmt: skip


def check_axes(layout: Layout) -> None:
    """Raises UserError for a size that an axis cannot divide, and for a feature that an axis refuses."""
    judge(AXIS_RULES, layout, {})


def check_layout(config: TrainConfig, model: LlamaConfig, machine: Any, batch: BatchPlan) -> None:
    """`check_axes` for a machine (spec/machine.py) and a batch, which a run that goes on keeps."""
    check_axes(Layout(config, model, machine.dims, batch, machine.precision, machine.device))


def features_table() -> str:
    """The table of features and axes, as docs/parallelism.md shows it."""
    lines = ["| feature | flags | tp | cp | pp |", "|---|---|---|---|---|"]
    for feature in FEATURES:
        cells = (
            f"refused: {words}" if (words := feature.refused.get(axis)) else "works" for axis in MODEL_AXES
        )
        lines.append(f"| {feature.name} | `{feature.flags}` | {' | '.join(cells)} |")
    return "\n".join(lines)
