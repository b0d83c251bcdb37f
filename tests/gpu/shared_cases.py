"""The cases of part 6 of scripts/gpu_session.sh: rows for ranks that share one GPU, in order of worth.

Each case trains the small model for 10 steps in a layout of tests/parallel/table.py, and is compared with one
rank that trains on the same device, in eager mode, the same sequences. World 2 comes first, eager before
compiled.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tests.parallel.table import LAYOUTS, Bounds, Layout, Row, flags_of

STEPS = 10
FP32 = Bounds(1e-5, 1e-4)
BF16 = Bounds(1e-2, math.inf)
FLOAT8 = Bounds(2e-2, math.inf)  # as in part 3: the scales of a layout follow from its own rows

STRATEGIES = ("ddp", "fsdp", "hsdp 2x1", "hsdp 1x2", "zero1", "zero2")
AXES = ("tp", "tp without sp", "cp ulysses", "cp gather", "pp 1f1b", "pp interleaved")
JOINED = ("hsdp 2x2", "tp x fsdp", "pp x fsdp", "cp x tp", "pp x tp", "pp x hsdp x tp")


def case(name: str, layout: str, flags: str, bounds: Bounds, *, compiled: bool = False) -> Row:
    """Returns a row with flags such as `a=1 b=2`."""
    given = flags_of(flags)
    if compiled:
        name += " compiled"
        given += ("--use_torch_compile=True",)
    return Row(name, LAYOUTS[layout], given, bounds)


def in_fp32(layout: str, *, compiled: bool = False) -> Row:
    """Returns the case of a layout in fp32."""
    return case(f"{layout} fp32", layout, "precision=fp32", FP32, compiled=compiled)


def in_bf16(layout: str, *, compiled: bool = False) -> Row:
    """Returns the case of a layout in bf16."""
    return case(f"{layout} bf16", layout, "precision=bf16", BF16, compiled=compiled)


def features(*, compiled: bool) -> list[Row]:
    """Returns fsdp with each feature: in fp32 where it has a tight bound and runs eagerly."""
    precision = "bf16" if compiled else "fp32"
    bounds = BF16 if compiled else FP32

    def under_fsdp(name: str, flags: str, bounds: Bounds) -> Row:
        return case(f"fsdp with {name}", "fsdp", flags, bounds, compiled=compiled)

    return [
        under_fsdp("accumulation", f"precision={precision} grad_accum_steps=2", bounds),
        under_fsdp("cpu_offload", f"precision={precision} cpu_offload=True", bounds),
        under_fsdp("bf16_pure", "precision=bf16_pure", BF16),
        under_fsdp("float8", "precision=float8", FLOAT8),
        # Newton-Schulz runs in bf16: it turns the last bits of gradients into steps of bf16.
        under_fsdp("muon", "precision=bf16 optimizer=muon", BF16),
        under_fsdp("fp16", "precision=fp16", BF16),
        under_fsdp("tied embeddings", f"precision={precision} tie_embeddings=True", bounds),
        under_fsdp("document masks", f"precision={precision} document_mask=True", bounds),
    ]


def all_cases() -> list[Row]:
    """Returns every case that runs in a group of ranks, in the order in which they run."""
    cases = list[Row]()
    cases += [in_fp32(layout) for layout in STRATEGIES]
    cases += [in_bf16(layout) for layout in STRATEGIES]
    cases += features(compiled=False)
    cases += [in_fp32(layout) for layout in AXES]
    cases.append(replace(in_fp32("pp zbv"), min_torch=(2, 13)))
    cases += [in_fp32(layout, compiled=True) for layout in STRATEGIES]
    cases += [in_bf16(layout, compiled=True) for layout in STRATEGIES]
    cases += features(compiled=True)
    cases += [in_bf16(layout, compiled=True) for layout in AXES]
    cases += [in_fp32(layout) for layout in JOINED]
    cases += [in_bf16(layout, compiled=True) for layout in JOINED]
    return sorted(cases, key=lambda case: case.world)  # stable: keeps the order within a world


def references(cases: list[Row]) -> list[Row]:
    """Returns the runs on one rank with which the cases are compared."""
    found = dict[str, Row]()
    for each in cases:
        found.setdefault(each.reference.name, each.reference)
    return list(found.values())


def collectives_of(layout: Layout) -> list[str]:
    """Returns the collectives that the layout uses, for plain torch to repeat."""
    axes = dict(layout.sizes)
    names = ["all_reduce"]
    if "dp_shard" in axes or "tp" in axes:
        names += ["all_gather", "reduce_scatter"]
    if "cp" in axes:
        names += ["all_gather", "reduce_scatter", "all_to_all"]
    if "pp" in axes:
        names.append("send_and_receive")
    return list(dict.fromkeys(names))
