"""Says what of a part of gpu_session.sh passes, and writes it into the folder's results.json.

    python benchmarks/gpu_compare.py FOLDER PART
    python benchmarks/gpu_compare.py FOLDER needs RUN

The bounds of parts 1 and 3 are of the loss of every step, relative: fp32 on the GPU against the CPU 1e-4,
bf16 against fp32 1e-2, a feature against none 3e-3, bf16_pure against bf16 1e-2, float8 2e-2. All steps have
read the same data, and none was skipped.
Parts 2 and 5 measure; there a row of TARGETS fails where it is missing or below its target. In part 6 a row
fails where a case has not run, or differs by our fault; one that the machine rejects has a dash. The exit status
is 1 if a row fails. `needs` says whether a run agrees with its reference, that one with its own, and so on:
nothing is measured of what is wrong, and what is right does not wait for other features.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


class Rule(NamedTuple):
    """Two runs of parts 1 and 3 whose losses may differ by `bound`."""

    run: str
    reference: str
    bound: float


class Row(NamedTuple):
    """One line of the result."""

    what: str
    found: str
    wanted: str
    passes: bool


class Target(NamedTuple):
    """What the best case of a sweep must reach in `metric`, or as a share of another sweep's."""

    part: int
    sweep: str
    metric: str
    least: float
    of: str = ""


RATE = "tokens_per_sec_per_device"
SMOKE = ("fp32", "bf16", "cheap", "compiled_pure", "compiled_float8", "compiled_moments")
FEATURES = (
    "compiled cheap ops compiled_ops blocks compiled_blocks cudnn flash math counted accumulated sharded "
    "sharded_compiled sharded_offload"
).split()
FLOAT8 = ("float8", "float8_tensor", "compiled_float8", "sharded_float8")
RULES = (
    Rule("fp32", "fp32_cpu", 1e-4),
    Rule("bf16", "fp32", 1e-2),
    *(Rule(name, "bf16", 3e-3) for name in FEATURES),
    Rule("fp16", "fp32", 1e-2),
    *(
        Rule(name, "bf16", 1e-2)
        for name in ("pure", "compiled_pure", "compiled_moments", "sharded_pure")
    ),
    *(Rule(name, "bf16", 2e-2) for name in FLOAT8),
    Rule("documents", "documents_cpu", 1e-2),
    Rule("compiled_documents", "documents_cpu", 1e-2),
    Rule("documents_in_blocks", "documents_cpu", 1e-2),
    Rule("tied", "tied_cpu", 1e-2),
    Rule("repeated_again", "repeated", 0.0),
)
# of one H200 (benchmarks/LOG.md)
TARGETS = (
    Target(2, "best", RATE, 11_500),
    Target(2, "best", "mfu", 0.63),
    Target(2, "of_pure", RATE, 12_000),
    Target(5, "of_7b", "mfu", 0.62),
    Target(5, "long", "mfu", 0.60),
    Target(5, "by_document", RATE, 0.95, of="best"),
    Target(5, "one_rank", RATE, 0.97, of="without_fsdp"),
)


def records(run: Path) -> dict[int, dict[str, Any]]:
    """The reports of a run by step; an event, such as a spike, can name a loss too."""
    lines = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return {line["step"]: line for line in lines if "loss" in line and "event" not in line}


def largest_difference(one: Path, other: Path) -> float:
    """The largest relative difference of two runs' losses at one step.

    Raises:
        ValueError: a run skipped a step, they have other steps, or they read other data.
    """
    left, right = records(one), records(other)
    if left.keys() != right.keys() or not left:
        raise ValueError(f"steps {sorted(left)} and {sorted(right)}")
    for step, record in left.items():
        if record["data_fingerprint"] != right[step]["data_fingerprint"]:
            raise ValueError(f"other data at step {step}")
        if record["skipped_steps"] or right[step]["skipped_steps"]:
            raise ValueError(f"a skipped step by step {step}")
    ratios: list[float] = [record["loss"] / right[step]["loss"] for step, record in left.items()]
    return max(abs(ratio - 1) for ratio in ratios)


def row_of(runs: Path, rule: Rule) -> Row:
    """What a rule comes to."""
    what, wanted = f"{rule.run} against {rule.reference}", f"at most {rule.bound:g}"
    try:
        found = largest_difference(runs / rule.run, runs / rule.reference)
    except (OSError, ValueError, KeyError) as error:
        return Row(what, str(error)[:100], wanted, False)
    last = max(records(runs / rule.run).items())[1]
    about = ", ".join(
        f"{name} {last[name]:.4g}" for name in ("grad_norm", "peak_mem_gib") if name in last
    )
    return Row(what, f"{found:.2g}; {about}", wanted, found <= rule.bound)


def correctness(runs: Path, part: int) -> Iterator[Row]:
    """One row for each rule of the part: the smoke has some of them."""
    yield from (row_of(runs, rule) for rule in RULES if part == 3 or rule.run in SMOKE)


def first_wrong(runs: Path, run: str) -> Row | None:
    """The row that keeps a setting from being measured: that of its small `run`, or of a reference."""
    rules = {rule.run: rule for rule in RULES}
    while run in rules:
        if not (row := row_of(runs, rules[run])).passes:
            return row
        run = rules[run].reference
    return None


def features(runs: Path) -> Iterator[Row]:
    """What each run of part 4 must have left."""
    for name in "traced saved copied whole resumed evaluated out_of_memory bad_steps".split():
        yield Row(f"{name}: exit status", "", "as expected", (runs / f"{name}.ok").exists())
    traces = _left(runs, "traced")
    yield Row(
        "traced: files",
        ", ".join(sorted(traces))[:80],
        "a trace",
        any(".trace." in name for name in traces),
    )
    yield Row(
        "traced: allocator's history",
        "",
        "a pickle",
        any(name.endswith(".pickle") for name in traces),
    )
    saves = re.findall(r"saved .*step_\d+ \(([\d.]+) s\)", _text(runs / "saved" / "log.txt"))
    slowest = max(map(float, saves), default=float("nan"))
    yield Row("saved: slowest save, s", f"{slowest:g}", "below 30", slowest < 30)
    # the first save: the steps are so short that each later one waits for the one before
    pause_s = _records(runs / "saved").get(21, {}).get("checkpoint_ms", float("nan")) / 1000
    found = pause_s / float((_text(runs / "copied.log").split() or ["nan"])[-1])
    yield Row(
        "saved: the loop stands still, over a copy", f"{found:.2f}", "at most 1.5", found <= 1.5
    )
    resumed = _difference(runs / "resumed", runs / "whole")
    yield Row("resumed after SIGTERM: losses", resumed, "the same bits", resumed == "0")
    text = _text(runs / "out_of_memory.log")
    yield Row(
        "out of memory: advice", text.strip()[-80:], "what would help", "what would help" in text
    )
    has_history = any(name.endswith(".pickle") for name in _left(runs, "out_of_memory"))
    yield Row("out of memory: allocator's history", "", "a pickle", has_history)
    text = _text(runs / "bad_steps.log")
    yield Row("bad steps: counted", "", "3 in a row", "3 in a row" in text)


def throughput(runs: Path, part: int) -> Iterator[Row]:
    """The rates of part 2 or 5: every case of every sweep so far, then what has a target. On a GPU with less
    memory than the targets stand for their sweeps do not run, but those of smaller cases."""
    best: dict[tuple[str, str], float] = {}
    for path in sorted(runs.glob("*.json")):
        for result in json.loads(path.read_text(encoding="utf-8"))["results"]:
            rate = result.get(RATE, 0.0)
            for metric in (RATE, "mfu"):
                key = path.stem.partition(".")[0], metric
                best[key] = max(best.get(key, 0.0), result.get(metric) or 0.0)
            case = " ".join(
                f"{name}={value}" for name, value in result["case"].items() if name != "trackers"
            )
            mfu = f", mfu {result['mfu']:.3f}, {result['peak_mem_gib']:.1f} GiB" if rate else ""
            yield Row(
                case, f"{rate:,.0f} tokens/s{mfu}" if rate else result["problem"][:80], "", rate > 0
            )
    if part == 2:
        yield Row("traced_best: exit status", "", "as expected", (runs / "traced_best.ok").exists())
    is_small = any(runs.glob("small_*.json"))
    for target in (target for target in TARGETS if target.part == part and not is_small):
        found = best.get((target.sweep, target.metric), 0.0)
        if target.of:
            found /= best.get((target.of, target.metric)) or float("inf")
        what = f"{target.sweep}: {target.metric}{f' over that of {target.of}' if target.of else ''}"
        yield Row(
            what,
            f"{found:,.5g}" if found else "missing",
            f"at least {target.least:g}",
            found >= target.least,
        )


def collectives(runs: Path) -> Iterator[Row]:
    """The cases of part 6 that were asked for, with the verdict of tests/gpu/shared_gpu.py."""
    for planned in sorted(runs.glob("shared_*/planned.json")):
        plan = json.loads(planned.read_text(encoding="utf-8"))
        ended = {}
        for text in _text(planned.parent / "results.jsonl").splitlines():
            line = json.loads(text)
            ended[line["case"]] = line  # a later call may have repeated it
        for case in plan["cases"]:
            what = f"{case['case']}, {plan['device']}"
            if case["case"] not in ended:
                yield Row(what, "– not run", case["wanted"], False)
                continue
            line = ended[case["case"]]
            found = f"{line['verdict']}: {line['found'][:160]}"
            yield Row(what, found, case["wanted"], line["verdict"] != "ours")


def _difference(one: Path, other: Path) -> str:
    try:
        return f"{largest_difference(one, other):.2g}"
    except (OSError, ValueError, KeyError) as error:
        return str(error)[:80]


def _left(runs: Path, name: str) -> list[str]:
    """The names of the files that a run left, also where the large ones did not outlive the machine."""
    return [Path(line).name for line in _text(runs / f"{name}.ok").splitlines()]


def _records(run: Path) -> dict[int, dict[str, Any]]:
    return records(run) if (run / "metrics.jsonl").exists() else {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> None:
    folder, runs = Path(sys.argv[1]), Path(sys.argv[1], "runs")
    if sys.argv[2] == "needs":
        if wrong := first_wrong(runs, sys.argv[3]):
            print(
                f"{wrong.what} must be {wrong.wanted}: {wrong.found}; not measured", file=sys.stderr
            )
        sys.exit(1 if wrong else 0)
    part = int(sys.argv[2])
    if part in (2, 5):
        rows = list(throughput(runs, part))
    elif part == 4:
        rows = list(features(runs))
    elif part == 6:
        rows = list(collectives(runs))
    else:
        rows = list(correctness(runs, part))
    from fms_fsdp.versions import versions

    path = folder / "results.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results[f"part {part}"] = {
        "command": f"bash scripts/gpu_session.sh {part}",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "versions": versions(),
        "passes": bool(rows) and all(row.passes for row in rows),
        "rows": [row._asdict() for row in rows],
    }
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("| what | found | wanted | passes |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.what} | {row.found} | {row.wanted} | {'yes' if row.passes else 'NO'} |")
    print(f"written: {path}", file=sys.stderr)
    sys.exit(0 if results[f"part {part}"]["passes"] else 1)


if __name__ == "__main__":
    main()
