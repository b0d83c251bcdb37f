"""What the start line says of each axis is what a step sends, within 2 %."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fms_fsdp.config import BatchPlan, OptimConfig, ParallelConfig
from fms_fsdp.data.batch import Batch
from fms_fsdp.mesh import Mesh
from fms_fsdp.observe.metrics import Clock
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.parallelize import parallelize
from fms_fsdp.predict.communication import bytes_sent
from fms_fsdp.predict.shares import axis_bytes, share_of
from fms_fsdp.state import Progress, TrainState
from fms_fsdp.train import TrainStep, train_step
from tests.distributed.launch import run_ranks
from tests.parallel.layouts import CPU, ROWS, SHAPE, Case, mesh_of, rows_of

SEQ = 256
WIDE = dict(hidden_size=128, ffn_hidden_size=256, vocab_size=512, max_seq_len=SEQ)
CASES = {
    "tp x fsdp": Case(dict(tp_size=2)),
    "tp without sequence": Case(dict(tp_size=2, sequence_parallel=False)),
    "tp recomputing": Case(dict(tp_size=2), common=dict(recompute="blocks"), accum=2),
    "pp x tp": Case(dict(tp_size=2, pp_size=2)),
    "pp x fsdp": Case(dict(pp_size=2, pp_schedule="interleaved")),
    "cp x fsdp": Case(dict(cp_size=2)),
    "cp gather x fsdp": Case(dict(cp_size=2, cp_method="gather")),
    "cp x tp": Case(dict(cp_size=2, tp_size=2), common=dict(recompute="blocks")),
}
MESSAGES = {  # operation → whether its first tensor is a part, not the whole; times that a rank sends it
    "all_gather_into_tensor": (True, 1),
    "reduce_scatter_tensor": (False, 1),
    "all_reduce": (False, 2),
    "all_reduce_": (False, 2),
    "all_to_all_single": (False, 1),
}


class Sent(TorchDispatchMode):
    """Counts the bytes of messages over the groups of the axes, each at the least that it takes."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.sent = dict[str, float]()
        fsdp, names = mesh.fsdp_mesh, ("dp_replicate", "cp", "tp", "pp")
        assert fsdp is not None
        groups = {axis: mesh._groups[axis] for axis in names if mesh.size(axis) > 1}
        groups["shard" if mesh.size("cp") > 1 else "dp_shard"] = fsdp.get_group(fsdp.ndim - 1)
        self._axes = {
            group.group_name: (axis, group.size()) for axis, group in groups.items() if group is not None
        }

    def _count(self, group_name: str, nbytes: float, times: int = 1) -> None:
        if group_name in self._axes:
            axis, size = self._axes[group_name]
            self.sent[axis] = self.sent.get(axis, 0) + times * nbytes * (size - 1) / size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if space == "_c10d_functional" and name in MESSAGES:
            is_part, times = MESSAGES[name]
            group_name = args[-1]
            size = self._axes.get(group_name, ("", 1))[1]
            self._count(group_name, args[0].nbytes * (size if is_part else 1), times)
        elif space == "c10d" and name in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "send"):
            handles = (each for each in args if isinstance(each, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(next(handles))
            if name == "send":
                axis, _ = self._axes.get(group.group_name, ("", 0))
                self.sent[axis] = self.sent.get(axis, 0) + sum(each.nbytes for each in args[0])
            elif name == "allreduce_":
                self._count(group.group_name, args[0][0].nbytes, 2)
            else:
                self._count(group.group_name, args[0 if name == "_allgather_base_" else 1].nbytes)
        return func(*args, **(kwargs or {}))


def measured(case: Case) -> tuple[dict[str, float], dict[str, int]]:
    """Bytes that this rank sent in a step by axis, and those that were predicted (collective)."""
    section = ParallelConfig(**{**case.common, **case.flags})
    config, mesh = replace(SHAPE, **WIDE), mesh_of(section)
    model = parallelize(config, section, mesh, device=CPU, precision=case.precision, seed=5)
    rows = ROWS // mesh.size("dp")
    batch = BatchPlan(rows // case.accum, case.accum, mesh.size("dp"))
    rate: Any = lambda *_: 1e-3  # noqa: E731
    recipe = TrainStep(mesh, CPU, rate, batch.batch_size, 1.0, False)
    nothing: Any = None
    state = TrainState(model, build_optimizers(OptimConfig(), model), nothing, Progress(0, 2))
    first = mesh.place("dp") * rows
    columns = Batch(*(column[first : first + rows].repeat(1, SEQ // 16) for column in rows_of(0, config)))
    train_step(recipe, state, columns, Clock(CPU))
    with Sent(mesh) as counted:
        train_step(recipe, state, columns, Clock(CPU))
    dims, place = mesh.dims, mesh.place("pp")
    predicted = axis_bytes(config, dims, section, case.precision, batch, SEQ, place)
    share = share_of(config, dims, section, place)
    return counted.sent, predicted | bytes_sent(config, dims, case.precision, case.accum, share)


def all_measured() -> dict[str, tuple[dict[str, float], dict[str, int]]]:
    return {name: measured(case) for name, case in CASES.items()}


def test_bytes_of_every_axis_are_those_predicted() -> None:
    for found in run_ranks(all_measured, 4):
        for name, (sent, predicted) in found.items():
            counted = {axis: size for axis, size in sent.items() if axis and size}
            assert counted.keys() == predicted.keys(), (name, counted, predicted)
            assert counted == pytest.approx(predicted, rel=0.02), name
