"""What a report says of a run in words and figures: cards, a line, a command, tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median_high
from typing import Any

from fms_fsdp.config import from_dict
from fms_fsdp.config.flag import non_defaults
from fms_fsdp.config.values import short, typed
from fms_fsdp.errors import UserError
from fms_fsdp.predict.memory import GIB, Step, estimate_memory, optimizer_bytes
from fms_fsdp.state import located_sections, read_run_config
from fms_fsdp.tools.ckpt import LIST_HEAD, checkpoint_rows
from fms_fsdp.tools.report.history import RunHistory, differences

Row = tuple[str, ...]
OF_EVERY_EVENT, OF_LAST_LAUNCH = ("event", "attempt", "step", "time"), ("masked_rows", "energy_kwh")
MOST_EVENTS = 100  # of a run: the last ones
LAUNCHES = ("launch", "began", "time", "devices", "first step", "last step")
HELD_OUT = {"loss": "held-out loss", "ppl": "perplexity", "bits_per_byte": "bits per byte"}


def cards(run: RunHistory) -> Iterator[Row]:
    """Label, figure and note of what one asks first."""
    steps, resolved = list(run.reports), run.config["resolved"]
    last, world = run.reports[steps[-1]], resolved.get("world_size", 1)
    for key in run.validation_losses[:1]:
        if losses := run.numbers(key):
            yield "validation loss", f"{losses[-1]:.4f}", f"best {min(losses):.4f}"
    if values := run.numbers("eval/bits_per_byte"):
        yield "bits per byte", f"{values[-1]:.4f}", "of held-out text"
    loss, first = last["loss"], steps[-1]
    if "loss_mean" in last:
        loss, first = last["loss_mean"], [0, *steps][-2] + 1
    shown = "not finite" if loss is None else f"{loss:.4f}"
    yield (
        "mean loss",
        shown,
        f"of step {first:,}" + (f" to {steps[-1]:,}" if first < steps[-1] else ""),
    )
    wanted = resolved.get("num_steps")
    done = f"step {steps[-1]:,}" + (f" of {wanted:,}" if wanted else "")
    yield "tokens", short(last["tokens_seen"], 4), done
    if speeds := run.numbers("tokens_per_sec_per_device"):
        speed = median_high(speeds)
        yield "tokens/s", f"{world * speed:,.0f}", f"median, {speed:,.0f} per device"
    if shares := run.numbers("mfu"):
        yield "MFU", f"{median_high(shares):.1%}", "median"
    if peaks := run.numbers("peak_mem_gib"):
        yield "memory", f"{max(peaks):.3g} GiB", f"peak of rank 0{_expected_memory(run)}"
    if run.seconds > 0:
        a_day = short(86400 * last["tokens_seen"] / run.seconds, 3)
        yield "time", _duration(run.seconds), f"{a_day} tokens a day, launches: {len(run.spans)}"


def _expected_memory(run: RunHistory) -> str:
    """Returns the expected memory of the last launch; "" if this release cannot read its record."""
    try:
        record = read_run_config(run.config, "config.json")
    except UserError:
        return ""
    size = optimizer_bytes(record.config.optim, record.model, record.precision)
    need = estimate_memory(Step.of(record), size).total / GIB
    return f", of the run alone {need:.3g} expected"


def subtitle(run: RunHistory) -> str:
    """How the run stands, of what size, on what hardware."""
    resolved, status = run.config["resolved"], run.status
    words = [str(status.get("reason") or status.get("status") or "")]
    if words == ["running"] and (left := run.numbers("eta_s")):
        words = [f"running, about {_duration(left[-1])} left"]
    if resolved:
        model, versions = resolved.get("model", {}), resolved.get("versions", {})
        device = versions.get("gpu") or f"CPU ({versions.get('platform', 'unknown')})"
        size = f"{short(model.get('num_params', 0), 4)} parameters"
        words += [size, f"{resolved.get('world_size')} x {device}"]
    return " · ".join(filter(None, words))


def command(run: RunHistory) -> list[str]:
    """The words of the command that the recorded flags come to, launched on one node; [] if unknown."""
    try:
        values = non_defaults(from_dict(run.config))
    except (UserError, TypeError):  # flags of another release
        return []
    world = run.config["resolved"].get("world_size", 1)
    words = ["python"] if world == 1 else ["torchrun", f"--nproc_per_node={world}"]
    words.append("main_training.py")
    for name, value in values.items():
        words.append(shlex.quote(f"--{name}={typed(value)}"))
    return words


def tables(run: RunHistory) -> dict[str, list[Row]]:
    """Title → rows, the head first."""
    launches = run.configs.copy()
    launches.pop("config.json", None)
    last, details = run.reports[max(run.reports)], run.config["resolved"].copy()
    for key in filter(last.get, OF_LAST_LAUNCH):
        details[key] = last[key]
    return {
        "Checkpoints": [LIST_HEAD, *_checkpoints(run)],
        "Launches": [LAUNCHES, *_launches(run)],
        "Data": [("source", "weight", "tokens", "epochs", *HELD_OUT.values()), *_sources(run)],
        "Details": [("name", "value"), *((key, _words(value)) for key, value in details.items())],
        "Flags that launches changed": [("flag", *launches), *differences(launches)],
        "Events": [("launch", "step", "date", "event", ""), *_events(run)],
    }


def _checkpoints(run: RunHistory) -> list[Row]:
    sections = located_sections(run.config)
    folder = Path(
        sections.get("checkpoint", {}).get("ckpt_save_path") or run.folder / "checkpoints"
    )
    return checkpoint_rows(str(folder)) if folder.is_dir() else []


def _launches(run: RunHistory) -> Iterator[Row]:
    """Each launch, with those of its steps that no later launch made again."""
    steps: dict[int, list[int]] = {}
    for step, report in run.reports.items():
        steps.setdefault(report.get("attempt") or 1, []).append(step)
    for attempt, (begin, end) in run.spans.items():
        own = steps.get(attempt, ["–"])
        resolved = run.configs.get(f"config.{attempt}.json", {}).get("resolved", {})
        size = str(resolved.get("world_size", "–"))
        yield str(attempt), _date(begin), _duration(end - begin), size, str(own[0]), str(own[-1])


def _sources(run: RunHistory) -> Iterator[Row]:
    """Each source: what was trained on of it, and its held-out losses."""
    data = run.config.get("data", {})
    weights = dict(zip(data.get("datasets") or [], data.get("weights") or [], strict=False))
    names = {key.removeprefix("tokens/"): f"eval/{key[7:]}" for key in run.keys("tokens/")}
    held_out = [*reversed(run.validation_losses), *run.keys("test/")]
    prefixes = [key.removesuffix("/loss") for key in held_out if key.endswith("/loss")]
    names |= {prefix.removeprefix("eval/"): prefix for prefix in prefixes}
    for name, prefix in names.items():
        metrics = [
            f"tokens/{name}",
            f"epoch/{name}",
            *(f"{prefix}/{metric}" for metric in HELD_OUT),
        ]
        last = [short(values[-1], 5) if (values := run.numbers(key)) else "–" for key in metrics]
        yield name, str(weights.get(name, "–")), *last


def _events(run: RunHistory) -> Iterator[Row]:
    """What happened beside steps, with its fields."""
    for event in run.events[-MOST_EVENTS:]:
        fields = {key: value for key, value in event.items() if key not in OF_EVERY_EVENT}
        place = str(event.get("attempt", "")), str(event["step"]), _date(event.get("time"))
        yield *place, str(event["event"]), _words(fields)


def _words(value: Any) -> str:
    """A recorded value in a line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(part)}" for key, part in value.items())
    return short(value, 4) if isinstance(value, float) else str(value)


def _date(seconds: Any) -> str:
    """Local time of Unix seconds; empty where there are none."""
    is_time = isinstance(seconds, int | float) and 0 <= seconds < 1e10
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M %Z}" if is_time else ""


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
