"""Random layouts of tp, cp and pp, and the verdicts on them that are on record."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

NUM_CASES = 40_000


class Case(NamedTuple):
    """What the check of a layout reads: sections of flags, fields of the model, of the axes, the batch."""

    config: Any
    model: dict[str, Any]
    dims: dict[str, Any]
    batch: dict[str, Any]
    is_fp32: bool
    had_wide_norm: bool  # a removed option, which tp could not shard


def cases() -> Iterator[Case]:
    draw = random.Random(40_000)
    for _ in range(NUM_CASES):
        heads = draw.choice([1, 2, 3, 4, 6, 8, 12, 16])
        kv_heads = draw.choice([each for each in (1, 2, 3, 4, 6, 8, heads) if heads % each == 0])
        tp, cp, pp = (draw.choice([1, 1, 1, 2, 3, 4, 8]) for _ in range(3))
        schedule = draw.choice(["1f1b", "gpipe", "interleaved", "zbv"])
        virtual = 2 if schedule in ("interleaved", "zbv") else 1
        parallel = SimpleNamespace(
            cp_method=draw.choice(["auto", "ulysses", "gather"]),
            pp_schedule=schedule,
            pp_micro_batch_size=draw.choice([1, 1, 2, 3]),
            recomputes=draw.choice(["none", "none", "ops", "blocks"]),
            use_torch_compile=draw.random() < 0.3,
        )
        rare = draw.random
        config = SimpleNamespace(
            parallel=parallel,
            data=SimpleNamespace(seq_length=draw.choice([62, 64, 96, 120, 128, 192, 1024])),
            model=SimpleNamespace(attn_impl=draw.choice(["auto", "auto", "auto", "math"])),
            training=SimpleNamespace(teacher_path="run" if rare() < 0.03 else ""),
        )
        model: dict[str, Any] = {
            "num_layers": draw.choice([1, 2, 4, 6, 8, 16]),
            "hidden_size": 16 * heads,
            "ffn_hidden_size": draw.choice([96, 98, 128, 352]),
            "num_attention_heads": heads,
            "num_kv_heads": kv_heads,
            "vocab_size": draw.choice([5, 9, 131, 512]),
            "max_seq_len": 1024,
            "pos_emb": "relative" if rare() < 0.03 else "rope",
            "tie_embeddings": rare() < 0.05,
            "qk_norm": True,
        }
        had_wide_norm = rare() < 0.03
        model |= {
            "model_builder": "a:b" if rare() < 0.03 else "",
        }
        dims = {
            "tp": tp,
            "cp": cp,
            "pp": pp,
            "sequence_parallel": tp > 1 and draw.random() < 0.8,
            "virtual_stages": virtual if pp > 1 else 1,
        }
        batch = {
            "batch_size": draw.choice([1, 2, 3, 4, 6, 8, 16]),
            "cuts_micro_steps": rare() < 0.03,
        }
        yield Case(config, model, dims, batch, rare() < 0.5, had_wide_norm)
