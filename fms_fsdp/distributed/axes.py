"""The axes of a run and their sizes. Standard library only, for tools that read a config.json.

world = pp x dp_replicate x dp_shard x cp x tp     tp varies fastest, so its ranks share a node

dp       dp_replicate x dp_shard       ranks that read different sequences
shard    dp_shard x cp                 ranks over which FSDP shards
dp_cp    dp x cp                       ranks over which FSDP averages gradients
cp_pp    pp x cp                       ranks that each have a part of the loss of a sequence
dp_cp_pp all but tp                    ranks whose losses are summed (0 without the last stage)
replica  all but dp_replicate          ranks that hold one copy of the model

fsdp, zero1, zero2: dp_shard = D, with D = world / (pp x cp x tp). ddp: dp_replicate = D.
hsdp: dp_shard = s, dp_replicate = D / s. none: one process without a process group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
JOINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "shard": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "cp_pp": ("pp", "cp"),
    "dp_cp_pp": ("pp", "dp_replicate", "dp_shard", "cp"),
    "replica": ("pp", "dp_shard", "cp", "tp"),
    "world": AXES,
}


@dataclass(frozen=True)
class ParallelDims:
    """The size of each axis, and how long FSDP keeps full weights and gradients.

    The strategy `none` has no process group. `reshard_after_forward`: whether gathered weights are
    freed after the forward pass, not the step. `sequence_parallel`: whether the ranks of tp hold
    shards of the sequence between matmuls. `virtual_stages`: pipeline stages per rank.
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
        """Returns whether gathered weights are kept until the end of the step.

        A shard group of one rank frees them too: they are copies in the compute dtype.
        """
        return not self.reshard_after_forward

    @property
    def divides_model(self) -> bool:
        """Returns whether ranks share a model or its sequences in other ways than FSDP."""
        return self.pp * self.cp * self.tp > 1

    def size(self, axis: str) -> int:
        """Returns the number of ranks along an axis or a combination of axes."""
        return math.prod(getattr(self, part) for part in JOINED.get(axis, (axis,)))

    def axis_rank(self, rank: int, axis: str) -> int:
        """Returns the rank along an axis, or a combination of axes, of a rank of the world."""
        place = 0
        for part in JOINED.get(axis, (axis,)):
            inner = math.prod(getattr(self, name) for name in AXES[AXES.index(part) + 1 :])
            place = place * getattr(self, part) + rank // inner % getattr(self, part)
        return place
