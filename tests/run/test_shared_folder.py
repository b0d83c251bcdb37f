"""A launch on several nodes needs one folder that all of them see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from fms_fsdp.distributed.runtime import World
from fms_fsdp.run.run_dir import check_shared
from tests.distributed.launch import run_ranks


def error_of(folders: list[str], num_nodes: int) -> str:
    """Returns the error that a rank of two, each with its folder, raises; "" if none."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    world = World(rank, rank if num_nodes == 1 else 0, world_size, world_size // num_nodes)
    try:
        check_shared(Path(folders[rank]), world, timeout_s=1.0)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("nodes", "shared"), [(2, True), (2, False), (1, False)])
def test_nodes_without_a_shared_folder_are_rejected(
    nodes: int, shared: bool, tmp_path: Path
) -> None:
    folders = [tmp_path / "0", tmp_path / ("0" if shared else "1")]
    for folder in set(folders):
        folder.mkdir()
    errors = run_ranks(error_of, 2, [str(folder) for folder in folders], nodes)
    if shared or nodes == 1:
        assert errors == ["", ""]
    else:
        assert all(
            "must be shared by all nodes, but 1 of 2 ranks do not see" in text for text in errors
        )
