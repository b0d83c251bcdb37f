"""A launch on several nodes needs one folder that all of them see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.mesh import Mesh
from fms_fsdp.run import claim
from fms_fsdp.runtime import World
from tests.distributed.launch import run_ranks


def refusal(folders: list[str], nodes: int) -> str:
    """What two ranks on so many nodes, each with its folder, are told; "" if nothing."""
    claim._SHOWN_WITHIN_S = 1.0
    rank, world_size = dist.get_rank(), dist.get_world_size()
    world = World(rank, rank if nodes == 1 else 0, world_size, world_size // nodes)
    try:
        claim._check_shared(Path(folders[rank]), world, Mesh(ParallelDims("fsdp", 1, 2), rank, "cpu"))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("nodes", "shared"), [(2, True), (2, False), (1, False)])
def test_nodes_that_do_not_see_one_folder_are_told_alike(nodes: int, shared: bool, tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / ("0" if shared else "1")]
    for folder in set(folders):
        folder.mkdir()
    told = run_ranks(refusal, 2, [str(folder) for folder in folders], nodes)
    if shared or nodes == 1:
        assert told == ["", ""]
    else:
        assert all("must be shared by all nodes, and 1 of them do not see" in text for text in told)
