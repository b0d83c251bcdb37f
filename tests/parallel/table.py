"""The table of layouts, features and precisions that train as one process does.

test_layouts.py trains ROWS on CPUs; tests/gpu/shared_cases.py chooses layouts for ranks that share one GPU.
train_rows.py trains a row on either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from fms_fsdp.config import ParallelConfig
from tests.parallel.features import FEATURES

GLOBAL_BATCH = 8  # sequences
COMMON = (
    "--use_dummy_dataset=True",
    "--trackers=none",
    "--matmul_precision=highest",
    "--checkpoint_interval=0",
    "--save_last=False",
    "--output_dir=unused",
)
MODEL_ON = {
    "cuda": (
        "--model_variant=194m",
        "--num_layers=4",
        "--num_kv_heads=2",
        "--seq_length=512",
        "--learning_rate=3e-5",
    ),
    "cpu": (
        "--model_variant=tiny",
        "--num_layers=4",
        "--hidden_size=64",
        "--ffn_hidden_size=96",
        "--num_attention_heads=8",
        "--num_kv_heads=4",
        "--vocab_size=131",  # divides over no world
        "--seq_length=32",
        "--learning_rate=1e-3",
        "--warmup_steps=0",
    ),
}
# Flags that divide the work, which must not change a result: one process trains without them.
DIVIDING = {flag.name for flag in fields(ParallelConfig)} - {"matmul_precision"}
DIVIDING |= {"batch_size", "grad_accum_steps", "rampup_micro_batch"}


class Bounds(NamedTuple):
    """The largest relative differences from one process; infinity checks nothing.

    loss  of the loss of each step, and of evaluations
    norm  of gradient norm, weight norm and z-loss
    grad  of the gradient of each parameter in the first step
    """

    loss: float
    norm: float
    grad: float = math.inf

    def loosest(self, other: Bounds) -> Bounds:
        """Returns the larger of each two bounds."""
        return Bounds(*map(max, self, other))


_FP32 = Bounds(2e-6, 1e-4, 1e-5)
_16_BITS = Bounds(5e-4, 5e-3, 5e-2)
BOUNDS = {  # of precisions and features
    "fp32": _FP32,
    "bf16": _16_BITS,
    "bf16_pure": _16_BITS,
    "bf16_mixed_sr": _16_BITS,
    "fp16": _16_BITS,
    "float8": Bounds(2e-2, 2e-1),  # the scales of a layout follow from its own rows
    "dropout": Bounds(2e-2, 2e-1),  # each layout has its own masks
    "muon": Bounds(4e-6, 1e-4, 1e-5),  # Newton-Schulz runs in bf16
}


class Layout(NamedTuple):
    """Flags of a layout, and the axes that have several ranks: the mesh must have exactly these."""

    flags: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def world(self) -> int:
        return math.prod(size for _, size in self.sizes)


def layout(flags: str, **sizes: int) -> Layout:
    return Layout(flags_of(flags), tuple(sizes.items()))


def flags_of(text: str) -> tuple[str, ...]:
    """Returns the flags of `a=1 b=2`."""
    return tuple(f"--{word.removeprefix('--')}" for word in text.split())


ONE_RANK = Layout()
LAYOUTS = {
    "ddp": layout("sharding_strategy=ddp", dp_replicate=2),
    "fsdp": layout("sharding_strategy=fsdp", dp_shard=2),
    "fsdp 3": layout("sharding_strategy=fsdp", dp_shard=3),
    "hsdp 2x1": layout("sharding_strategy=hsdp hsdp_shard_size=1", dp_replicate=2),
    "hsdp 1x2": layout("sharding_strategy=hsdp hsdp_shard_size=2", dp_shard=2),
    "hsdp 2x2": layout("sharding_strategy=hsdp hsdp_shard_size=2", dp_replicate=2, dp_shard=2),
    "zero1": layout("sharding_strategy=zero1", dp_shard=2),
    "zero1 4": layout("sharding_strategy=zero1", dp_shard=4),
    "zero2": layout("sharding_strategy=zero2", dp_shard=2),
    "tp": layout("tp_size=2", tp=2),
    "tp 4": layout("tp_size=4", tp=4),
    "tp without sp": layout("tp_size=2 sequence_parallel=False", tp=2),
    "tp x fsdp": layout("tp_size=2", tp=2, dp_shard=2),
    "tp x ddp": layout("tp_size=2 sharding_strategy=ddp", tp=2, dp_replicate=2),
    "tp x hsdp": layout("tp_size=2 sharding_strategy=hsdp hsdp_shard_size=1", tp=2, dp_replicate=2),
    "tp x zero1": layout("tp_size=2 sharding_strategy=zero1", tp=2, dp_shard=2),
    "cp ulysses": layout("cp_size=2 cp_method=ulysses", cp=2),
    "cp gather": layout("cp_size=2 cp_method=gather", cp=2),
    "cp 4 ulysses": layout("cp_size=4 cp_method=ulysses", cp=4),
    "cp 4 gather": layout("cp_size=4 cp_method=gather", cp=4),
    "cp x ddp": layout("cp_size=2 sharding_strategy=ddp", cp=2, dp_replicate=2),
    "cp x hsdp": layout("cp_size=2 sharding_strategy=hsdp hsdp_shard_size=1", cp=2, dp_replicate=2),
    "cp x tp": layout("cp_size=2 tp_size=2", cp=2, tp=2),
    "cp gather x tp": layout("cp_size=2 cp_method=gather tp_size=2", cp=2, tp=2),
    "cp gather x tp without sp": layout(
        "cp_size=2 cp_method=gather tp_size=2 sequence_parallel=False", cp=2, tp=2
    ),
    "pp 1f1b": layout("pp_size=2", pp=2),
    "pp interleaved": layout("pp_size=2 pp_schedule=interleaved", pp=2),
    "pp zbv": layout("pp_size=2 pp_schedule=zbv", pp=2),
    "pp 4": layout("pp_size=4", pp=4),
    "pp x fsdp": layout("pp_size=2", pp=2, dp_shard=2),
    "pp x ddp": layout("pp_size=2 sharding_strategy=ddp", pp=2, dp_replicate=2),
    "pp interleaved x hsdp": layout(
        "pp_size=2 pp_schedule=interleaved sharding_strategy=hsdp hsdp_shard_size=1",
        pp=2,
        dp_replicate=2,
    ),
    "pp x tp": layout("pp_size=2 tp_size=2", pp=2, tp=2),
    "pp gpipe x tp without sp": layout(
        "pp_size=2 pp_schedule=gpipe tp_size=2 sequence_parallel=False", pp=2, tp=2
    ),
    "pp zbv x cp": layout("pp_size=2 pp_schedule=zbv cp_size=2", pp=2, cp=2),
    "pp interleaved x cp gather": layout(
        "pp_size=2 pp_schedule=interleaved cp_size=2 cp_method=gather", pp=2, cp=2
    ),
    "pp x hsdp x tp": layout(
        "pp_size=2 sharding_strategy=hsdp hsdp_shard_size=1 tp_size=2", pp=2, dp_replicate=2, tp=2
    ),
}


@dataclass(frozen=True)
class Row:
    """A layout with features, and how near to one process it trains.

    flags      of the features and the precision
    min_torch  the oldest version of torch that supports the row
    """

    name: str
    layout: Layout = ONE_RANK
    flags: tuple[str, ...] = ()
    bounds: Bounds = _FP32
    min_torch: tuple[int, int] = (2, 11)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.layout.world

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled."""
        return "--use_torch_compile=True" in self.flags

    @property
    def reference(self) -> Row:
        """The row of one process with which this one is compared."""
        recipe = tuple(flag for flag in self.flags if name_of(flag) not in DIVIDING)
        if any(name_of(flag) == "rampup_batch_size" for flag in recipe):
            recipe += ("--rampup_micro_batch=True",)  # each batch is one micro-batch
        return Row(f"one rank {' '.join(recipe)}", ONE_RANK, recipe)

    def launch_flags(self, device_type: str, num_steps: int) -> list[str]:
        """Returns the flags of a launch; of flags of one name the last counts."""
        given = [
            *COMMON,
            *MODEL_ON[device_type],
            f"--num_steps={num_steps}",
            f"--global_batch_size={GLOBAL_BATCH}",
            "--grad_accum_steps=1",
            "--use_torch_compile=False",
            *self.layout.flags,
            *self.flags,
        ]
        return list({name_of(flag): flag for flag in given}.values())


def name_of(flag: str) -> str:
    """Returns the name of `--name=value`."""
    return flag.removeprefix("--").partition("=")[0]


MORE_FEATURES = {  # that only shards have, and short names
    "compiled": "use_torch_compile=True",
    "accum 3": "global_batch_size=12 grad_accum_steps=3",  # one micro-step is neither first nor last
    "gpt": "norm=layernorm activation=gelu_tanh bias=True",
    # three layers, which neither groups nor segments of two divide
    "groups": "fsdp_blocks_per_group=2 num_layers=3",
    "segments": "recompute=blocks recompute_segment=2 num_layers=3",
    "half blocks": "fsdp_activation_checkpointing=True selective_checkpointing=1/2",
    "late sync": "sync_each_micro_step=False",
    "offload": "cpu_offload=True",
    "short windows": "attn_window=5 attn_window_pattern=LG",
}
FLAGS_OF = {feature.name: feature.flags for feature in FEATURES} | MORE_FEATURES


def rows(layouts: str, features: str = "", precision: str = "fp32") -> list[Row]:
    """Returns a row for each of the layouts. A feature has a name above or in features.py, or is flags."""
    names = [name.strip() for name in features.split(",") if name]
    flags = list[str]()
    bounds = BOUNDS[precision]
    for name in names:
        flags += flags_of(FLAGS_OF.get(name, name))
        if name in BOUNDS:
            bounds = bounds.loosest(BOUNDS[name])
    flags.append(f"--precision={precision}")
    found = []
    for key in layouts.split(", "):
        found.append(Row(", ".join([key, *names, precision]), LAYOUTS[key], tuple(flags), bounds))
    return found


AXES = "tp, cp ulysses, pp 1f1b"
ATTENDING = f"{AXES}, cp gather"  # where features concern attention, both methods of cp
QUICK = (  # the sharding strategies, and the gradients of tensor parallelism
    *rows("fsdp", "accum 3, half blocks"),
    *rows("fsdp", "tied embeddings, whole build"),
    *rows("fsdp", "cpu_offload, fsdp_prefetch=2"),
    *rows("fsdp", "", "bf16"),
    *rows("fsdp", "accumulation, late sync, groups, half blocks"),
    *rows("fsdp", "accumulation, segments"),
    *rows("zero1", "accum 3, tied embeddings, half blocks", "bf16"),
    *rows("zero1, zero2", "accumulation, offload"),
    *rows("ddp", "accumulation, groups, offload, whole build"),
    *rows("fsdp 3", "global_batch_size=12, accumulation"),
    *rows("fsdp 3", "global_batch_size=12, tied embeddings, whole build"),
    *rows("zero1 4", "accum 3, tied embeddings, groups"),
    *rows("hsdp 2x2", "accum 3, tied embeddings, half blocks"),
    *rows("hsdp 2x2", "accum 3, late sync, fsdp_prefetch=1"),
    *rows("hsdp 2x2", "reshard_after_forward=False, groups, fsdp_prefetch=1, offload"),
    *rows(
        "tp, tp without sp",
        "gpt, learned positions, tied embeddings, qk_norm, grouped queries, init_std=0.2",
    ),
    *rows("tp, tp without sp", "scalenorm, qk_norm, bias, init_std=0.2, z_loss=0.01"),
)
SLOW = (
    *rows("fsdp, ddp", "compiled"),
    *rows("fsdp", "compiled, accumulation, segments"),
    *rows("zero1", "compiled, accumulation, groups, half blocks"),
    *rows("tp", "compiled, qk_norm"),
    *rows("tp", "compiled, qk_norm, recompute blocks", "bf16"),
    *rows("fsdp, ddp, zero1", "accumulation, recompute blocks", "bf16_mixed_sr"),
    # every feature with every axis
    *rows(
        ATTENDING,
        "document_mask, qk_norm, z-loss, recompute blocks, accumulation, odd vocabulary, whole build",
    ),
    *rows(
        ATTENDING,
        "learned positions, layernorm, bias, GELU blocks, recompute ops, accumulation, ramp, lamb",
    ),
    *rows(
        "tp, cp ulysses, cp gather, pp interleaved, pp zbv",
        "alibi positions, windows, parallel_residual, evaluation, cpu_offload, scalenorm, sm3",
    ),
    *rows("pp interleaved", "document_mask, evaluation, sharding_strategy=fsdp"),
    *rows(ATTENDING, "none positions, grouped queries, zero1, muon, accumulation"),
    *rows(ATTENDING, "qk_norm, qkv_bias, compiled and recomputed, document_mask, accumulation"),
    *rows(AXES, "dropout, accumulation", "float8"),
    *rows("tp", "relative positions, ramp of micro-batches"),
    *rows("cp ulysses", "ramp of micro-batches"),
    *rows(AXES, "sinusoidal positions, zero2, adafactor, recompute cheap, accumulation"),
    *rows(AXES, "accumulation", "fp16"),
    *rows(AXES, "accumulation", "bf16_pure"),
    *rows(AXES, "accumulation", "bf16_mixed_sr"),
    *rows(
        "tp x hsdp, cp x hsdp, pp interleaved x hsdp",
        "adamax, recompute segments, document_mask, accumulation",
    ),
    *rows("cp x ddp", "accumulation", "bf16"),
    # every pair of axes
    *rows("tp 4", "num_kv_heads=2, qk_norm"),
    *rows("cp 4 ulysses, cp 4 gather", "document_mask"),
    *rows("pp 4", "sharding_strategy=fsdp, muon"),
    *rows("pp x ddp", "offload, accumulation"),
    *rows("pp x fsdp", "recompute blocks, pp_micro_batch_size=2", "bf16"),
    *rows("tp x zero1", "whole build, layernorm, bias, tied embeddings, accumulation"),
    *rows("tp x ddp", "muon, document_mask, accumulation"),
    *rows("cp x hsdp", "muon, document_mask, accumulation"),
    *rows("cp x tp", "recompute blocks, num_kv_heads=2, document_mask, evaluation"),
    *rows("cp gather x tp", "document_mask, accumulation"),
    *rows("cp gather x tp without sp", "grouped queries, tied embeddings, learned positions"),
    *rows("pp x tp", "recompute ops, document_mask, accumulation, evaluation"),
    *rows("pp gpipe x tp without sp", "muon"),
    *rows("pp zbv x cp", "document_mask, accumulation, recompute segments"),
    *rows(
        "pp interleaved x cp gather",
        "recompute blocks, short windows, z-loss, learned positions, evaluation",
    ),
)
