"""The plan of a launch's saves: made by the first save, and used again by the following ones.

DCP plans each save from scratch. Every rank sends a list of its tensors to rank 0, which decides
who writes replicated tensors, sends each rank its plan and everybody the metadata of all shards.
That is seconds of CPU per rank of the world, while the training continues in the same process. But
it depends on the layout of the tensors alone (names, shapes, dtypes, sharding), which a launch does
not change, so after the first save the ranks only confirm that their layout is the same:

                     first save                      following saves
rank → rank 0        its list of tensors             an empty plan
rank 0 → rank        the tensors that it writes      an empty plan
rank → rank 0        positions in its file           nothing, if they are the same
.metadata            pickled                         the same bytes

DCP's own cache (`enable_plan_caching`) keeps the lists of all ranks in memory, for all saves of the
process, and in torch 2.11 also after a save that failed.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from fms_fsdp.checkpoint.index import build_index
from fms_fsdp.checkpoint.metadata import unpickle_metadata

_UNCHANGED = SavePlan([], usable=False)


class LayoutChanged(Exception):
    """Some ranks have other tensors than in the last save, and some have the same."""


@dataclass(frozen=True)
class _Piece:
    """The part of a tensor that a rank may write. Whether its memory is pinned does not matter."""

    index: MetadataIndex
    chunk: ChunkStorageMetadata
    size: torch.Size
    dtype: torch.dtype


@dataclass
class FinishedPlan:
    """The plan of a save that succeeded.

    layout      the tensors of this rank
    plan        the tensors that this rank writes, and the name of its file
    results     their positions in the file
    num_bytes   on rank 0, of the tensors of all ranks
    metadata    on rank 0, the content of `.metadata`
    index       on rank 0, the content of `shards.index`
    """

    layout: list[_Piece] = field(default_factory=list)
    plan: SavePlan = _UNCHANGED
    results: list[WriteResult] = field(default_factory=list)
    num_bytes: int = 0
    metadata: bytes = b""
    index: bytes = b""


class SavePlans:
    """Keeps the plan of the last save of a launch. A save takes the plan and returns its own when it
    succeeds on every rank, so a failed save leaves none behind."""

    def __init__(self) -> None:
        self._last: FinishedPlan | None = None

    def take(self) -> FinishedPlan | None:
        last = self._last
        self._last = None
        return last

    def keep(self, finished: FinishedPlan) -> None:
        self._last = finished


class CachingPlanner(DefaultSavePlanner):
    """Plans a save, or uses the plan of the `last` one if no rank's layout has changed.

    is_reused   on rank 0, whether all ranks use the last plan
    finished    the plan of this save, complete once it has succeeded
    """

    def __init__(self, last: FinishedPlan | None) -> None:
        super().__init__()
        self._last = last
        self.is_reused = False
        self.finished = FinishedPlan()
        self.all_metadata: Metadata | None = None  # on rank 0, unless `is_reused`

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        layout = _layout(plan)
        if self._last is not None and self._last.layout == layout:
            self.finished = self._last
            return _UNCHANGED
        self.finished.layout = layout
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Raises LayoutChanged on every rank if only some of the plans are new."""
        num_new = sum(plan.usable for plan in all_plans)
        if 0 < num_new < len(all_plans):
            raise LayoutChanged(f"{num_new} of {len(all_plans)} ranks have other tensors")
        nothing = Metadata({})  # DCP sends it to every rank, which needs none of it
        if num_new == 0:
            self.is_reused = True
            return all_plans, nothing
        plans, self.all_metadata = super().create_global_plan(all_plans)
        self.finished.num_bytes = sum(_num_bytes(plan) for plan in plans)
        return plans, nothing

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if new_plan.usable:
            self.finished.plan = new_plan
        self.plan = self.finished.plan
        return self.plan

    def changed_results(self, results: list[WriteResult]) -> list[WriteResult]:
        """Returns the positions that rank 0 does not know: none if they are those of the last save."""
        if results == self.finished.results:
            return []
        self.finished.results = results
        return results

    def update_metadata(self, results: list[list[WriteResult]]) -> None:
        """Enters new positions into the metadata of the last save, on rank 0 if `is_reused`."""
        changed = {each.index: each.storage_data for rank in results for each in rank}
        if changed:
            metadata: Any = unpickle_metadata(self.finished.metadata)
            metadata.storage_data |= changed
            self.finished.metadata = pickle.dumps(metadata)
            self.finished.index = build_index(metadata)


def _layout(plan: SavePlan) -> list[_Piece]:
    pieces = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, item.index  # a checkpoint has tensors alone
        pieces.append(_Piece(item.index, data.chunk, data.size, data.properties.dtype))
    return pieces


def _num_bytes(plan: SavePlan) -> int:
    total = 0
    for item in plan.items:
        assert item.tensor_data is not None, item.index
        total += (
            math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        )
    return total
