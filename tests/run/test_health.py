"""Spikes of the loss, and the thread that ends a process that hangs."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fms_fsdp.run.health import SpikeDetector, Watchdog
from fms_fsdp.runtime import HostCopy


def test_a_spike_stands_out_of_the_recent_losses_and_does_not_widen_them() -> None:
    noise = random.Random(1)
    detector = SpikeDetector(6.0)
    assert not any(detector.is_spike(3 + noise.gauss(0, 0.1)) for _ in range(40))
    assert [detector.is_spike(loss) for loss in (3.3, 5.0, 5.0, float("nan"), 3.1)] == [
        False, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(("reports", "found"), [(19, False), (20, True)])
def test_the_first_reports_are_no_spikes(reports: int, found: bool) -> None:
    detector = SpikeDetector(6.0)
    assert not any(detector.is_spike(3.0) for _ in range(reports))
    assert detector.is_spike(3.2) is found, "losses that are alike: half a hundredth of the mean counts"
    assert not SpikeDetector(0.0, _mean=3.0, _count=50).is_spike(100.0), "0 is off"


def test_a_watchdog_that_is_closed_has_ended(tmp_path: Path) -> None:
    heard = list[str]()
    watchdog = Watchdog(100.0, tmp_path, 0, heard.append)
    assert watchdog._thread.is_alive()
    watchdog.close()
    assert not watchdog._thread.is_alive() and not heard


def test_numbers_of_a_gpu_are_read_after_the_work_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
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
