"""`python -m fms_fsdp trace --path=FILE`: where the time of a profiler trace went, without browser or torch.

busy     union of compute: kernels of the GPU, or the outermost operators of the CPU's main threads
exposed  communication that no compute hides: union of both, less the compute
idle     the rest of the steps' time
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fms_fsdp.config import flag
from fms_fsdp.errors import UserError
from fms_fsdp.tools.table import table

_COMMUNICATION = ("nccl", "gloo:", "c10d::", "record_param_comms", "_c10d_functional")
_PHASES = ("data", "forward", "backward", "optimizer")
Spans = npt.NDArray[np.float64]  # rows of [begin, end) in microseconds


@dataclass(frozen=True)
class TraceConfig:
    """A trace of --use_profiler."""

    path: str = flag("", "a trace file (.json or .json.gz), or a folder, of which the newest trace is read")
    top: int = flag(15, "operators to list", minimum=1)


def main(config: TraceConfig) -> None:
    """The command `trace`."""
    path = Path(config.path)
    if path.is_dir():
        found = sorted(path.rglob("*.pt.trace.json*"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise UserError(f"--path ({config.path}) must hold a trace (*.pt.trace.json); found none there")
        path = found[-1]
    if not path.is_file():
        rule = "must be a trace file; a run writes them into profile_traces/"
        raise UserError(f"--path ({config.path}) {rule}")
    print(summarize(path, config.top))


def summarize(path: Path, top: int = 15) -> str:
    """The tables of one trace: what the time of a step went into, and the work that took most of it.

    Raises:
        UserError: the file is no trace, or one without steps.
    """
    events = _read_events(path)
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    steps = spans(event for event in ranges if event["name"].startswith("ProfilerStep"))
    if not len(steps):
        raise UserError(f"--path ({path}) must be a trace of whole steps (ProfilerStep#N); it holds none")
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work = kernels or [event for event in events if event.get("cat") == "cpu_op"]
    begin, end = steps[:, 0].min(), steps[:, 1].max()
    total, a_step = end - begin, 1000 * len(steps)
    busy = union(spans(event for event in work if _computes(event)), begin, end)
    communication = spans(event for event in work if _communicates(event["name"]))
    both = length(union(np.concatenate([busy, communication]), begin, end))
    times = {"compute": length(busy), "exposed communication": both - length(busy)}
    times["idle" if kernels else "idle or waiting"] = total - both
    for name in _PHASES:
        times[f"range {name}"] = length(spans(event for event in ranges if event["name"] == name))
    most = sorted(self_times(work).items(), key=lambda item: -item[1][0])[:top]
    title = f"{path.name}: {len(steps)} steps, {total / a_step:.2f} ms each"
    parts = [(name, f"{us / a_step:.2f}", f"{us / total:.1%}") for name, us in times.items()]
    longest = [
        (name[:70], f"{us / a_step:.3f}", f"{us / total:.1%}", str(calls // len(steps)))
        for name, (us, calls) in most
    ]
    head = ("kernel" if kernels else "operator", "ms a step", "share", "calls")
    return "\n\n".join([title, table(("per step", "ms", "share"), parts), table(head, longest)])


def _read_events(path: Path) -> list[dict[str, Any]]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return [event for event in json.loads(raw)["traceEvents"] if event.get("ph") == "X"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"--path ({path}) must be a trace of torch.profiler: {error!r}") from None


def _computes(event: dict[str, Any]) -> bool:
    name = str(event["name"])
    if event["cat"] == "cpu_op":  # autograd's own nodes wrap operators, and waits
        return name.startswith(("aten::", "Torch-Compiled Region", "CompiledFunction"))
    return not _communicates(name)


def _communicates(name: str) -> bool:
    return any(word in name.lower() for word in _COMMUNICATION)


def spans(events: Iterable[dict[str, Any]]) -> Spans:
    """[begin, end) of each event."""
    pairs = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


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


def self_times(events: Iterable[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    """Name → (microseconds outside of events nested inside, number of calls), over all threads or streams."""
    total, calls = defaultdict[str, float](float), Counter[str]()
    # of each thread: (end, name), outermost first
    open_events = defaultdict[Any, list[tuple[float, str]]](list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        stack = open_events[event.get("pid"), event.get("tid")]
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        if stack:
            total[stack[-1][1]] -= event["dur"]
        total[event["name"]] += event["dur"]
        calls[event["name"]] += 1
        stack.append((event["ts"] + event["dur"], event["name"]))
    return {name: (value, calls[name]) for name, value in total.items()}
