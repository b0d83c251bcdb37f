"""Saves after the first use its plan: exact, and never the plan of a save that failed."""

from __future__ import annotations

import errno
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from fms_fsdp.checkpoint import io
from fms_fsdp.checkpoint.folders import METADATA, corrupt_files, problem
from fms_fsdp.checkpoint.io import (
    CheckpointReader,
    SaveFailed,
    Tensors,
    collect_tensors,
    load_tensor,
    write_checkpoint,
)
from fms_fsdp.checkpoint.plans import CachingPlanner, FinishedPlan, SavePlans
from fms_fsdp.config import OptimConfig, ParallelConfig, Precision
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.dtensor import local_shard
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.parallelize import parallelize
from tests.checkpoint.test_checkpointer import made, shape, state_of
from tests.distributed.launch import run_ranks

RANKS = 3


class Saver:
    """Saves the shards of a rank; `num_planned` counts the plans that are made, not reused."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.rank = dist.get_rank()
        mesh = Mesh(ParallelDims("fsdp", dp_shard=dist.get_world_size()), self.rank, "cpu")
        section = ParallelConfig(use_torch_compile=False)
        cpu = torch.device("cpu")
        model = parallelize(shape(16), section, mesh, device=cpu, precision=Precision(), seed=1)
        optimizers = build_optimizers(OptimConfig(), model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizers.step(lambda base: base, torch.tensor(1.0))
        self.full = collect_tensors(model, optimizers)
        self.weights = collect_tensors(model, None)
        self.group = dist.new_group(backend="gloo")
        self.plans = SavePlans()
        self.num_planned = 0
        make_plan = CachingPlanner.create_local_plan

        def count(planner: CachingPlanner) -> Any:
            plan = make_plan(planner)
            self.num_planned += plan.usable
            return plan

        CachingPlanner.create_local_plan = count  # type: ignore[method-assign]

    def save(self, step: int, tensors: Tensors | None = None) -> None:
        """Saves values that each step has alone."""
        for number, tensor in enumerate(self.full.values()):
            local_shard(tensor).fill_(100 * step + number)
        given = self.full if tensors is None else tensors
        write_checkpoint(given, self.root, state_of(step), group=self.group, plans=self.plans)


def check(root: Path, step: int, names: list[str]) -> None:
    """Every tensor of a step has the values that `Saver.save` saved."""
    folder = root / f"step_{step}"
    assert not problem(folder) and not corrupt_files(folder)
    reader = CheckpointReader(folder)
    assert set(reader.read_metadata().state_dict_metadata) <= set(names)
    for number, name in enumerate(names):
        if name in reader.read_metadata().state_dict_metadata:
            assert (load_tensor(reader, name) == 100 * step + number).all(), (step, name)


def save_kinds(root: str) -> tuple[list[int], list[str]]:
    saver = Saver(root)
    planned = []
    for step, tensors in enumerate([None, None, saver.weights, saver.weights, None, None], 1):
        saver.save(step, tensors)
        planned.append(saver.num_planned)
    # One rank has other tensors: the plan of the others is made again too.
    spare = dict(reversed(saver.full.items())) if saver.rank == 1 else None
    saver.save(7, spare)
    return planned, list(saver.full)


@pytest.mark.slow
def test_plan_is_made_once_per_kind(tmp_path: Path) -> None:
    (planned, names), *others = run_ranks(save_kinds, RANKS, str(tmp_path))
    assert planned == [1, 1, 2, 2, 3, 3] and all(other[0] == planned for other in others)
    for step in range(1, 8):
        check(tmp_path, step, names)
    metadata = [(tmp_path / f"step_{step}" / METADATA).read_bytes() for step in range(1, 7)]
    assert metadata[0] == metadata[1] == metadata[4] == metadata[5]
    assert metadata[2] == metadata[3] != metadata[0]
    with open(tmp_path / "step_2" / METADATA, "rb") as file:  # DCP's own, which any reader opens
        assert set(pickle.load(file).state_dict_metadata) == set(names)


def save_after_failure(root: str, failing: int) -> tuple[int, list[str]]:
    """The save of step `failing` meets an error on one rank."""
    saver = Saver(root)
    write = io._Writer.write_data

    def write_or_fail(writer: io._Writer, *args: Any) -> Any:
        if writer._metadata.step == failing and saver.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(writer, *args)

    io._Writer.write_data = write_or_fail  # type: ignore[method-assign]
    for step in range(1, 4):
        try:
            saver.save(step)
            assert step != failing
        except SaveFailed as error:
            assert step == failing and "rank 1: " in str(error)
    return saver.num_planned, list(saver.full)


@pytest.mark.parametrize("failing", [1, 2])
def test_failed_save_leaves_no_plan(tmp_path: Path, failing: int) -> None:
    (num_planned, names), *_ = run_ranks(save_after_failure, RANKS, str(tmp_path), failing)
    assert num_planned == 2
    for step in {1, 2, 3} - {failing}:
        check(tmp_path, step, names)
    assert not (tmp_path / f"step_{failing}").exists()


def test_runs_of_one_process_share_no_plan(tmp_path: Path) -> None:
    """Nothing outlives a launch: the second run has a larger model."""
    for width in (8, 16):
        root = tmp_path / str(width)
        root.mkdir()
        tensors = collect_tensors(*made(0, width))
        plans = SavePlans()
        for step in (1, 2):
            write_checkpoint(tensors, root, state_of(step), plans=plans)
            reader = CheckpointReader(root / f"step_{step}")
            assert all(torch.equal(load_tensor(reader, name), tensors[name]) for name in tensors)


def test_disk_is_checked_before_reused_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = collect_tensors(*made(0))
    plans = SavePlans()
    write_checkpoint(tensors, tmp_path, state_of(1), plans=plans)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    monkeypatch.setattr(io, "free_bytes", lambda path: num_bytes - 1)
    with pytest.raises(SaveFailed, match=r"it needs .* of disk space, and .* is free"):
        write_checkpoint(tensors, tmp_path, state_of(2), plans=plans)
    assert not list((tmp_path / "step_2.partial-1").glob("*.distcp"))
    monkeypatch.setattr(io, "free_bytes", lambda path: num_bytes)
    write_checkpoint(tensors, tmp_path, state_of(3), plans=plans)


def test_moved_tensors_of_reused_plan_are_recorded(tmp_path: Path) -> None:
    """A file whose tensors are in other positions than in the last save."""
    tensors = collect_tensors(*made(0))
    plans = SavePlans()
    write_checkpoint(tensors, tmp_path, state_of(1), plans=plans)
    last = plans.take()
    assert isinstance(last, FinishedPlan)
    last.plan.items.reverse()
    plans.keep(last)
    for step in (2, 3):
        write_checkpoint(tensors, tmp_path, state_of(step), plans=plans)
        reader = CheckpointReader(tmp_path / f"step_{step}")
        assert all(torch.equal(load_tensor(reader, name), tensors[name]) for name in tensors)
    first, second = ((tmp_path / f"step_{step}" / METADATA).read_bytes() for step in (1, 2))
    assert first != second


def test_save_does_without_changed_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 enters the places of tensors into a copy: no checkpoint could be written."""
    finish = FileSystemWriter.finish

    def finish_copy(self: FileSystemWriter, metadata: Metadata, results: Any) -> None:
        finish(self, replace(metadata), results)

    monkeypatch.setattr(FileSystemWriter, "finish", finish_copy)
    model, optimizers = made(0)
    write_checkpoint(collect_tensors(model, optimizers), tmp_path, state_of(1))
    folder = tmp_path / "step_1"
    assert not problem(folder)
    reader = CheckpointReader(folder)
    for name, weight in model.named_parameters():
        assert torch.equal(load_tensor(reader, f"model.{name}"), weight)
