"""The profiler's trace and its summary."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType

from fms_fsdp.config import ProfilerConfig
from fms_fsdp.metrics.profiling import StepProfiler, summarize, union_length
from tests.cli import TINY, trained


def test_union_length_agrees_with_a_count() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        begin = rng.integers(0, 100, 20)
        spans = [(int(a), int(a + b)) for a, b in zip(begin, rng.integers(0, 20, 20), strict=True)]
        covered = np.zeros(200, bool)
        for a, b in spans:
            covered[max(a, 10) : min(b, 90)] = True
        assert union_length(spans, 10, 90) == covered[10:90].sum()


def event(
    name: str, start: float, stop: float, on_gpu: bool = False, annotation: bool = False
) -> Any:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=stop),
        device_type=DeviceType.CUDA if on_gpu else DeviceType.CPU,
        is_user_annotation=annotation,
    )


def test_communication_is_exposed_where_no_kernel_runs() -> None:
    """Two steps of 1000 us: 700 of kernels, 400 of nccl of which 150 are hidden, the rest idle."""
    events = [event("ProfilerStep#1", 0, 1000), event("ProfilerStep#2", 1000, 2000)]
    events += [event("gemm", 100, 600, True), event("gemm", 1000, 1200, True)]
    events += [event("ncclDevKernel_AllGather", 450, 850, True), event("aten::mm", 0, 2000)]
    events += [event("data", 0, 50), event("forward", 0, 2000, True, True)]
    rows = [line.split() for line in summarize(events).splitlines()[1:]]
    table = {" ".join(row[:-3]): row[-3:] for row in rows}
    assert table["compute"] == ["0.35", "ms", "35.0%"]
    assert table["exposed communication"] == ["0.12", "ms", "12.5%"]
    assert table["idle"] == ["0.53", "ms", "52.5%"]
    assert table["range data"] == ["0.03", "ms", "2.5%"]


PROFILER = ("--use_profiler=True", "--profiler_wait=1", "--profiler_warmup=1")


def test_trace_has_named_ranges_and_summary(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    argv = ("--profiler_active=2", "--num_steps=6", f"--output_dir={folder}")
    trained(*TINY, *PROFILER, *argv)
    (trace,) = (folder / "profile_traces").glob("*.pt.trace.json")
    names = [item.get("name") for item in json.loads(trace.read_text())["traceEvents"]]
    for name in ("data", "forward", "backward", "optimizer", "block 0", "block 1"):
        assert names.count(name) == 2, name
    path = trace.with_name(trace.name.replace("pt.trace.json", "summary.txt"))
    assert f"trace {trace}, summary {path.name}\n" in (folder / "log.txt").read_text()
    summary = path.read_text()
    assert "Self CPU" in summary and "aten::mm" in summary
    for name in ("compute", "exposed communication", "range data", "range backward"):
        assert re.search(rf"^{name} +[0-9.]+ ms +[0-9.]+%$", summary, re.M), name


@pytest.mark.slow
def test_launch_that_ends_early_leaves_a_trace(tmp_path: Path) -> None:
    argv = ("--profiler_active=9", "--num_steps=4", f"--output_dir={tmp_path}")
    trained(*TINY, *PROFILER, *argv)
    assert len(list((tmp_path / "profile_traces").glob("*.json"))) == 1


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # of torch 2.11
def test_trace_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk ended the training."""
    logging.getLogger("fms_fsdp").propagate = True
    (tmp_path / "profile_traces").write_text("a file")
    section = ProfilerConfig(
        use_profiler=True, profiler_wait=0, profiler_warmup=1, profiler_active=1
    )
    profiler = StepProfiler(section, tmp_path, torch.device("cpu"), 0)
    profiler.step()
    profiler.step()
    assert "the profiler cannot write" in caplog.text and "File exists" in caplog.text
