"""What a run will have read by step N, before it trains: `python -m fms_fsdp inspect plan`.

history ── position(N), find(end of epoch) ──> tokens, epochs, steps at which they end (arithmetic alone)
shards ─── a few rows of each source ────────> share of labels that are -100        (the only tokens read)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fms_fsdp.config import flag
from fms_fsdp.data.batch import IGNORED_LABEL, empty_batch
from fms_fsdp.data.order.mixture import NUM_SLOTS
from fms_fsdp.data.order.tapes import Geometry
from fms_fsdp.data.pieces import Row
from fms_fsdp.data.shards.manifest import Source
from fms_fsdp.errors import UserError
from fms_fsdp.tools.inspect.step import InspectConfig, Inspected, inspected
from fms_fsdp.tools.table import table

MANY_EPOCHS = 4  # Source: Muennighoff et al., "Scaling data-constrained language models" (2023)
_SHOWN_ENDS = 4
_USED_HEAD = "source,weight,tokens,documents,used,share,epochs,epochs end at step,-100 labels".split(",")
_CUT_HEAD = "source,shards,rows an epoch,tapes,windows a tape,blocks a window,tail rows".split(",")


@dataclass(frozen=True)
class PlanConfig(InspectConfig):
    """How far to plan, and what to draw."""

    num_steps: int | None = flag(None, "plan the data up to this step (default: the run's last)", minimum=1)
    sample_rows: int = flag(16, "rows of each source that are read to count -100 labels", minimum=0)
    plot: str = flag("", "FILE.html: a page with charts of the mixture and of the lengths of documents")

    def __post_init__(self) -> None:
        if self.plot and not self.plot.endswith(".html"):
            raise UserError(f"--plot ({self.plot}) must be a page; name FILE.html")


@dataclass(frozen=True)
class SourcePlan:
    """One source by the end of a step. `tokens` are those of an epoch, separators counted; `source` is None
    if it is not there any more; `ends`: the steps at which its first epochs end, the last of them the first
    after the planned step; `ignored`: share of -100 labels, None if not read."""

    name: str
    weight: float
    tokens: int
    source: Source | None
    used: int
    epochs: float
    ends: tuple[int, ...]
    ignored: float | None
    geometry: Geometry


def plan_sources(data: Inspected, num_steps: int, sample_rows: int) -> list[SourcePlan]:
    """Returns what every source of the run's history has supplied after `num_steps`, sorted by name.

    Raises: ShardError from the rows sampled.
    """
    history = data.order.history
    segment, position = history.segment(num_steps), history.position(num_steps)
    plans = []
    for name, consumed in sorted(data.rows.consumption(num_steps).items()):
        order, source = data.order.source(name), data.sources.get(name)
        plan = SourcePlan(
            name=name,
            weight=segment.quotas.get(name, 0) / NUM_SLOTS,
            tokens=order.num_tokens,
            source=source,
            used=int(consumed["tokens"]),
            epochs=float(consumed["epoch"]),
            ends=_epoch_ends(data, name, num_steps),
            ignored=ignored_share(data, name, sample_rows) if source and sample_rows else None,
            geometry=order.lap(position[name]).tapes.geometry,
        )
        plans.append(plan)
    return plans


def _epoch_ends(data: Inspected, name: str, num_steps: int) -> tuple[int, ...]:
    ends: list[int] = []
    while len(ends) <= _SHOWN_ENDS and (not ends or ends[-1] <= num_steps):
        last_row = data.order.source(name).num_rows_until(len(ends) + 1) - 1
        found = data.order.history.find(name, last_row)
        if found is None:
            break
        ends.append(found[0])
    return tuple(ends)


def ignored_share(data: Inspected, name: str, num_rows: int) -> float:
    """Returns the share of -100 among the labels of `num_rows` rows spread over an epoch of the source, in
    its last length."""
    epochs = data.order.source(name).laps[-1]
    num_epoch_rows = epochs.tapes.geometry.num_rows
    out = Row(*(tensor[0].numpy() for tensor in empty_batch(1, epochs.seq_length)))
    ignored = 0
    places = {(2 * i + 1) * num_epoch_rows // (2 * num_rows) for i in range(num_rows)}
    for place in sorted(places):
        data.rows.read(data.order.address(name, epochs.first + place), out)
        ignored += int(np.count_nonzero(out.labels == IGNORED_LABEL))
    return ignored / (len(places) * epochs.seq_length)


def warnings_of(plans: Iterable[SourcePlan], num_steps: int) -> list[str]:
    """Returns a line for everything a person should think about before training."""
    lines = []
    for plan in plans:
        if plan.epochs > MANY_EPOCHS:
            read = f"source {plan.name} is read {plan.epochs:.1f} times by step {num_steps}"
            effect = f"beyond about {MANY_EPOCHS} epochs repeated text teaches less and less"
            lines.append(f"{read}; {effect}: lower its weight, or add data")
        if plan.geometry.num_main_rows == 0:
            few = f"source {plan.name} has {plan.geometry.num_rows} rows, too few for windows"
            lines.append(f"{few}: its rows are shuffled, but the documents of a row are neighbours")
        if plan.ignored is not None and plan.ignored > 0.01:
            lines.append(f"source {plan.name} has {100 * plan.ignored:.1f} % of its labels masked")
    return lines


def _ends_text(ends: tuple[int, ...], num_steps: int) -> str:
    shown = list[str]()
    for step in ends:
        shown.append(f"{step:,}" if step <= num_steps else f"(later: {step:,})")
    if len(ends) > _SHOWN_ENDS and ends[-1] <= num_steps:
        shown[_SHOWN_ENDS:] = ["…"]
    return ", ".join(shown) or "-"


def _changes_text(data: Inspected, num_steps: int) -> list[str]:
    """Returns the segments of the history, and what it leaves out."""
    history, lines = data.order.history, list[str]()
    for segment in history.segments:
        if segment.after < num_steps:
            shares = (f"{name} {quota / NUM_SLOTS:.4f}" for name, quota in sorted(segment.quotas.items()))
            first, last = segment.batch_at(segment.after + 1), segment.batch_at(num_steps)
            batch = f"{first} rows" if first == last else f"{first} to {last} rows"
            rows = f"{batch} of {segment.seq_length:,} tokens a step"
            lines.append(f"  from step {segment.after + 1:,} on: {rows}; {', '.join(shares)}")
    for name in sorted(history.position(num_steps)):
        left_out = data.order.source(name).left_out
        if left_out:
            lines.append(f"  {name}: {left_out:,} tokens are left out by changes of seq_length")
    for skip in history.skipped:
        lines.append(f"  the rows planned for steps {skip.a:,} to {skip.b - 1:,} are passed over")
    return lines


def describe_plan(data: Inspected, plans: Sequence[SourcePlan], num_steps: int) -> str:
    """Returns the plan as two tables: what is read of each source, and how each is cut."""
    used, window_bytes = sum(plan.used for plan in plans), 0
    used_rows, cut_rows = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for plan in plans:
        cut, source, has_windows = plan.geometry, plan.source, plan.geometry.num_main_rows > 0
        used_rows.append(
            (
                plan.name,
                f"{plan.weight:.4f}" if plan.weight else "dropped",
                f"{plan.tokens:,}",
                f"{source.docs.sum():,}" if source else "?",
                f"{plan.used:,}",
                f"{100 * plan.used / used:.2f} %",
                f"{plan.epochs:.3f}",
                _ends_text(plan.ends, num_steps),
                "-" if plan.ignored is None else f"{100 * plan.ignored:.3f} %",
            )
        )
        cut_rows.append(
            (
                plan.name,
                f"{len(source.paths):,}" if source else "?",
                f"{cut.num_rows:,}",
                f"{cut.num_tapes if has_windows else 0:,}",
                f"{cut.windows_per_tape:,}",
                f"{cut.blocks_per_window} x {cut.block_tokens:,}" if has_windows else "-",
                f"{100 * cut.num_tail_rows / cut.num_rows:.2f} %",
            )
        )
        if source and plan.weight and has_windows:
            shard = data.rows.reader(plan.name).shard(int(np.argmax(source.tokens > 0)))
            window_bytes += cut.num_tapes * cut.blocks_per_window * cut.block_tokens * shard.dtype.itemsize
    at_a_time = (
        f"windows open at a time, of all ranks together: {window_bytes / 2**20:,.1f} MiB of the shards"
    )
    lines = [f"by step {num_steps:,}: {used:,} tokens, packing {data.section.packing}"]
    lines += [*_changes_text(data, num_steps), "", table(_USED_HEAD, used_rows), ""]
    return "\n".join([*lines, table(_CUT_HEAD, cut_rows), f"{at_a_time}; --logical_shards lowers it"])


def main(config: PlanConfig) -> None:
    """The command `inspect plan`."""
    with inspected(config) as data:
        num_steps = config.num_steps or data.run.num_steps
        if num_steps is None:
            raise UserError("--num_steps is missing; name the step to plan for, or --run=FOLDER of a run")
        plans = plan_sources(data, num_steps, config.sample_rows)
        print(describe_plan(data, plans, num_steps))
        for line in warnings_of(plans, num_steps):
            print(f"warning: {line}")
        if config.plot:
            from fms_fsdp.tools.inspect.plot import draw

            draw(data, num_steps, Path(config.plot))
