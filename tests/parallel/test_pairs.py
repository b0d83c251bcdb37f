"""Axes and pairs of axes on four ranks train like one process, with features of training mixed in."""

from __future__ import annotations

import pytest

from fms_fsdp.config import BF16
from tests.parallel.layouts import Case, compare

TP, CP, PP = {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2}
HSDP = {"sharding_strategy": "hsdp"}
COPIES, GATHER = {"sequence_parallel": False}, {"cp_method": "gather"}
WINDOWS = {"attn_window": 5, "attn_window_pattern": "LG"}
MUON = {"optimizer": "muon"}
CASES = {
    "tp 4": Case({"tp_size": 4}, shape={"num_kv_heads": 2, "qk_norm": True}),
    "cp 4 by ulysses": Case({"cp_size": 4, "cp_method": "ulysses"}, documents=True),
    "cp 4 by gather": Case(GATHER | {"cp_size": 4}, documents=True),
    "pp 4": Case({"pp_size": 4, "sharding_strategy": "fsdp"}, optim=MUON),
    "pp x ddp": Case(PP | {"sharding_strategy": "ddp"}, {"cpu_offload": True}, accum=2),
    "tp x zero1": Case(
        TP | {"sharding_strategy": "zero1"},
        {"low_cpu_fsdp": False},
        {"norm": "layernorm", "bias": True, "tie_embeddings": True},
        accum=2,
    ),
    "tp x cp by ulysses": Case(
        TP | CP, {"recompute": "blocks"}, shape={"num_kv_heads": 2}, documents=True
    ),
    "tp x cp by gather": Case(TP | CP | GATHER, documents=True, accum=2),
    "tp of copies x cp": Case(
        TP | CP | COPIES | GATHER,
        shape={"num_kv_heads": 1, "tie_embeddings": True, "pos_emb": "learned"},
    ),
    "pp x tp by 1f1b": Case(PP | TP, {"recompute": "ops"}, documents=True, accum=2),
    "pp x tp of copies": Case(PP | TP | COPIES | {"pp_schedule": "gpipe"}, optim=MUON),
    "pp x cp by zbv": Case(PP | CP | {"pp_schedule": "zbv"}, documents=True, accum=2),
    "pp x cp by gather": Case(
        PP | CP | GATHER | {"pp_schedule": "interleaved"},
        {"recompute": "blocks"},
        shape=WINDOWS | {"z_loss": 1e-3, "pos_emb": "learned"},
    ),
    "tp x ddp": Case(TP | {"sharding_strategy": "ddp"}, optim=MUON, documents=True, accum=2),
    "pp x cp by segments": Case(
        PP | CP | {"pp_schedule": "zbv"},
        {"recompute": "blocks", "recompute_segment": 2},
        documents=True,
        accum=2,
    ),
    "cp x hsdp": Case(CP | HSDP | {"hsdp_shard_size": 1}, optim=MUON, documents=True, accum=2),
    "pp x hsdp": Case(
        PP | HSDP | {"hsdp_shard_size": 1, "pp_schedule": "interleaved"}, documents=True, accum=2
    ),
    "pp x fsdp": Case(
        PP | {"sharding_strategy": "fsdp", "pp_micro_batch_size": 2},
        {"recompute": "blocks"},
        precision=BF16,
        loss_abs=1e-3,
        norm_rel=5e-3,
    ),
}


QUICK = (  # each axis alone, each pair of axes, and an axis with each strategy
    "tp 4",
    "pp 4",
    "tp x cp by ulysses",
    "pp x tp by 1f1b",
    "pp x cp by gather",
    "tp x ddp",
    "cp x hsdp",
    "pp x fsdp",
)


@pytest.mark.slow
def test_layouts_train_like_one_process() -> None:
    compare(4, {name: CASES[name] for name in QUICK})


@pytest.mark.slow
def test_further_layouts_train_like_one_process() -> None:
    compare(4, {name: case for name, case in CASES.items() if name not in QUICK})
