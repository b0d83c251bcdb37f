"""What `estimate` is asked of devices that need not be there, and the answer: plans, or a search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fms_fsdp.config import TrainConfig
from fms_fsdp.errors import UserError
from fms_fsdp.planner.choice import choose_plan, cluster_of, rows_to_search
from fms_fsdp.planner.days import Stops, whole_run
from fms_fsdp.planner.plan import Cluster
from fms_fsdp.planner.search import MARGIN, enough_devices, search
from fms_fsdp.planner.words import Figures, Predicted, as_json, compare, describe_plan
from fms_fsdp.predict.hardware import DeviceKind


@dataclass(frozen=True)
class Asked:
    """Flags, devices and numbers of them. `most_rows`: of a step, where the flags do not say how many."""

    config: TrainConfig
    hardware: DeviceKind
    devices_per_node: int
    most_rows: int
    stops: Stops

    def cluster(self, num_devices: int) -> Cluster:
        return cluster_of(self.hardware, num_devices, self.devices_per_node)


@dataclass(frozen=True)
class Answer:
    """The plans; `refused`: why some numbers of devices have none; `note`: what is to be said beside them."""

    rows: Sequence[Predicted]
    refused: Mapping[int, str] = field(default_factory=dict)
    note: str = ""
    is_search: bool = False

    def parts(self) -> Iterator[str | Figures]:
        """Lines and tables for people."""
        if self.is_search:
            yield self.note
            yield from [_found(self.rows)] if self.rows else []
        elif len(self.rows) == 1 and not self.refused:
            yield from describe_plan(self.rows[0])
        else:
            yield compare(self.rows, "devices")
            yield from (f"{number} devices: {why}" for number, why in self.refused.items())

    def as_json(self) -> dict[str, Any] | list[dict[str, Any]]:
        """All figures for a program."""
        plans = list(map(as_json, self.rows))
        if self.is_search:
            return {"note": self.note, "plans": plans}
        refused = [{"num_devices": number, "refused": why} for number, why in self.refused.items()]
        several = [*plans, *refused]
        return several[0] if len(several) == 1 else several


def answer(question: Asked, numbers: Sequence[int]) -> Answer:
    """A plan for each number of devices.

    Raises:
        UserError: every number is refused.
    """
    rows, refused = list[Predicted](), dict[int, UserError]()
    for number in numbers:
        try:
            choice = choose_plan(question.config, question.cluster(number), question.most_rows)
        except UserError as error:
            refused[number] = error
            continue
        run = whole_run(choice.plan, question.stops)
        rows.append(Predicted(f"{number:,}", choice.plan, run, is_fitted=choice.is_fitted))
    if not rows:
        raise next(iter(refused.values()))
    return Answer(rows, {number: str(error) for number, error in refused.items()})


def answer_search(question: Asked, num_devices: int) -> Answer:
    """The fastest layouts that fit so many devices, or how many devices would do.

    Raises:
        UserError: the flags are refused whatever the layout is.
    """
    cluster = question.cluster(num_devices)
    wanted = rows_to_search(question.config, cluster, question.most_rows)
    what = (
        f"{question.config.model.name} on {num_devices:,} x {question.hardware.name}, {wanted:,} rows a step"
    )
    rows = []
    for place, found in enumerate(search(question.config, cluster, wanted), 1):
        rows.append(Predicted(str(place), found.plan, whole_run(found.plan, question.stops), found.flags))
    if rows:
        return Answer(rows, note=f"{what}: the fastest layouts that fit", is_search=True)
    enough = enough_devices(question.config, cluster, wanted)
    if enough is None:
        choose_plan(question.config, cluster, question.most_rows)
    remedy = f"{enough:,} devices would do" if enough else "65,536 devices would not do either"
    room = f"{MARGIN:.0%} of {question.hardware.memory_gib:g} GiB"
    return Answer([], note=f"{what}: no layout fits {room}; {remedy}", is_search=True)


def _found(rows: Sequence[Predicted]) -> Figures:
    """The layouts of a search, with the flags to copy."""
    lines = []
    for row in rows:
        plan = row.plan
        rate, days = f"{plan.tokens_per_s:,.0f}", f"{row.run.days.worst_days:,.2f}"
        lines.append((row.label, f"{plan.needed / 2**30:.1f}", rate, f"{plan.mfu:.1%}", days, row.flags))
    head = ("", "GiB a rank", "tokens/s a device", "MFU", "days", "flags")
    return Figures(head, lines, text_columns=(5,))
