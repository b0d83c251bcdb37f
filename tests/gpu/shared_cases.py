"""The cases of part 6 of scripts/gpu_session.sh: ranks that share one GPU, in order of worth.

Each case trains the small model for 10 steps in one layout, and is compared with one rank that trains on the
same device, in eager mode, the same sequences. World 2 comes first, eager before compiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

STEPS = 10
GLOBAL_BATCH = 8  # sequences
# Largest relative differences from one rank, at any step.
FP32_BOUND = 1e-5
BF16_BOUND = 1e-2
FLOAT8_BOUND = 2e-2  # as in part 3: the scales of a layout follow from its own rows
FP32_NORM_BOUND = 1e-4  # of the gradient, which a loss of 10 steps may hide

COMMON = (
    "--use_dummy_dataset=True",
    "--trackers=none",
    f"--num_steps={STEPS}",
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
    "cpu": ("--model_variant=tiny", "--num_layers=4", "--seq_length=64", "--learning_rate=3e-4"),
}


@dataclass(frozen=True)
class Case:
    """A layout of `world` ranks.

    layout      flags that the reference, one rank, does not have
    recipe      flags that the reference has too
    sizes       the axes with several ranks; the mesh must have exactly these
    bound       of the loss, relative
    norm_bound  of the gradient norm, relative; infinity checks nothing
    min_torch   the oldest version of torch that supports the case
    """

    name: str
    world: int
    layout: tuple[str, ...] = ()
    recipe: tuple[str, ...] = ("--precision=fp32",)
    sizes: Mapping[str, int] = field(default_factory=dict)
    accum: int = 1
    compiled: bool = False
    bound: float = FP32_BOUND
    norm_bound: float = FP32_NORM_BOUND
    min_torch: tuple[int, int] = (2, 11)

    @property
    def reference(self) -> str:
        """The name of the run on one rank with which this case is compared."""
        return "one rank " + " ".join(self.recipe)

    def flags(self, device_type: str) -> list[str]:
        """Returns the flags of a launch of this case."""
        assert math.prod(self.sizes.values()) == self.world, self.name
        num_readers = self.sizes.get("dp_replicate", 1) * self.sizes.get("dp_shard", 1)
        return [
            *COMMON,
            *MODEL_ON[device_type],
            *self.recipe,
            *self.layout,
            f"--use_torch_compile={self.compiled}",
            f"--grad_accum_steps={self.accum}",
            f"--batch_size={GLOBAL_BATCH // (num_readers * self.accum)}",
        ]

    def collectives(self) -> list[str]:
        """Returns the collectives that the layout uses, for plain torch to repeat."""
        names = ["all_reduce"]
        if self.sizes.get("dp_shard", 1) > 1 or self.sizes.get("tp", 1) > 1:
            names += ["all_gather", "reduce_scatter"]
        if self.sizes.get("cp", 1) > 1:
            names += ["all_gather", "reduce_scatter", "all_to_all"]
        if self.sizes.get("pp", 1) > 1:
            names.append("send_and_receive")
        return list(dict.fromkeys(names))


FP32 = ("--precision=fp32",)
BF16 = ("--precision=bf16",)
Layout = tuple[str, int, tuple[str, ...], dict[str, int]]  # name, world, flags, sizes
LAYOUTS: tuple[Layout, ...] = (
    ("ddp", 2, ("--sharding_strategy=ddp",), {"dp_replicate": 2}),
    ("fsdp", 2, ("--sharding_strategy=fsdp",), {"dp_shard": 2}),
    ("hsdp 2x1", 2, ("--sharding_strategy=hsdp", "--hsdp_shard_size=1"), {"dp_replicate": 2}),
    ("hsdp 1x2", 2, ("--sharding_strategy=hsdp", "--hsdp_shard_size=2"), {"dp_shard": 2}),
    ("zero1", 2, ("--sharding_strategy=zero1",), {"dp_shard": 2}),
    ("zero2", 2, ("--sharding_strategy=zero2",), {"dp_shard": 2}),
)
AXES: tuple[Layout, ...] = (
    ("tp", 2, ("--tp_size=2",), {"tp": 2}),
    ("tp without sp", 2, ("--tp_size=2", "--sequence_parallel=False"), {"tp": 2}),
    ("cp ulysses", 2, ("--cp_size=2", "--cp_method=ulysses"), {"cp": 2}),
    ("cp gather", 2, ("--cp_size=2", "--cp_method=gather"), {"cp": 2}),
    ("pp 1f1b", 2, ("--pp_size=2",), {"pp": 2}),
    ("pp interleaved", 2, ("--pp_size=2", "--pp_schedule=interleaved"), {"pp": 2}),
)
JOINED: tuple[Layout, ...] = (
    (
        "hsdp 2x2",
        4,
        ("--sharding_strategy=hsdp", "--hsdp_shard_size=2"),
        {"dp_replicate": 2, "dp_shard": 2},
    ),
    ("tp x fsdp", 4, ("--tp_size=2",), {"tp": 2, "dp_shard": 2}),
    ("pp x fsdp", 4, ("--pp_size=2",), {"pp": 2, "dp_shard": 2}),
    ("cp x tp", 4, ("--cp_size=2", "--tp_size=2"), {"cp": 2, "tp": 2}),
    ("pp x tp", 4, ("--pp_size=2", "--tp_size=2"), {"pp": 2, "tp": 2}),
    (
        "pp x hsdp x tp",
        8,
        ("--pp_size=2", "--sharding_strategy=hsdp", "--hsdp_shard_size=1", "--tp_size=2"),
        {"pp": 2, "dp_replicate": 2, "tp": 2},
    ),
)


def in_fp32(layout: Layout, *, compiled: bool = False) -> Case:
    """Returns the case of a layout in fp32."""
    name, world, flags, sizes = layout
    kind = "fp32 compiled" if compiled else "fp32"
    return Case(f"{name} {kind}", world, flags, FP32, sizes, compiled=compiled)


def in_bf16(layout: Layout, *, compiled: bool = False) -> Case:
    """Returns the case of a layout in bf16."""
    name, world, flags, sizes = layout
    kind = "bf16 compiled" if compiled else "bf16"
    return Case(
        f"{name} {kind}",
        world,
        flags,
        BF16,
        sizes,
        compiled=compiled,
        bound=BF16_BOUND,
        norm_bound=math.inf,
    )


def under_fsdp(
    name: str,
    *recipe: str,
    layout: tuple[str, ...] = (),
    bound: float = BF16_BOUND,
    norm_bound: float = math.inf,
    accum: int = 1,
    compiled: bool = False,
) -> Case:
    """Returns a case of fsdp on two ranks with one more feature."""
    kind = " compiled" if compiled else ""
    return Case(
        f"fsdp with {name}{kind}",
        2,
        ("--sharding_strategy=fsdp", *layout),
        recipe,
        {"dp_shard": 2},
        accum=accum,
        compiled=compiled,
        bound=bound,
        norm_bound=norm_bound,
    )


def features(*, compiled: bool) -> list[Case]:
    """Returns fsdp with each feature: in fp32 where it has a tight bound and runs eagerly."""
    if compiled:
        recipe = BF16
        bound = BF16_BOUND
        norm_bound = math.inf
    else:
        recipe = FP32
        bound = FP32_BOUND
        norm_bound = FP32_NORM_BOUND
    offload = ("--cpu_offload=True",)
    tied = "--tie_embeddings=True"
    documents = "--document_mask=True"
    exact = {"bound": bound, "norm_bound": norm_bound}
    return [
        under_fsdp("accumulation", *recipe, accum=2, compiled=compiled, **exact),
        under_fsdp("cpu_offload", *recipe, layout=offload, compiled=compiled, **exact),
        under_fsdp("bf16_pure", "--precision=bf16_pure", compiled=compiled),
        under_fsdp("float8", "--precision=float8", bound=FLOAT8_BOUND, compiled=compiled),
        # Newton-Schulz runs in bf16: it turns the last bits of gradients into steps of bf16.
        under_fsdp("muon", *BF16, "--optimizer=muon", compiled=compiled),
        under_fsdp("fp16", "--precision=fp16", compiled=compiled),
        under_fsdp("tied embeddings", *recipe, tied, compiled=compiled, **exact),
        under_fsdp("document masks", *recipe, documents, compiled=compiled, **exact),
    ]


ZBV = Case(
    "pp zbv fp32",
    2,
    ("--pp_size=2", "--pp_schedule=zbv"),
    FP32,
    {"pp": 2},
    min_torch=(2, 13),
)


def all_cases() -> list[Case]:
    """Returns every case that runs in a group of ranks, in the order in which they run."""
    cases = list[Case]()
    cases += [in_fp32(layout) for layout in LAYOUTS]
    cases += [in_bf16(layout) for layout in LAYOUTS]
    cases += features(compiled=False)
    cases += [in_fp32(layout) for layout in AXES]
    cases.append(ZBV)
    cases += [in_fp32(layout, compiled=True) for layout in LAYOUTS]
    cases += [in_bf16(layout, compiled=True) for layout in LAYOUTS]
    cases += features(compiled=True)
    cases += [in_bf16(layout, compiled=True) for layout in AXES]
    cases += [in_fp32(layout) for layout in JOINED]
    cases += [in_bf16(layout, compiled=True) for layout in JOINED]
    return sorted(cases, key=lambda case: case.world)  # stable: keeps the order within a world


def references(cases: list[Case]) -> list[Case]:
    """Returns the runs on one rank with which the cases are compared."""
    found = dict[str, Case]()
    for case in cases:
        found.setdefault(case.reference, Case(case.reference, 1, recipe=case.recipe))
    return list(found.values())
