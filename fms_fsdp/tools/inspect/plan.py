"""What a run will have read by step N, before it trains: `python -m fms_fsdp inspect plan`.

history ── position(N), find(end of epoch) ──> tokens, epochs, steps at which they end   (arithmetic alone)
shards ─── a few rows of each source ────────> share of labels that are -100             (the only tokens read)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fms_fsdp.config import flag
from fms_fsdp.data.batch import IGNORED_LABEL, empty_batch
from fms_fsdp.data.order.history import Segment
from fms_fsdp.data.order.mixture import NUM_SLOTS
from fms_fsdp.data.order.tapes import Geometry
from fms_fsdp.data.pieces import Row
from fms_fsdp.data.shards.manifest import Source
from fms_fsdp.tools.inspect.step import InspectConfig, Inspected, inspected

MANY_EPOCHS = 4  # Source: Muennighoff et al., "Scaling data-constrained language models" (2023)
_SHOWN_ENDS = 4


@dataclass(frozen=True)
class PlanConfig(InspectConfig):
    """How far to plan, and what to draw."""

    num_steps: int | None = flag(None, "plan up to this step (default: the run's last)", minimum=1)
    sample_rows: int = flag(
        16, "rows of each source read to measure its -100 labels; 0 reads none", minimum=0
    )
    plot: str = flag(
        "", "FILE.png: draw the mixture over the steps and the lengths of documents (needs matplotlib)"
    )


@dataclass(frozen=True)
class SourcePlan:
    """One source by the end of a step. `tokens` are those of an epoch, separators counted; `ends`: (step, skipped) at which
    its first epochs end, the last of them the first after the planned step; `ignored`: share of -100 labels, None if not read."""

    name: str
    weight: float
    tokens: int
    documents: int | None
    shards: int | None
    used: int
    epochs: float
    ends: tuple[int, ...]
    ignored: float | None
    geometry: Geometry
    token_bytes: int


def plan_sources(data: Inspected, num_steps: int, sample_rows: int) -> list[SourcePlan]:
    """Returns what every source of the run's history has supplied after `num_steps`, sorted by name.

    Raises: ShardError from the rows sampled.
    """
    history = data.rows.history
    consumed = data.rows.consumption(num_steps)
    segment = [segment for segment in history.segments if segment.after < num_steps][-1]
    sources = {source.name: source for corpus in data.corpora for source in corpus.sources}
    plans = []
    for name in sorted(consumed):
        course, source = data.rows.course(name), sources.get(name)
        era = course.era(history.position(num_steps)[name])
        plans.append(
            SourcePlan(
                name=name,
                weight=segment.quotas.get(name, 0) / NUM_SLOTS,
                tokens=course.num_tokens,
                documents=int(source.docs.sum()) if source else None,
                shards=len(source.paths) if source else None,
                used=int(consumed[name]["tokens"]),
                epochs=float(consumed[name]["epoch"]),
                ends=_epoch_ends(data, name, num_steps),
                ignored=ignored_share(data, name, sample_rows) if source and sample_rows else None,
                geometry=era.tapes.geometry,
                token_bytes=_token_bytes(data, source) if source else 0,
            )
        )
    return plans


def _epoch_ends(data: Inspected, name: str, num_steps: int) -> tuple[int, ...]:
    ends: list[int] = []
    while len(ends) <= _SHOWN_ENDS:
        found = data.rows.history.find(name, data.rows.course(name).rows_until(len(ends) + 1) - 1)
        if found is None:
            break
        ends.append(found.step)
        if found.step > num_steps:
            break
    return tuple(ends)


def ignored_share(data: Inspected, name: str, num_rows: int) -> float:
    """Returns the share of -100 among the labels of `num_rows` rows spread over an epoch of the source, in its last length."""
    era = data.rows.course(name).eras[-1]
    size, epoch_rows, first = (
        era.tapes.geometry.seq_length,
        era.tapes.geometry.num_rows,
        era.first + era.num_begun,
    )
    batch = empty_batch(1, size)
    out = Row(*(tensor[0].numpy() for tensor in batch))
    ignored = 0
    for n in sorted({(2 * i + 1) * epoch_rows // (2 * num_rows) for i in range(num_rows)}):
        data.rows.read(data.rows.place(name, first + n), out)
        ignored += int(np.count_nonzero(out.labels == IGNORED_LABEL))
    return ignored / (min(num_rows, epoch_rows) * size)


def _token_bytes(data: Inspected, source: Source) -> int:
    first = int(np.argmax(source.tokens > 0))
    return int(data.rows.reader(source.name).shard(first).dtype.itemsize)


def warnings_of(plans: Iterable[SourcePlan], num_steps: int) -> list[str]:
    """Returns a line for everything a person should think about before training."""
    lines = []
    for plan in plans:
        if plan.epochs > MANY_EPOCHS:
            lines.append(
                f"source {plan.name} is read {plan.epochs:.1f} times by step {num_steps}; beyond about {MANY_EPOCHS} epochs "
                "repeated text teaches less and less: lower its weight, or add data"
            )
        if plan.geometry.num_main_rows == 0:
            lines.append(
                f"source {plan.name} has {plan.geometry.num_rows} rows, too few for windows: its rows are shuffled, but the "
                "documents of a row are neighbours"
            )
        if plan.ignored is not None and plan.ignored > 0.01:
            lines.append(f"source {plan.name} has {100 * plan.ignored:.1f} % of its labels masked")
    return lines


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns aligned columns, the first to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    pads = [str.ljust, *[str.rjust] * (len(head) - 1)]
    return "\n".join(
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)).rstrip()
        for line in lines
    )


def _count(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _ends_text(ends: tuple[int, ...], num_steps: int) -> str:
    inside = [f"{step:,}" for step in ends if step <= num_steps]
    if len(inside) > _SHOWN_ENDS:
        return ", ".join([*inside[:_SHOWN_ENDS], "…"])
    later = [f"(later: {step:,})" for step in ends if step > num_steps]
    return ", ".join(inside + later) or "-"


def _segment_text(segment: Segment) -> str:
    shares = ", ".join(f"{name} {quota / NUM_SLOTS:.4f}" for name, quota in sorted(segment.quotas.items()))
    return f"from step {segment.after + 1:,} on: {segment.batch} rows of {segment.seq_length:,} tokens a step; {shares}"


def _used_cells(plans: Sequence[SourcePlan], used: int, num_steps: int) -> list[tuple[str, ...]]:
    """What is read of each source, a row each; `used` are the tokens of all."""
    return [
        (
            plan.name,
            f"{plan.weight:.4f}" if plan.weight else "dropped",
            f"{plan.tokens:,}",
            _count(plan.documents),
            f"{plan.used:,}",
            f"{100 * plan.used / used:.2f} %",
            f"{plan.epochs:.3f}",
            _ends_text(plan.ends, num_steps),
            "-" if plan.ignored is None else f"{100 * plan.ignored:.3f} %",
        )
        for plan in plans
    ]


def describe_plan(data: Inspected, plans: Sequence[SourcePlan], num_steps: int) -> str:
    """Returns the plan as two tables: what is read of each source, and how."""
    used = sum(plan.used for plan in plans)
    what = _used_cells(plans, used, num_steps)
    how = [
        (
            plan.name,
            _count(plan.shards),
            f"{g.num_rows:,}",
            f"{g.num_tapes if g.num_main_rows else 0:,}",
            f"{g.windows_per_tape:,}",
            f"{g.blocks_per_window} x {g.block_tokens:,}" if g.num_main_rows else "-",
            f"{100 * g.num_tail_rows / g.num_rows:.2f} %",
        )
        for plan in plans
        for g in [plan.geometry]
    ]
    history = data.rows.history
    windows = sum(
        p.geometry.num_tapes * p.geometry.blocks_per_window * p.geometry.block_tokens * p.token_bytes
        for p in plans
        if p.geometry.num_main_rows and p.weight
    )
    return "\n".join(
        [
            f"by step {num_steps:,}: {used:,} tokens, packing {data.section.packing}",
            *(f"  {_segment_text(segment)}" for segment in history.segments if segment.after < num_steps),
            *(
                f"  {name}: {passed_over:,} tokens are passed over by changes of seq_length"
                for name in sorted(plan.name for plan in plans)
                if (passed_over := data.rows.course(name).passed_over)
            ),
            *(
                f"  the rows planned for steps {skip.a:,} to {skip.b - 1:,} are passed over"
                for skip in history.skipped
            ),
            "",
            _table(
                (
                    "source",
                    "weight",
                    "tokens",
                    "documents",
                    "used",
                    "share",
                    "epochs",
                    "epochs end at step",
                    "-100 labels",
                ),
                what,
            ),
            "",
            _table(
                (
                    "source",
                    "shards",
                    "rows an epoch",
                    "tapes",
                    "windows a tape",
                    "blocks a window",
                    "tail rows",
                ),
                how,
            ),
            f"windows open at a time, of all ranks together: {windows / 2**20:,.1f} MiB of the shards; --logical_shards lowers it",
        ]
    )


def main(config: PlanConfig) -> None:
    """The command `inspect plan`."""
    with inspected(config) as data:
        num_steps = config.num_steps or data.num_steps
        if num_steps is None:
            raise ValueError("--num_steps is missing; name the step to plan for, or --run=FOLDER of a run")
        plans = plan_sources(data, num_steps, config.sample_rows)
        print(describe_plan(data, plans, num_steps))
        for line in warnings_of(plans, num_steps):
            print(f"warning: {line}")
        if config.plot:
            from fms_fsdp.tools.inspect.plot import draw

            draw(data, num_steps, config.plot)
            print(f"picture in {config.plot}")
