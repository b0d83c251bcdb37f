"""Steps on a CUDA device that only counts: what is sent, kept and waited for, and that everything starts."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from fms_fsdp.config import ParallelConfig, PrecisionConfig
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.world import World
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import flops_per_token, num_params_by_unit
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.optim.optimizers import TORCH_OPTIMIZERS, own_optimizers
from fms_fsdp.predict.memory import Step
from fms_fsdp.predict.meter import ModelSetup, cost
from fms_fsdp.predict.speed import sent as sent_in_step
from tests.cli import ROOT
from tests.nullcuda.conftest import Device, found

pytestmark = pytest.mark.slow
STEPS = ROOT / "tests" / "nullcuda" / "steps.py"
SMALL = TransformerConfig(2, 256, 512, 4, 2, 512, max_seq_len=128)
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": dict(precision="bf16"),
    "fp32": dict(precision="fp32"),
    "fp16": dict(precision="fp16"),
    "bf16_pure": dict(precision="bf16_pure"),
    "bf16 moments": dict(precision="bf16", optimizer_state_dtype="bf16"),
    "float8": dict(precision="float8"),
    "float8 by tensor": dict(precision="float8", float8_scaling="tensor"),
}
RECOMPUTATIONS = ("none", "cheap", "ops", "blocks")
LAYOUTS = [
    ("none", 1),
    ("fsdp", 1),
    ("ddp", 1),
    ("fsdp", 2),
    ("hsdp", 4),
    ("ddp", 2),
    ("zero1", 2),
    ("zero2", 2),
]


def case(
    strategy: str, world: int, recompute: str, precision: dict[str, Any], **more: Any
) -> dict[str, Any]:
    flags: dict[str, Any] = {"sharding_strategy": strategy, "recompute": recompute}
    flags |= {"hsdp_shard_size": 2} if strategy == "hsdp" else {}
    return {"flags": flags, "precision": precision, "world": world, **more}


def sent(config: TransformerConfig, row: dict[str, Any]) -> dict[str, int]:
    """Bytes that the rank sent in the last step, by axis, from what was counted."""
    by_axis = {"dp_shard": 0.0, "dp_replicate": 0.0}
    replicas = 2 if row["flags"]["sharding_strategy"] == "hsdp" else row["world"]
    for name, (_, size) in row["messages"].items():
        group = int(name.split(" world")[1])
        if "AllReduce" in name:
            by_axis["dp_replicate"] += 2 * size * (replicas - 1) / replicas
        elif group > 1:
            by_axis["dp_shard"] += size * (group - 1) / group
    return {axis: round(size) for axis, size in by_axis.items() if size}


def predicted(config: TransformerConfig, row: dict[str, Any]) -> dict[str, int]:
    world, section = row["world"], ParallelConfig(**row["flags"])
    precision = PrecisionConfig(**row["precision"])
    dims = plan_dims(section, "", World(0, 0, world, min(world, 8)))
    numbers = precision.resolve(precision.named or "bf16")
    shape = ModelSetup(config, section, numbers, dims, config.max_seq_len)
    return dict(sent_in_step(Step(shape, 1, 1)))


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_setting_takes_steps_waits_for_nothing_and_sends_what_is_predicted(
    device: Device, name: str
) -> None:
    cases = [
        case(strategy, world, recompute, PRECISIONS[name])
        for (strategy, world), recompute in itertools.product(LAYOUTS, RECOMPUTATIONS)
    ]
    rows = found(device(STEPS, json.dumps(cases), timeout=3600))
    assert len(rows) == len(cases)
    for row in rows:
        about = {key: row[key] for key in ("flags", "precision", "world")}
        assert (row["waits"], row["unimplemented"]) == ({}, 0), about
        assert sent(SMALL, row) == pytest.approx(predicted(SMALL, row), rel=1e-4), about
    kept = {
        (row["flags"]["sharding_strategy"], row["world"], row["flags"]["recompute"]): row["kept"]
        for row in rows
    }
    for strategy, world in LAYOUTS:
        none, cheap, ops, blocks = (kept[strategy, world, each] for each in RECOMPUTATIONS)
        assert blocks < ops < none and blocks < cheap < none, (strategy, world)


EIGHT = VARIANTS["llama3_8b"]
BF16 = dict(precision="bf16")


@pytest.mark.parametrize(
    ("strategy", "world", "rows", "recompute", "precision"),
    [
        ("none", 1, 3, "cheap", BF16),
        ("none", 1, 8, "blocks", BF16),
        ("fsdp", 8, 4, "cheap", BF16),
        ("none", 1, 3, "cheap", dict(precision="float8")),
    ],
)
def test_a_step_of_8b_sends_keeps_and_multiplies_what_estimate_says(
    device: Device, strategy: str, world: int, rows: int, recompute: str, precision: dict[str, Any]
) -> None:
    length = 4096
    more = dict(variant="llama3_8b", rows=rows, seq_length=length)
    name = "NVIDIA H200" if world == 1 else "NVIDIA H100 80GB HBM3"
    cases = json.dumps([case(strategy, world, recompute, precision, **more)])
    (row,) = found(device(STEPS, cases, name=name, timeout=1800))
    assert (row["waits"], row["unimplemented"]) == ({}, 0)
    assert sent(EIGHT, row) == pytest.approx(predicted(EIGHT, row), rel=1e-4)
    section, flags = ParallelConfig(recompute=recompute), PrecisionConfig(**precision)
    numbers = flags.resolve(flags.named or "bf16")
    dims = plan_dims(section, "", World(0, 0, world, min(world, 8)))
    part = "recomputed" if recompute != "none" else "block"
    shape = ModelSetup(EIGHT, section, numbers, dims, length)
    kept = EIGHT.num_layers * cost(shape, part, rows).kept
    assert row["kept"] == pytest.approx(kept, rel=0.02)
    if (
        recompute == "cheap"
    ):  # no product is repeated; attention is no product of cuBLAS, a lookup none at all
        attention = 12 * EIGHT.num_layers * EIGHT.num_attention_heads * EIGHT.head_dim * length
        lookup = 6 * num_params_by_unit(EIGHT)["embed"]
        products = flops_per_token(EIGHT, length) - attention - lookup
        assert row["products"] == pytest.approx(rows * length * products, rel=1e-4)
    print(json.dumps(row))  # what benchmarks/LOG.md records


FSDP = case("fsdp", 2, "none", PRECISIONS["bf16"])
READ_THE_NORM = ("sgd", "adagrad", "adadelta", "adamax", "rmsprop", "rprop")
READ_NOTHING = ("adam", "muon", "adafactor", "lamb", "novograd", "madgrad", "sm3")


def test_table_of_optimizers_is_whole() -> None:
    known = {*TORCH_OPTIMIZERS, *own_optimizers()}
    assert {"adamw", *READ_THE_NORM, *READ_NOTHING} == known


def test_steps_wait_for_nothing_with_most_optimizers_and_settings(device: Device) -> None:
    more: list[dict[str, Any]] = [dict(optim=dict(optimizer=name)) for name in READ_NOTHING]
    more += [
        dict(grad_clip=0.0),
        dict(micro_batch=1),
        dict(document_mask=True),
        dict(document_mask=True, micro_batch=1, precision=PRECISIONS["fp16"]),
        dict(grad_clip=0.0, precision=PRECISIONS["fp16"]),
        dict(optim=dict(optimizer="muon"), precision=PRECISIONS["fp16"]),
    ]
    for row in found(device(STEPS, json.dumps([{**FSDP, **each} for each in more]), timeout=2400)):
        assert (row["waits"], row["unimplemented"]) == ({}, 0), row


def test_other_optimizers_read_whether_the_gradient_is_finite(device: Device) -> None:
    """Once a step: they cannot skip it on the device (fms_fsdp/train.py says so)."""
    more = [dict(optim=dict(optimizer=name), may_wait=True) for name in READ_THE_NORM]
    for row in found(device(STEPS, json.dumps([{**FSDP, **each} for each in more]), timeout=2400)):
        assert sum(row["waits"].values()) in (1, 2), row  # a copy, and the wait for its stream
        assert row["unimplemented"] == 0


AXES: list[tuple[int, dict[str, Any]]] = [
    (4, dict(tp_size=2, recompute="blocks")),
    (4, dict(tp_size=2, sequence_parallel=False)),
    (4, dict(cp_size=2)),
    (4, dict(cp_size=2, cp_method="gather")),
    (8, dict(cp_size=2, tp_size=2, async_tp=True)),
    (4, dict(pp_size=2)),
    (8, dict(pp_size=2, tp_size=2)),
]


def test_every_axis_takes_compiled_steps_and_waits_for_nothing(device: Device) -> None:
    cases = [
        dict(
            flags={"sharding_strategy": "fsdp", **flags}, precision=PRECISIONS["bf16"], world=world
        )
        for world, flags in AXES
    ]
    for row in found(device(STEPS, json.dumps(cases), timeout=1200)):
        assert not row["waits"] and not row["unimplemented"], row["flags"]
        kinds = {name.split("(")[0].split(" type")[0] for name in row["messages"]}
        if (
            row["flags"].get("pp_size", 1) > 1
            or row["flags"].get("cp_method") is None
            and "cp_size" in row["flags"]
        ):
            assert {"NCCL Send", "NCCL Recv"} <= kinds, row["flags"]
