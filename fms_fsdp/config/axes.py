"""The axes along which a run is divided over ranks, and their sizes. Standard library only.

fms_fsdp/mesh.py says what each axis is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
JOINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "shard": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "row": ("pp", "cp"),
    "losses": ("pp", "dp_replicate", "dp_shard", "cp"),
    "replica": ("pp", "dp_shard", "cp", "tp"),
    "world": AXES,
}


@dataclass(frozen=True)
class ParallelDims:
    """The size of every axis, and how long a shard group holds whole weights and gradients.

    The strategy `none` has no process group. `sequence_parallel`: whether ranks of tp hold parts of the
    sequence between matrices. `virtual_stages`: stages of the pipeline on each rank.
    """

    strategy: str
    dp_replicate: int = 1
    dp_shard: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    reshard_after_forward: bool = True
    sync_each_micro_step: bool = True
    sequence_parallel: bool = False
    virtual_stages: int = 1

    @property
    def keeps_weights(self) -> bool:
        """Whether gathered weights stay to the end of the step. A group of one rank frees gathered weights
        too: the gathered weights are copies in the dtype of products."""
        return not self.reshard_after_forward

    @property
    def divides_model(self) -> bool:
        """Whether ranks share a model or its rows in other ways than FSDP."""
        return self.pp * self.cp * self.tp > 1

    def size(self, axis: str) -> int:
        """How many ranks an axis, or a product of axes, has."""
        return math.prod(getattr(self, part) for part in JOINED.get(axis, (axis,)))

    def place(self, rank: int, axis: str) -> int:
        """The place from 0 on an axis, or a product of axes, of the process with this number in the world."""
        place = 0
        for part in JOINED.get(axis, (axis,)):
            inner = math.prod(getattr(self, name) for name in AXES[AXES.index(part) + 1 :])
            place = place * getattr(self, part) + rank // inner % getattr(self, part)
        return place


def cp_method(method: str, heads: int, tp: int, cp: int) -> str:
    """How attention sees a row that ranks of cp divide: `auto` is ulysses where the query heads of a rank of
    tp can be dealt out over cp, else gather."""
    if method != "auto":
        return method
    return "gather" if heads % (tp * cp) else "ulysses"


def row_multiple(method: str, tp: int, cp: int, sequence_parallel: bool) -> int:
    """The number of which the tokens of a row must be a multiple.

    cp cuts a row into cp parts, or into 2 cp chunks for gather; under sequence parallel tp cuts the part of a
    rank of cp.
    """
    parts = 2 * cp if method == "gather" and cp > 1 else cp
    return math.lcm(parts, cp * tp) if sequence_parallel else parts
