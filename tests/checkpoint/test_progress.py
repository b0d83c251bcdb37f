"""A save with progress on any rank keeps all ranks alive, however long it takes; one without ends them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fms_fsdp.checkpoint import progress, storage
from fms_fsdp.checkpoint.checkpointer import Checkpointer
from fms_fsdp.checkpoint.folders import Checksum, complete_steps
from fms_fsdp.checkpoint.progress import SaveProgress, estimate_save_s
from fms_fsdp.run.health import Watchdog
from tests.checkpoint.test_checkpointer import made, state_of
from tests.distributed.launch import run_ranks

TIMEOUT_S = 3.0


def slowed(function: Callable[..., Any], seconds: float) -> Any:
    return lambda *arguments: (time.sleep(seconds), function(*arguments))[1]


def watched_save(root: str, slowness: str, slow_rank: int, in_background: bool) -> list[int]:
    """Storage is slow on one rank; watchdog and process group give up after 3 s."""
    rank = dist.get_rank()
    model, optimizer = made(0)
    Checkpointer(Path(root) / "imports", attempt=1, in_background=False, committed=print).save(
        state_of(1), model, optimizer, now=True
    )
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), dist.group.WORLD)
    if rank == slow_rank:
        if slowness == "pieces":  # of 512 bytes; an fsync is no excuse
            storage._PIECE, progress.OPERATION_LIMIT_S = 512, 0.0
            Checksum.update = slowed(Checksum.update, 0.03)  # type: ignore[method-assign]
        else:
            seconds = 100 if slowness == "hang" else 5 if rank else 1  # rank 0 syncs six times
            os.fsync = slowed(os.fsync, seconds)
            progress.OPERATION_LIMIT_S = 30.0 if slowness == "fsync" else 1.0
    watchdog = Watchdog(TIMEOUT_S, Path(root) / "stacks", rank, print)
    checkpointer = Checkpointer(
        Path(root),
        attempt=1,
        in_background=in_background,
        committed=lambda step: time.sleep(1),  # as if old checkpoints were deleted
        progress=SaveProgress(watchdog.alive, TIMEOUT_S / 8),
    )
    checkpointer.save(state_of(3), model, optimizer, now=False)
    checkpointer.close()
    dist.barrier()  # the ranks end a save together: no collective of the next step waits for one of them
    watchdog.close()
    return complete_steps(Path(root))


@pytest.mark.parametrize(
    ("slowness", "slow_rank", "in_background"),
    [
        ("fsync", 1, False),
        pytest.param("fsync", 0, True, marks=pytest.mark.slow),
        pytest.param("pieces", 1, True, marks=pytest.mark.slow),
    ],
)
def test_one_rank_whose_save_outlasts_every_timeout_ends_nobody(
    tmp_path: Path, slowness: str, slow_rank: int, in_background: bool
) -> None:
    assert run_ranks(watched_save, 2, str(tmp_path), slowness, slow_rank, in_background) == [[3], [3]]


@pytest.mark.slow
def test_a_save_that_stands_still_ends(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(Exception, match="terminated with exit code 1"):
        run_ranks(watched_save, 2, str(tmp_path), "hang", 1, True)
    assert time.monotonic() - begin < 60 and complete_steps(tmp_path) == []
    stacks = [path.read_text() for path in (tmp_path / "stacks").iterdir()]
    assert stacks and all("no step for" in text and "in wait" in text for text in stacks)


def test_the_time_of_the_first_save_is_estimated_by_a_measured_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a disk that takes 0.1 s for an fsync, and of one that cannot be written at all."""
    monkeypatch.setattr(os, "fsync", slowed(os.fsync, 0.1))
    begin = time.perf_counter()
    estimate = estimate_save_s(tmp_path, 2 << 20)
    spent = time.perf_counter() - begin
    assert 0.6 < estimate <= 6 * spent and not list(tmp_path.iterdir())
    assert estimate_save_s(tmp_path, 1 << 30) > estimate
    assert estimate_save_s(Path("/proc"), 1 << 20) == 0.0
