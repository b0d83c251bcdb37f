"""A stream of a user's own, as `--dataset_builder=tests.data.custom_stream:build` finds it."""

from __future__ import annotations

from typing import Any

import torch

from fms_fsdp.config import DataConfig
from fms_fsdp.data.batch import Batch


class Counting:
    """Rows that count upward from a number that depends on step and row."""

    def __init__(self, seq_length: int, vocab_size: int, rows: range, stride: int) -> None:
        self.seq_length, self.vocab_size, self.rows, self.stride, self.step = (
            seq_length,
            vocab_size,
            rows,
            stride,
            0,
        )

    def next_batch(self) -> Batch:
        self.step += 1
        start_B1 = torch.tensor([[self.step * 31 + row * 7] for row in self.rows])
        tokens = (start_B1 + self.stride * torch.arange(self.seq_length + 1)) % self.vocab_size
        positions = torch.arange(self.seq_length, dtype=torch.int32).expand(len(self.rows), -1)
        return Batch(tokens[:, :-1], tokens[:, 1:], positions, torch.zeros_like(positions))

    def state_dict(self) -> dict[str, Any]:
        return {"stride": self.stride}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        assert state == self.state_dict()
        self.step = step

    def close(self) -> None:
        pass


def build(
    section: DataConfig,
    *,
    seed: int,
    vocab_size: int,
    global_batch_size: int,
    dp_rank: int,
    dp_size: int,
    pin_memory: bool,
    stride: str = "1",
) -> Counting:
    rows = global_batch_size // dp_size
    return Counting(
        section.seq_length, vocab_size, range(dp_rank * rows, (dp_rank + 1) * rows), int(stride)
    )
