"""`python -m fms_fsdp trace FILE`: where the time of a profiler trace went, as a table, without a browser or torch.

busy     union of compute: kernels of the GPU, or the outermost operators of the CPU's main threads
exposed  communication that no compute hides: union of both, less the compute
idle     the rest of the steps' time
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fms_fsdp.config import flag

_COMMUNICATION = ("nccl", "gloo:", "c10d::", "record_param_comms", "_c10d_functional")
_PHASES = ("data", "forward", "backward", "optimizer")
Spans = npt.NDArray[np.float64]  # rows of [begin, end) in microseconds


@dataclass(frozen=True)
class TraceConfig:
    """A trace of --use_profiler."""

    path: str = flag("", "a trace file (.json or .json.gz), or a folder whose newest is taken")
    top: int = flag(15, "operators to list", minimum=1)


def main(config: TraceConfig) -> None:
    """The command `trace`."""
    path = Path(config.path)
    if path.is_dir():
        found = sorted(path.rglob("*.pt.trace.json*"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise ValueError(f"--path ({config.path}) must hold a trace (*.pt.trace.json); found none there")
        path = found[-1]
    if not path.is_file():
        raise ValueError(
            f"--path ({config.path}) must be a trace file; a run writes them into profile_traces/"
        )
    print(summarize(path, config.top), end="")


def summarize(path: Path, top: int = 15) -> str:
    """The table of one trace.

    Raises:
        ValueError: the file is no trace, or one without steps.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = [event for event in json.loads(raw)["traceEvents"] if event.get("ph") == "X"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"--path ({path}) must be a trace of torch.profiler: {error!r}") from None
    annotations = [event for event in events if event.get("cat") == "user_annotation"]
    steps = spans([event for event in annotations if event["name"].startswith("ProfilerStep")])
    if not len(steps):
        raise ValueError(f"--path ({path}) must be a trace of whole steps (ProfilerStep#N); it holds none")
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    work = kernels or operators
    communication = [event for event in work if _communicates(event["name"])]
    within = (steps[:, 0].min(), steps[:, 1].max())
    busy = union(spans([event for event in work if _computes(event)]), *within)
    both = union(np.concatenate([busy, union(spans(communication), *within)]), *within)
    total = within[1] - within[0]
    exposed, idle = length(both) - length(busy), total - length(both)
    lines = [f"{path.name}: {len(steps)} steps, {total / len(steps) / 1000:.2f} ms each", ""]
    lines += [f"{'per step':<28}{'ms':>10}{'share':>9}"]
    rows = [
        ("compute", length(busy)),
        ("exposed communication", exposed),
        ("idle" if kernels else "idle or waiting", idle),
    ]
    rows += [
        (f"range {name}", length(spans([e for e in annotations if e["name"] == name]))) for name in _PHASES
    ]
    lines += [f"{name:<28}{value / len(steps) / 1000:>10.2f}{value / total:>8.1%}" for name, value in rows]
    lines += ["", f"{'operator' if not kernels else 'kernel':<72}{'ms a step':>10}{'share':>9}{'calls':>9}"]
    spent = self_times(work)
    for name, (value, calls) in sorted(spent.items(), key=lambda item: -item[1][0])[:top]:
        lines.append(
            f"{name[:70]:<72}{value / len(steps) / 1000:>10.3f}{value / total:>8.1%}{calls // len(steps):>9}"
        )
    return "\n".join(lines) + "\n"


def _computes(event: dict[str, Any]) -> bool:
    name = str(event["name"])
    if event["cat"] == "cpu_op":  # autograd's own nodes wrap operators, and waits
        return name.startswith(("aten::", "Torch-Compiled Region", "CompiledFunction"))
    return not _communicates(name)


def _communicates(name: str) -> bool:
    return any(word in name.lower() for word in _COMMUNICATION)


def spans(events: list[dict[str, Any]]) -> Spans:
    """[begin, end) of each event."""
    return np.array(
        [(event["ts"], event["ts"] + event["dur"]) for event in events], dtype=np.float64
    ).reshape(-1, 2)


def union(pieces: Spans, begin: float, end: float) -> Spans:
    """Disjoint, ascending spans that cover the same time within [begin, end)."""
    pieces = np.clip(pieces, begin, end)
    pieces = pieces[pieces[:, 1] > pieces[:, 0]]
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    if not len(pieces):
        return pieces
    reach = np.maximum.accumulate(pieces[:, 1])
    first = np.concatenate([[True], pieces[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([pieces[first, 0], reach[last]], axis=1)


def length(pieces: Spans) -> float:
    """Microseconds in all."""
    return float((pieces[:, 1] - pieces[:, 0]).sum())


def self_times(events: list[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    """Name → (microseconds not spent in events nested inside, number of calls), over all threads or streams."""
    total: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_thread[event.get("pid"), event.get("tid")].append(event)
    for thread in by_thread.values():
        stack: list[tuple[float, str]] = []
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1][0] <= event["ts"]:
                stack.pop()
            if stack:
                total[stack[-1][1]] -= event["dur"]
            total[event["name"]] += event["dur"]
            calls[event["name"]] += 1
            stack.append((event["ts"] + event["dur"], event["name"]))
    return {name: (value, calls[name]) for name, value in total.items()}
