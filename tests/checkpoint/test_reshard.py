"""A checkpoint of any number of ranks loads into any other, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fms_fsdp.checkpoint.folders import INDEX, CorruptCheckpoint, corrupt_files, problem
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
from tests.checkpoint.signing import sign
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


def parts_of_rank(source: str) -> tuple[int, int, int]:
    """The stored shards of all tensors and of the embedding that a rank reads about, and of the latter all."""
    mesh = Mesh(ParallelDims("fsdp", dp_shard=dist.get_world_size()), dist.get_rank(), "cpu")
    section = ParallelConfig(use_torch_compile=False)
    cpu = torch.device("cpu")
    model = parallelize(shape(16), section, mesh, device=cpu, precision=Precision(), seed=None)
    folder = Path(source) / "step_3"
    reader = CheckpointReader(folder)
    reader.read_part(collect_tensors(model, None))
    part = reader.read_metadata()
    name = "model.embed.weight"
    every: Any = CheckpointReader(folder).read_metadata().state_dict_metadata
    mine: Any = part.state_dict_metadata
    assert mine.keys() == every.keys() and part.storage_data is not None
    assert not any(mine[each].chunks for each in mine if each.startswith("optimizer."))
    return len(part.storage_data), len(mine[name].chunks), len(every[name].chunks)


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
    for _, mine, every in run_ranks(parts_of_rank, 2, str(folders[-1])):
        assert (mine, every) == (2, 4)


def test_checkpoint_without_table_loads(tmp_path: Path) -> None:
    """An earlier version wrote it; and DCP itself loads one with a table."""
    model, optimizers = made(0)
    write_checkpoint(collect_tensors(model, optimizers), tmp_path, state_of(3))
    folder = tmp_path / "step_3"
    expected = {name: tensor.clone() for name, tensor in collect_tensors(*made(0)).items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    (folder / INDEX).unlink()
    assert problem(folder) == f"{INDEX} is missing"
    sign(folder)
    others = made(1)
    load_checkpoint(folder, *others, is_alone=True)
    found = collect_tensors(*others)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"table", b"header"])
def test_corrupt_table_is_named(tmp_path: Path, content: bytes) -> None:
    """Its checksum is right, as of a file that somebody else made."""
    write_checkpoint(collect_tensors(*made(0)), tmp_path, state_of(3))
    folder = tmp_path / "step_3"
    whole = (folder / INDEX).read_bytes()
    changed = {b"table": whole[:-8], b"header": whole.replace(b'"files": ["', b'"files": ["../')}
    (folder / INDEX).write_bytes(changed.get(content, content))
    sign(folder)
    with pytest.raises(CorruptCheckpoint, match=INDEX):
        load_checkpoint(folder, *made(1), is_alone=True)
