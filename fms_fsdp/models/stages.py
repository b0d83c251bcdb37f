"""The layers of each stage of a pipeline, and the stages of each rank. Nothing is built.

    layers          0 1 2 3 4 5 │ 6 7 8 9 10 │ 11 12 13 14 15 │ 16 17 18 + head
    loop, 2 ranks   rank 0      │ rank 1     │ rank 0         │ rank 1
    V, 2 ranks      rank 0      │ rank 1     │ rank 1         │ rank 0

Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473 (loop); Qi et al. 2023,
https://arxiv.org/abs/2401.10241, section 6 (V).
"""

from __future__ import annotations

import functools
import itertools

from fms_fsdp.models.flops import num_params_by_unit
from fms_fsdp.models.variants import LlamaConfig


@functools.cache
def layers_of_stages(config: LlamaConfig, seq_length: int, num_stages: int) -> tuple[range, ...]:
    """The consecutive layers of each stage, at least one.

    The most expensive stage is as cheap as can be, by the FLOPs of forward and backward; the head counts with
    the last layer. Among such divisions the sum of the squared costs is least, so that the other stages are
    even too.
    """
    assert num_stages <= config.num_layers, (num_stages, config.num_layers)
    costs = _costs_of_layers(config, seq_length)
    sums = list(itertools.accumulate(costs, initial=0))
    limit = _least_limit(costs, num_stages)
    # of the first i layers: the least sum of squares, and where the last stage begins
    best: list[tuple[float, int]] = [(0, 0)] + [(float("inf"), 0)] * len(costs)
    begins: list[list[int]] = []
    for _ in range(num_stages):
        found: list[tuple[float, int]] = [(float("inf"), 0)] * len(best)
        for end in range(1, len(best)):
            for begin in range(end - 1, -1, -1):
                if (cost := sums[end] - sums[begin]) > limit:
                    break
                found[end] = min(found[end], (best[begin][0] + cost * cost, begin))
        begins.append([begin for _, begin in found])
        best = found
    stages, end = list[range](), len(costs)
    for begin_of in reversed(begins):
        stages.insert(0, range(begin_of[end], end))
        end = begin_of[end]
    return tuple(stages)


def _costs_of_layers(config: LlamaConfig, seq_length: int) -> list[int]:
    """FLOPs for one token of each layer, the head with the last. A lookup in the embedding costs nothing."""
    block = 6 * num_params_by_unit(config)["block"]
    q_size = config.num_attention_heads * config.head_dim
    costs = [
        block + 12 * q_size * min(window or seq_length, seq_length) for window in config.windows
    ]
    costs[-1] += 6 * config.hidden_size * config.vocab_size
    return costs


def _least_limit(costs: list[int], num_stages: int) -> int:
    """The least cost such that stages of at most that cost, as many as given, hold all layers."""
    low, high = max(costs), sum(costs)
    while low < high:
        limit, stages, filled = (low + high) // 2, 1, 0
        for cost in costs:
            filled += cost
            if filled > limit:
                stages, filled = stages + 1, cost
        low, high = (low, limit) if stages <= num_stages else (limit + 1, high)
    return low


def stages_of_rank(rank: int, num_ranks: int, stages_per_rank: int, schedule: str) -> list[int]:
    """The stages of a rank of the pipeline, in order: a V for the schedule `zbv`, else a loop."""
    if schedule == "zbv":
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank + turn * num_ranks for turn in range(stages_per_rank)]
