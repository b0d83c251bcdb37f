"""A checkpoint of any number of ranks loads into any other, to the last bit."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from fms_fsdp.checkpoint.folders import corrupt_files, problem
from fms_fsdp.checkpoint.io import (
    CheckpointReader,
    collect_tensors,
    load_checkpoint,
    load_tensor,
    write_checkpoint,
)
from fms_fsdp.config import OptimConfig, ParallelConfig, Precision
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.optim.optimizers import build_optimizers
from fms_fsdp.parallel.parallelize import parallelize
from tests.checkpoint.test_checkpointer import made, shape, state_of
from tests.distributed.launch import run_ranks


def resave(source: str, target: str) -> int:
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = Mesh(ParallelDims("fsdp", dp_shard=size), rank, "cpu")
    parallel = ParallelConfig(use_torch_compile=False)
    model = parallelize(
        shape(16), parallel, mesh, device=torch.device("cpu"), precision=Precision(), seed=rank
    )
    optimizers = build_optimizers(OptimConfig(), model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(lambda base: base, torch.tensor(1.0))
    load_checkpoint(Path(source) / "step_3", model, optimizers, is_alone=False)
    group = dist.new_group(backend="gloo")
    write_checkpoint(collect_tensors(model, optimizers), Path(target), state_of(3), group=group)
    return len(list((Path(target) / "step_3").glob("*.distcp")))


def test_resharding_keeps_every_bit(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "two", "one", "four")]
    for folder in folders:
        folder.mkdir()
    write_checkpoint(collect_tensors(*made(0, 16)), folders[0], state_of(3))
    for ranks, source, target in zip((2, 1, 4), folders, folders[1:], strict=False):
        found = run_ranks(resave, ranks, str(source), str(target))
        assert found == [ranks] * ranks
        assert not problem(target / "step_3") and not corrupt_files(target / "step_3")
    first, last = (CheckpointReader(folder / "step_3") for folder in (folders[0], folders[-1]))
    names = first.read_metadata().state_dict_metadata.keys()
    assert names == last.read_metadata().state_dict_metadata.keys() and len(names) > 20
    assert all(torch.equal(load_tensor(first, name), load_tensor(last, name)) for name in names)
