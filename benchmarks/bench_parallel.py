"""Measures layouts of the five axes on processes of this machine, and writes one result file.

    python benchmarks/bench_parallel.py [--world=8] [--device=cpu|cuda] [--steps=10] [--output=FILE]

Each layout of a world trains the same small model in fp32, and one process does too. The table has
for each layout: the median time of a step; the bytes that a rank sends in a step by axis, as counted at the
collectives (the largest of the ranks), as predicted by `estimate`, and the worst ratio of a rank; the growth
of the peak memory of the rank that holds most, beside the prediction; the largest differences of loss and
gradient norm (relative) to one process over the steps. The group is gloo on a CPU, NCCL on GPUs.

Ranks share the cores of a machine without GPUs: the seconds are no measure of how the work would divide over
machines.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from result_file import about_machine, parser_of, write_result
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent.parent))
if TYPE_CHECKING:
    from fms_fsdp.distributed.mesh import Mesh

SMALL: dict[str, Any] = dict(
    num_layers=8, hidden_size=256, ffn_hidden_size=512, num_attention_heads=8, num_kv_heads=4
)
TOKENS, ROWS, WORDS = 128, 8, 4096  # of a row; of a step; of the vocabulary
FSDP = {"sharding_strategy": "fsdp"}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"tp2": dict(tp_size=2), "cp2": dict(cp_size=2), "pp2": dict(pp_size=2), "fsdp2": FSDP},
    4: {
        "pp2 x tp2": dict(pp_size=2, tp_size=2),
        "pp2 x cp2": dict(pp_size=2, cp_size=2),
        "pp2 x fsdp2": FSDP | dict(pp_size=2),
        "cp2 x tp2": dict(cp_size=2, tp_size=2),
        "cp2 x fsdp2": FSDP | dict(cp_size=2),
        "tp2 x fsdp2": FSDP | dict(tp_size=2),
        "tp4": dict(tp_size=4),
        "cp4 gather": dict(cp_size=4, cp_method="gather"),
        "pp4": dict(pp_size=4),
    },
    8: {
        "pp2 x tp2 x fsdp2": FSDP | dict(pp_size=2, tp_size=2),
        "pp2 x cp2 x tp2": dict(pp_size=2, cp_size=2, tp_size=2),
        "pp2 x cp2 x fsdp2": FSDP | dict(pp_size=2, cp_size=2),
        "cp2 x tp2 x fsdp2": FSDP | dict(cp_size=2, tp_size=2),
        "cp2 gather x tp2 x hsdp2": dict(
            cp_size=2, cp_method="gather", tp_size=2, sharding_strategy="hsdp", hsdp_shard_size=1
        ),
        "pp4 interleaved x tp2": dict(pp_size=4, pp_schedule="interleaved", tp_size=2),
        "tp8, key/value heads copied": dict(tp_size=8),
        "cp8": dict(cp_size=8),
    },
}
ALONE = "one process"
MESSAGES = {  # operation → whether its first tensor is a part, not the whole; times that a rank sends it
    "all_gather_into_tensor": (True, 1),
    "reduce_scatter_tensor": (False, 1),
    "all_reduce": (False, 2),
    "all_reduce_": (False, 2),
    "all_to_all_single": (False, 1),
}


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts in `sent` the bytes of messages over the groups of the axes, each at the least that it takes.

    Where the ranks of cp are those of FSDP too, both have one group: cp sends by functional operations.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent = dict[str, float]()
        fsdp, names = mesh.fsdp_mesh, ("dp_replicate", "cp", "tp", "pp")
        assert fsdp is not None
        groups = {axis: mesh._groups[axis] for axis in names if mesh.size(axis) > 1}
        groups["shard" if mesh.size("cp") > 1 else "dp_shard"] = fsdp.get_group(fsdp.ndim - 1)
        names_of = {
            axis: (group.group_name, group.size())
            for axis, group in groups.items()
            if group is not None
        }
        self._axes = {name: (axis, size) for axis, (name, size) in names_of.items()}
        self._functional = {name: (axis, size) for axis, (name, size) in reversed(names_of.items())}

    def _count(
        self, axes: Mapping[Any, tuple[str, int]], name: str, nbytes: float, times: int = 1
    ) -> None:
        if name in axes:
            axis, size = axes[name]
            self.sent[axis] = self.sent.get(axis, 0) + times * nbytes * (size - 1) / size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if space == "_c10d_functional" and name in MESSAGES:
            is_part, times = MESSAGES[name]
            group_name = args[-1]
            size = self._functional.get(group_name, ("", 1))[1]
            self._count(
                self._functional, group_name, args[0].nbytes * (size if is_part else 1), times
            )
        elif space == "c10d" and name in (
            "_allgather_base_",
            "_reduce_scatter_base_",
            "allreduce_",
            "send",
        ):
            handles = (each for each in args if isinstance(each, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(next(handles))
            if name == "send":
                axis, _ = self._axes.get(group.group_name, ("", 0))
                self.sent[axis] = self.sent.get(axis, 0) + sum(each.nbytes for each in args[0])
            elif name == "allreduce_":
                self._count(self._axes, group.group_name, args[0][0].nbytes, 2)
            else:
                self._count(
                    self._axes,
                    group.group_name,
                    args[0 if name == "_allgather_base_" else 1].nbytes,
                )
        return func(*args, **(kwargs or {}))


def train_layout(
    rank: int, options: argparse.Namespace, flags: Mapping[str, Any]
) -> dict[str, Any]:
    """What one rank finds in the layout (collective): losses, norms and seconds of the steps, memory, and the
    bytes of one more step, counted and predicted."""
    from fms_fsdp.config import FP32, ParallelConfig
    from fms_fsdp.distributed.dims import plan_dims
    from fms_fsdp.distributed.mesh import Mesh
    from fms_fsdp.distributed.world import World
    from fms_fsdp.models.config import TransformerConfig
    from fms_fsdp.predict.memory import Step, estimate_memory
    from fms_fsdp.predict.meter import ModelSetup

    world = dist.get_world_size() if dist.is_initialized() else 1
    section = ParallelConfig(use_torch_compile=False, matmul_precision="highest", **flags)
    mesh = Mesh(plan_dims(section, "tiny", World(rank, rank, world, world)), rank, options.device)
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", rank)
    config = TransformerConfig(**SMALL, vocab_size=WORDS, max_seq_len=TOKENS)
    _train(
        replace(config, hidden_size=64, ffn_hidden_size=64), section, mesh, device, 1
    )  # loads libraries
    gc.collect()
    peak = _growth(device)
    found = _train(config, section, mesh, device, options.steps)
    dims, rows = mesh.dims, ROWS // mesh.size("dp")
    shape = ModelSetup(config, section, FP32, dims, TOKENS, False, options.device)
    need = estimate_memory(Step(shape, rows, 1))
    found |= {"peak_mib": peak(), "predicted_mib": need.total / 2**20}
    if world > 1:
        with Sent(mesh) as counted:
            found.pop("one_more")()
        found["counted"] = {axis: size for axis, size in counted.sent.items() if axis and size}
        found["predicted"] = _predicted(Step(shape, rows, 1), mesh)
    return {name: value for name, value in found.items() if name != "one_more"}


def _train(
    config: Any, section: Any, mesh: Mesh, device: torch.device, steps: int
) -> dict[str, Any]:
    """Losses, norms and the median time of the steps, and a function for one more (collective)."""
    from fms_fsdp.config import FP32, OptimConfig
    from fms_fsdp.metrics.interval import IntervalMetrics
    from fms_fsdp.metrics.timer import PhaseTimer
    from fms_fsdp.optim.optimizers import build_optimizers
    from fms_fsdp.parallel.parallelize import parallelize
    from fms_fsdp.state import TrainState
    from fms_fsdp.train import StepSettings, train_step

    nothing: Any = None
    model = parallelize(config, section, mesh, device=device, precision=FP32, seed=1)
    schedule: Any = _rate
    settings = StepSettings(mesh, device, schedule, ROWS // mesh.size("dp"), 1.0, False)
    state = TrainState(model, build_optimizers(OptimConfig(), model), nothing, steps + 1)
    losses, norms, seconds = list[float](), list[float](), list[float]()
    for step in range(steps):
        start = time.perf_counter()
        result = train_step(settings, state, _rows(step, mesh), PhaseTimer(device))
        interval = IntervalMetrics(mesh, device)
        interval.add(result)
        values = interval.read(result, 0.0, 0, {})
        seconds.append(time.perf_counter() - start)
        losses.append(values["loss"])
        norms.append(values["grad_norm"])
        state.count(ROWS, ROWS * TOKENS)
    one_more = partial(train_step, settings, state, _rows(steps, mesh), PhaseTimer(device))
    return {
        "losses": losses,
        "norms": norms,
        "step_ms": 1000 * statistics.median(seconds),
        "one_more": one_more,
    }


def _rate(step: int, tokens: int, base: float) -> float:
    """A warm-up, as runs have: a large rate from the first step on makes more of each rounding."""
    return 3e-5 * step


def _predicted(step: Any, mesh: Mesh) -> dict[str, int]:
    """Bytes that this rank should send in a step, by axis."""
    from fms_fsdp.predict.speed import rank_cost, sent_by

    place = mesh.axis_rank("pp")
    return dict(sent_by(step, place, rank_cost(step.setup, place, step.micro_batch)))


def _rows(step: int, mesh: Mesh) -> Any:
    """This rank's rows of the global batch of a step."""
    from fms_fsdp.data.batch import Batch

    tokens = torch.randint(WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))
    rows = ROWS // mesh.size("dp")
    own = slice(mesh.axis_rank("dp") * rows, (mesh.axis_rank("dp") + 1) * rows)
    positions = torch.arange(TOKENS, dtype=torch.int32).expand(rows, TOKENS)
    return Batch(tokens[own], tokens.roll(-1, 1)[own], positions, torch.zeros_like(positions))


def _growth(device: torch.device) -> Callable[[], float]:
    """A function that tells by how many MiB the peak of this process's memory has grown since this call."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        return lambda: (torch.cuda.max_memory_allocated() - held) / 2**20
    before = _resident_mib("VmRSS")
    return lambda: _resident_mib("VmHWM") - before


def _resident_mib(field: str) -> float:
    """A field of this process's memory: VmRSS now, VmHWM at most."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.partition(f"{field}:")[2].split()[0]) / 1024


def measure_layouts(options: argparse.Namespace) -> dict[str, Any]:
    """Every layout of the world, and one process, in processes of its own; prints a row as each ends."""
    alone = on_ranks(
        partial(train_layout, options=options, flags={"sharding_strategy": "none"}), 1, options
    )
    print("| layout | step, ms | sent by a rank in a step, MiB | counted / predicted | ", end="")
    print("peak, MiB | predicted | Δ loss | Δ norm |\n|---|---|---|---|---|---|---|---|")
    found = {ALONE: _summary(alone, alone)}
    print(_row(ALONE, found[ALONE]), flush=True)
    for name, flags in LAYOUTS[options.world].items():
        by_rank = on_ranks(
            partial(train_layout, options=options, flags=flags), options.world, options
        )
        found[name] = _summary(by_rank, alone)
        print(_row(name, found[name]), flush=True)
    pairs = list(combinations((each for name, each in found.items() if name != ALONE), 2))
    alike = [
        (a["peak_mib"] > b["peak_mib"]) == (a["predicted_mib"] > b["predicted_mib"])
        for a, b in pairs
        if a["predicted_mib"] != b["predicted_mib"]
    ]
    print(f"pairs of layouts whose peaks are in the predicted order: {sum(alike)} of {len(alike)}")
    model = SMALL | {
        "vocab_size": WORDS,
        "row_tokens": TOKENS,
        "rows": ROWS,
        "steps": options.steps,
    }
    return {
        "world": options.world,
        "model": model,
        "layouts": found,
        "pairs_in_order": [sum(alike), len(alike)],
    }


def _summary(by_rank: list[dict[str, Any]], alone: list[dict[str, Any]]) -> dict[str, Any]:
    """What the table shows of a layout."""
    first, wanted = by_rank[0], alone[0]
    ratios: dict[str, list[float]] = {
        axis: [
            each["counted"][axis] / each["predicted"][axis]
            for each in by_rank
            if axis in each["counted"]
        ]
        for axis in sorted({axis for each in by_rank for axis in each.get("counted", ())})
    }
    most = {
        kind: {axis: max(each[kind].get(axis, 0) for each in by_rank) for axis in ratios}
        for kind in ("counted", "predicted")
    }
    missed = [
        each
        for each in by_rank
        if each.get("counted", {}).keys() != each.get("predicted", {}).keys()
    ]
    assert not missed, missed
    return {
        "step_ms": round(statistics.median(each["step_ms"] for each in by_rank), 1),
        "bytes_counted": most["counted"],
        "bytes_predicted": most["predicted"],
        "worst_ratio": {axis: round(_worst(some), 4) for axis, some in ratios.items()},
        "peak_mib": round(max(each["peak_mib"] for each in by_rank), 1),
        "predicted_mib": round(first["predicted_mib"], 1),
        "loss_difference": max(
            abs(a - b) for a, b in zip(first["losses"], wanted["losses"], strict=True)
        ),
        "norm_difference": max(
            abs(a / b - 1) for a, b in zip(first["norms"], wanted["norms"], strict=True)
        ),
        "losses": first["losses"],
        "norms": first["norms"],
    }


def _worst(ratios: list[float]) -> float:
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def _row(name: str, found: Mapping[str, Any]) -> str:
    sent = ", ".join(f"{axis} {size / 2**20:.2f}" for axis, size in found["bytes_counted"].items())
    ratios = ", ".join(f"{axis} {ratio:.3f}" for axis, ratio in found["worst_ratio"].items())
    differences = f"{found['loss_difference']:.1e} | {found['norm_difference']:.1e}"
    memory = f"{found['peak_mib']:.0f} | {found['predicted_mib']:.0f}"
    return f"| {name} | {found['step_ms']:.0f} | {sent} | {ratios} | {memory} | {differences} |"


def on_ranks(work: Callable[..., Any], world: int, options: argparse.Namespace) -> list[Any]:
    """What `work` gives on each rank of a group of new processes, forks of one that has imported torch."""
    context = multiprocessing.get_context("forkserver" if options.device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(world) as pool:
        tasks = [(work, rank, world, options.device, folder) for rank in range(world)]
        found = dict(pool.imap_unordered(_of_rank, tasks))  # fails with the first rank that does
    return [found[rank] for rank in range(world)]


def _of_rank(task: tuple[Callable[..., Any], int, int, str, str]) -> tuple[int, Any]:
    work, rank, world, device, folder = task
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    if world > 1:
        store = dist.FileStore(f"{folder}/store", world)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    found = work(rank)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    return rank, found


def main() -> None:
    parser = parser_of(__doc__, world=0, device="cpu", steps=10)
    options = parser.parse_args()
    limit = torch.cuda.device_count() if options.device == "cuda" else max(LAYOUTS)
    worlds = [world for world in LAYOUTS if world <= limit]
    options.world = options.world or max(worlds, default=2)
    if options.world not in worlds:
        parser.error(f"--world must be one of 2, 4 and 8, and at most {limit} on this machine")
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed.fsdp", "fms_fsdp.train"])
    about = about_machine()
    write_result(about | measure_layouts(options), options.output)


if __name__ == "__main__":
    main()
