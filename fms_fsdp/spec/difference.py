"""What a launch changes in the run that it goes on with: its `Spec` against the record in the checkpoint.

Each flag has a rule of its own (config/flag.py): "free" and "announced" changes are told here, of "refused"
ones only those get here that came to the same model and the same data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fms_fsdp.config import TrainConfig, flag_table
from fms_fsdp.config.flag import flag_values
from fms_fsdp.optim.schedules import Schedule
from fms_fsdp.record import Record
from fms_fsdp.spec.origin import Origin


def differences(now: Record, origin: Origin) -> Iterator[str]:
    """What differs from the launch that wrote the checkpoint, a line each: flags, precision, world, device
    and versions."""
    before = origin.saved.record
    changed: dict[str, list[str]] = {"announced": [], "free": [], "refused": []}
    old, new = flag_values(before.config), flag_values(now.config)
    for name, row in flag_table(TrainConfig).items():
        if old[name] != new[name]:
            takes_effect = row.orders_data and (origin.fresh_data or now.config.data.dataset_builder)
            change = f"--{name} {_shown(old[name])} -> {_shown(new[name])}"
            changed["announced" if takes_effect else row.resume].append(change)
    if changed["announced"]:
        yield f"from step {origin.saved.step + 1} on: {', '.join(changed['announced'])}"
    # refused ones got past the checks: they come to the same thing
    if quiet := changed["free"] + changed["refused"]:
        yield f"changed, without effect on what is trained: {', '.join(quiet)}"
    facts = {
        "precision": (before.precision.in_words, now.precision.in_words),
        "world_size": (before.world_size, now.world_size),
        "device": (before.device_type, now.device_type),
    }
    for name in sorted({*before.versions, *now.versions}):
        facts[f"version of {name}"] = before.versions.get(name), now.versions.get(name)
    yield from (f"{name}: {was} -> {is_now}" for name, (was, is_now) in facts.items() if was != is_now)


def schedule_jump(now: Record, origin: Origin) -> str:
    """A sentence on how the learning rate jumps at the resume; empty if the schedule is the same."""
    saved, before = origin.saved, origin.saved.record
    step, rows = saved.step + 1, before.batch.global_batch_size
    tokens = saved.tokens_seen + rows * before.config.data.seq_length
    rates = []
    for record in (before, now):
        section = record.config.optim
        rates.append(f"{Schedule(section, record.corners)(step, tokens, section.learning_rate):.3e}")
    return "" if rates[0] == rates[1] else f"learning rate of step {step}: {rates[0]} -> {rates[1]}"


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
