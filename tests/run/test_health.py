"""Spikes of the loss, and the thread that ends a process that hangs."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fms_fsdp.config import TrainConfig, TrainingConfig
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.mesh import Mesh
from fms_fsdp.distributed.runtime import HostCopy
from fms_fsdp.errors import RunFailed
from fms_fsdp.logs import rank_log
from fms_fsdp.metrics.interval import SpikeDetector
from fms_fsdp.run import status
from fms_fsdp.run.health import NonFiniteGuard, Watchdog
from fms_fsdp.state import TrainState
from tests.states import bare_state


def test_spike_stands_out_of_recent_losses() -> None:
    noise = random.Random(1)
    detector = SpikeDetector(6.0)
    assert not any(detector.is_spike(3 + noise.gauss(0, 0.1)) for _ in range(40))
    assert [detector.is_spike(loss) for loss in (3.3, 5.0, 5.0, float("nan"), 3.1)] == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_first_reports_are_no_spikes() -> None:
    """Half a hundredth of the mean counts as the width of equal losses."""
    for reports, found in ((19, False), (20, True)):
        detector = SpikeDetector(6.0)
        assert not any(detector.is_spike(3.0) for _ in range(reports))
        assert detector.is_spike(3.2) is found
    assert not SpikeDetector(0.0, _mean=3.0, _count=50).is_spike(100.0), "0 is off"


def test_gpu_values_are_read_after_their_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of the calls, on a machine that may have no GPU."""
    calls, numbers = list[str](), torch.tensor([1.0, 2.0])
    event = SimpleNamespace(
        record=lambda: calls.append("record"), synchronize=lambda: calls.append("synchronize")
    )

    def copy(values: object, non_blocking: bool) -> None:
        assert non_blocking
        calls.append("copy")

    host = SimpleNamespace(copy_=copy, tolist=lambda: (calls.append("read"), numbers.tolist())[1])
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch, "empty_like", lambda values, device, pin_memory: host)
    of_gpu: Any = SimpleNamespace(device=torch.device("cuda", 0))
    copied = HostCopy(of_gpu)
    assert calls == ["copy", "record"]
    assert copied.read() == [1.0, 2.0] and calls[2:] == ["synchronize", "read"]
    assert HostCopy(numbers).read() == [1.0, 2.0]


def guard_of(state: TrainState, limit: int, folder: Path) -> NonFiniteGuard:
    """The guard of a run whose stream is a user's, which has no batch to describe."""
    state.stream = SimpleNamespace(batch_at=lambda step: None)  # type: ignore[assignment]
    cfg = TrainConfig(training=TrainingConfig(max_bad_steps=limit))
    mesh = Mesh(ParallelDims("none"), 0, "cpu")
    return NonFiniteGuard(cfg, folder, mesh, state)


def test_non_finite_steps_are_counted_across_launches(tmp_path: Path) -> None:
    state = bare_state(3, 9, non_finite_steps=3)
    guard, labels = guard_of(state, 5, tmp_path), torch.tensor(8)
    guard.check(4, torch.tensor(torch.nan), labels)
    assert state.non_finite_steps == 4 and state.last_finite_step == 0
    with pytest.raises(RunFailed, match=r"step 5 skipped: gradient norm is inf \(5 of at most"):
        guard.check(5, torch.tensor(torch.inf), labels)
    guard.check(6, torch.tensor(1.0), labels)
    assert state.non_finite_steps == 0 and state.last_finite_step == 6
    guard.check(7, torch.tensor(torch.nan), labels)
    guard.finish()
    guard.check(8, torch.tensor(torch.nan), labels)
    with pytest.raises(RunFailed, match="the last 2 steps were not finite.*start again"):
        guard.finish()


def test_steps_without_labels_do_not_count(tmp_path: Path, caplog: Any) -> None:
    state = bare_state(2, 9)
    guard = guard_of(state, 1, tmp_path)
    logging.getLogger("fms_fsdp").propagate = True
    guard.check(3, torch.tensor(0.0), torch.tensor(0))
    assert state.non_finite_steps == state.last_finite_step == 0
    assert "step 3 has no labels; it changed nothing. The data come from a custom" in caplog.text


def work_then_hang(folder: Path) -> None:
    """Is alive for two seconds, and then hangs; writes what happens."""

    def say(word: str) -> None:
        with (folder / "said.txt").open("a") as file:
            file.write(f"{word}\n")

    status: Any = SimpleNamespace(fail=lambda reason: say("hang"))
    watchdog = Watchdog(1.5, folder / "stacks" / "rank0.txt", status)
    say("ready")
    for _ in range(20):
        watchdog.alive()
        time.sleep(0.1)
    say("slept")
    time.sleep(60)


@pytest.mark.slow
def test_suspended_process_is_not_declared_hung(tmp_path: Path) -> None:
    """In a process of its own, which stops for longer than the timeout, and then hangs."""
    process = multiprocessing.get_context("forkserver").Process(
        target=work_then_hang, args=(tmp_path,)
    )
    process.start()
    said = tmp_path / "said.txt"
    deadline = time.monotonic() + 60
    while not said.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(process.pid, signal.SIGCONT)
    process.join(60)
    assert process.exitcode == 1
    assert said.read_text() == "ready\nslept\nhang\n"
    assert "in work_then_hang" in (tmp_path / "stacks" / "rank0.txt").read_text()


def hang_without_report(folder: Path) -> None:
    """Holds the lock of the log, and cannot write its stacks."""
    status.REPORT_S = 1.0
    launch: Any = SimpleNamespace(fail=(folder / "reason.txt").write_text)
    handler = logging.StreamHandler()
    rank_log.addHandler(handler)
    handler.acquire()
    (folder / "stacks").write_text("a file")
    Watchdog(0.3, folder / "stacks" / "rank0.txt", launch)
    time.sleep(60)


def test_watchdog_that_cannot_report_ends_process(tmp_path: Path) -> None:
    """Its thread ended, or waited for ever, on a full disk and on a pipe that nobody read."""
    fork = multiprocessing.get_context("forkserver")
    process = fork.Process(target=hang_without_report, args=(tmp_path,), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 1
    assert "its stacks cannot be written" in (tmp_path / "reason.txt").read_text()
