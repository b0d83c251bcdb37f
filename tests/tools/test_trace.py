"""The profiler's windows, what its traces hold, and the table made of them."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fms_fsdp.__main__ import main as command
from fms_fsdp.config import ProfilerConfig
from fms_fsdp.extras.profile_window import ProfileWindow, dump_memory
from fms_fsdp.observe.profiler import StepProfiler
from fms_fsdp.tools.trace import length, summarize, union
from tests.cli import TINY, run, status, trained
from tests.warm import running


def test_unions_agree_with_a_count_of_microseconds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        begin = rng.integers(0, 100, 20)
        pieces = np.stack([begin, begin + rng.integers(0, 20, 20)], axis=1).astype(float)
        covered = np.zeros(200, bool)
        for a, b in pieces.astype(int):
            covered[max(a, 10) : min(b, 90)] = True
        found = union(pieces, 10, 90)
        assert length(found) == covered[10:90].sum() and np.all(found[1:, 0] > found[:-1, 1])


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def test_communication_is_exposed_where_no_kernel_runs(tmp_path: Path) -> None:
    """Two steps of 1000 us: 700 of kernels, 400 of nccl of which 150 are hidden, the rest idle."""
    path = tmp_path / "rank0.pt.trace.json"
    events = [
        event("ProfilerStep#1", 0, 1000, "user_annotation"),
        event("ProfilerStep#2", 1000, 1000, "user_annotation"),
    ]
    events += [event("gemm", 100, 500, "kernel", 7), event("gemm", 1000, 200, "kernel", 7)]
    events += [event("ncclDevKernel_AllGather", 450, 400, "kernel", 9), event("aten::mm", 0, 2000)]
    events += [event("data", 0, 50, "user_annotation")]
    path.write_text(json.dumps({"traceEvents": events}))
    rows = [line.split() for line in summarize(path).splitlines()[3:8]]
    table = {" ".join(row[:-2]): row[-2:] for row in rows}
    assert table["compute"] == ["0.35", "35.0%"]
    assert table["exposed communication"] == ["0.12", "12.5%"]
    assert table["idle"] == ["0.53", "52.5%"]
    assert table["range data"] == ["0.03", "2.5%"]


def test_a_trace_holds_named_ranges_and_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "--use_profiler=True",
        "--profiler_wait=1",
        "--profiler_warmup=1",
        "--profiler_active=2",
    ]
    trained(*TINY, "--num_steps=5", *argv, f"--output_dir={tmp_path}")
    (trace,) = (tmp_path / "profile_traces").glob("*.json")
    names = [item.get("name") for item in json.loads(trace.read_text())["traceEvents"]]
    for name in ("data", "forward", "backward", "optimizer", "block 0", "block 1"):
        assert names.count(name) == 2, name
    (summary,) = (tmp_path / "profile_traces").glob("*.summary.txt")
    assert "Self CPU" in summary.read_text() and "aten::mm" in summary.read_text()
    assert command(["trace", f"--path={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    for name in ("compute", "exposed communication", "range data", "range backward"):
        assert re.search(rf"^{name} +[0-9.]+ +[0-9.]+%$", shown, re.M), name


def test_a_running_job_is_traced_on_demand(tmp_path: Path) -> None:
    """By the file and by SIGUSR2, each once, without a flag."""
    argv = [
        *TINY,
        "--num_steps=1000000",
        "--profiler_warmup=0",
        "--profiler_active=1",
        f"--output_dir={tmp_path}",
    ]
    folder = tmp_path / "profile_traces"

    def wait_for(traces: int) -> None:
        deadline = time.monotonic() + 60
        while len(list(folder.glob("*.summary.txt"))) < traces:
            assert time.monotonic() < deadline and process.exitcode is None
            time.sleep(0.1)

    with running(argv) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)
        (tmp_path / "PROFILE").touch()
        wait_for(1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR2)
        wait_for(2)
        time.sleep(1.5)
        assert len(list(folder.glob("*.json"))) == 2  # the file counts once
        (tmp_path / "STOP").touch()
        process.join(60)
        assert process.exitcode == 75


def test_what_is_no_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["trace", f"--path={tmp_path}"]) == 2
    assert "must hold a trace" in capsys.readouterr().err
    (tmp_path / "x.json").write_text("{}")
    assert command(["trace", f"--path={tmp_path / 'x.json'}"]) == 2
    assert "must be a trace of torch.profiler" in capsys.readouterr().err
    refused = run(*TINY, "--memory_snapshot=True", f"--output_dir={tmp_path}")
    assert refused.returncode == 2 and "--memory_snapshot requires a GPU" in refused.stderr


@pytest.mark.slow
def test_out_of_memory_says_which_flags_would_help(tmp_path: Path) -> None:
    flags = [
        "--model_variant=tiny",
        "--use_dummy_dataset=True",
        "--seq_length=2048",
        "--batch_size=128",
        "--num_steps=2",
        f"--output_dir={tmp_path / 'run'}",
    ]
    with running(flags, output=tmp_path / "output") as process:
        assert process.pid is not None
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + 2**30  # it would need twice as much
        resource.prlimit(process.pid, resource.RLIMIT_AS, (room, room))
        process.join(200)
        assert process.exitcode == 1
    assert "Traceback" not in (tmp_path / "output").read_text()
    reason = status(tmp_path / "run")["reason"]
    assert reason.startswith("out of memory (") and "can't allocate memory" in reason
    for flag in ("--recompute=cheap", "--recompute=blocks", "--batch_size=64", "--seq_length=1024"):
        assert flag in reason


def test_a_window_of_memory_records_history_and_may_be_dumped_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator's calls of a GPU, which this machine may not have."""
    calls = list[object]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **how: calls.append(how)
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(Path(path).name)
    )
    folder = tmp_path / "traces" / "of_run"
    window = ProfileWindow(ProfilerConfig(memory_snapshot=True), folder, torch.device("cpu"), 3)
    assert calls == [{"max_entries": 200_000}]
    window.close()
    assert calls[1:] == ["memory_rank3.pickle", {"enabled": None}]
    dump_memory(folder, 3)
    assert calls[3:] == ["memory_rank3.pickle"] and folder.is_dir()
    profiler: Any = SimpleNamespace(_folder=folder, _rank=5)
    StepProfiler.dump_at_failure(profiler, ValueError)
    StepProfiler.dump_at_failure(profiler, torch.OutOfMemoryError)
    assert calls[4:] == ["memory_rank5.pickle"]
