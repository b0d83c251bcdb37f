"""The features that are combined with the axes tp, cp and pp, and what is rejected.

docs/reference/parallelism-tables.md shows the table; test_layouts.py and test_features.py train every cell of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MODEL_AXES = ("tp", "cp", "pp")


class Feature(NamedTuple):
    """A feature, the flags that turn it on, and for each axis that rejects it the reason."""

    name: str
    flags: str = ""
    refused: Mapping[str, str] = {}


_SWITCHES = ("document_mask", "qk_norm", "parallel_residual", "bias", "qkv_bias")
_POSITIONS = ("learned", "sinusoidal", "alibi", "none")
_OWN_MODEL = "no: custom models are not sharded along this axis"
_TEACHER = "no: the teacher is not sharded along this axis"


FEATURES: tuple[Feature, ...] = (
    *(Feature(name, f"--{name}=True") for name in _SWITCHES),
    *(Feature(f"{kind} positions", f"--pos_emb={kind}") for kind in _POSITIONS),
    Feature(
        "relative positions",
        "--pos_emb=relative",
        {
            "cp": "no: a bias needs the full sequence",
            "pp": "no: all layers share one table, which would be on several stages",
        },
    ),
    *(Feature(kind, f"--norm={kind}") for kind in ("layernorm", "scalenorm")),
    Feature("GELU blocks", "--activation=gelu"),
    Feature("windows", "--attn_window=24 --attn_window_pattern=LG"),
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
    Feature(
        "ramp of micro-batches",
        "--rampup_batch_size=4,4,8 --batch_size=8 --rampup_micro_batch=True",
        {"pp": "no: a schedule needs a fixed number of micro-batches"},
    ),
    *(
        Feature(kind, f"--precision={kind}")
        for kind in ("bf16", "fp16", "bf16_pure", "bf16_mixed_sr", "float8")
    ),
    *(
        Feature(name, f"--optimizer={name}")
        for name in ("muon", "adafactor", "lamb", "sm3", "adamax")
    ),
    *(Feature(name, f"--sharding_strategy={name}") for name in ("ddp", "hsdp", "zero1", "zero2")),
    Feature("cpu_offload", "--cpu_offload=True --sharding_strategy=fsdp"),
    Feature("whole build", "--low_cpu_fsdp=False"),
    Feature("norms and zeros", "--log_param_norm=True --log_num_zeros=True"),
    Feature("evaluation", "--eval_interval=2 --eval_steps=2"),
    Feature("samples", "--sample_interval=2"),
    Feature("exports", "--export_interval=2 --checkpoint_interval=2"),
    Feature("import", "--init_from_hf=FOLDER"),
    Feature("profiler", "--use_profiler=True"),
    Feature(
        "compiled and recomputed", "--recompute=blocks --use_torch_compile=True --precision=fp32"
    ),
    Feature(
        "tied embeddings",
        "--tie_embeddings=True",
        {"pp": "no: the shared weight would be on the first and the last stage"},
    ),
    Feature(
        "teacher",
        "--teacher_path=FOLDER",
        dict.fromkeys(MODEL_AXES, _TEACHER),
    ),
    Feature(
        "model of your own",
        "--model_builder=MODULE:FUNCTION",
        dict.fromkeys(MODEL_AXES, _OWN_MODEL),
    ),
)


def features_table() -> str:
    """Returns the features that an axis excludes, as docs/reference/parallelism-tables.md shows them."""
    lines = ["| feature | flags | tp | cp | pp |", "|---|---|---|---|---|"]
    for feature in FEATURES:
        if feature.refused:
            cells = [feature.refused.get(axis, "works") for axis in MODEL_AXES]
            lines.append(f"| {feature.name} | `{feature.flags}` | {' | '.join(cells)} |")
    return "\n".join(lines)
