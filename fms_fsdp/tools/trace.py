"""`python -m fms_fsdp trace --path=FILE`: where the time of a profiler trace went, without browser or torch.

compute                  union of compute: kernels of the GPU, or the outermost operators of the CPU
exposed communication    communication that no compute hides: union of both, less the compute
idle                     the rest of the time of the steps
range NAME               what the named range covers: `data` is the wait for data

Which operators took the time is in torch's own table, which a run writes beside each trace.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
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
_RANGES = ("data", "forward", "backward", "optimizer")
# of a CPU; autograd's own nodes wrap operators, and waits
_COMPUTE = ("aten::", "Torch-Compiled Region", "CompiledFunction")
Event = dict[str, Any]
Spans = npt.NDArray[np.float64]  # rows of [begin, end) in microseconds


@dataclass(frozen=True)
class TraceConfig:
    """A trace of --use_profiler."""

    path: str = flag(
        "",
        "a trace file (.json or .json.gz), or a folder, of which the newest trace is read",
        form="path",
    )


def main(config: TraceConfig) -> None:
    """The command `trace`."""
    path = Path(config.path)
    if path.is_dir():
        found = sorted(path.rglob("*.pt.trace.json*"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise UserError(
                f"--path ({config.path}) must hold a trace (*.pt.trace.json); found none there"
            )
        path = found[-1]
    if not path.is_file():
        rule = "must be a trace file; a run writes its traces into profile_traces/"
        raise UserError(f"--path ({config.path}) {rule}")
    print(summarize(path))


def summarize(path: Path) -> str:
    """The table of one trace: what the time of a step went into.

    Raises:
        UserError: the file is no trace, or one without steps.
    """
    events = _read_events(path)
    ranges = events["user_annotation"]
    steps = spans(event for event in ranges if event["name"].startswith("ProfilerStep"))
    if not len(steps):
        raise UserError(
            f"--path ({path}) must be a trace of whole steps (ProfilerStep#N), and has no step"
        )
    kernels = events["kernel"] + events["gpu_memcpy"] + events["gpu_memset"]
    work = kernels or events["cpu_op"]
    begin, end = steps[:, 0].min(), steps[:, 1].max()
    total, a_step = end - begin, 1000 * len(steps)
    busy = union(spans(filter(_computes, work)), begin, end)
    communication = spans(filter(_communicates, work))
    both = length(union(np.concatenate([busy, communication]), begin, end))
    times = {"compute": length(busy), "exposed communication": both - length(busy)}
    times["idle" if kernels else "idle or waiting"] = total - both
    for name in _RANGES:
        times[f"range {name}"] = length(spans(event for event in ranges if event["name"] == name))
    rows = list[tuple[str, ...]]()
    for name, us in times.items():
        rows.append((name, f"{us / a_step:.2f}", f"{us / total:.1%}"))
    title = f"{path.name}: {len(steps)} steps, {total / a_step:.2f} ms each"
    return f"{title}\n\n{table(('per step', 'ms', 'share'), rows)}"


def _read_events(path: Path) -> dict[str, list[Event]]:
    """The events that have a beginning and an end, by category."""
    found = defaultdict[str, list[Event]](list)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for event in json.loads(raw)["traceEvents"]:
            if event.get("ph") == "X":
                found[event.get("cat")].append(event)
        return found
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"--path ({path}) must be a trace of torch.profiler: {error!r}") from None


def _computes(event: Event) -> bool:
    return (
        str(event["name"]).startswith(_COMPUTE)
        if event["cat"] == "cpu_op"
        else not _communicates(event)
    )


def _communicates(event: Event) -> bool:
    return any(word in event["name"].lower() for word in _COMMUNICATION)


def spans(events: Iterable[Event]) -> Spans:
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
