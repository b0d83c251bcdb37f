"""Learning-rate schedules as arithmetic: their milestones in every unit, and what lies between."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest

from fms_fsdp.config import OptimConfig
from fms_fsdp.config.formats import parse_duration
from fms_fsdp.optim.schedules import Milestones, RunLength, Schedule, find_milestones

RUN = RunLength(num_steps=110, seq_length=8, tokens_at=lambda step: 40 * step)


def schedule(run: RunLength = RUN, **flags: Any) -> Schedule:
    section = OptimConfig(**{"learning_rate": 2.0, "warmup": "10"} | flags)
    return Schedule(section, find_milestones(section, run))


def rate(made: Schedule, step: int) -> float:
    return made(step, RUN.tokens_at(step), 2.0)


def test_growing_batch_counts_tokens_by_default() -> None:
    ramp = RunLength(10, 8, lambda step: 4 * step * (step + 1))
    cases = {
        "0.2": Milestones(True, 24, 24, 440),
        "2": Milestones(False, 2, 2, 10),
        "3samples": Milestones(True, 24, 24, 440),
    }
    for warmup, expected in cases.items():
        assert find_milestones(OptimConfig(warmup=warmup), ramp, in_tokens=True) == expected
    assert find_milestones(OptimConfig(), ramp, in_tokens=True).in_tokens
    assert not find_milestones(OptimConfig(), ramp).in_tokens


def test_cosine_equals_its_formula_to_the_bit() -> None:
    def formula(step: int, base: float, warmup: int, steps: int, least: float) -> float:
        if step < warmup:
            return base * step / warmup
        if step >= steps and step > warmup:
            return base * least
        progress = (step - warmup) / max(1, steps - warmup)
        return base * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * progress)))

    draw = random.Random(0)
    for _ in range(1000):
        steps = draw.choice([1, 7, 100, 12_345, 10**6])
        warmup, step = draw.randint(0, steps), draw.randint(1, steps + 3)
        base, least = draw.random() * 1e-2, draw.choice([0.0, 0.1, 1.0, draw.random()])
        run = RunLength(steps, 64, lambda step: step * 4096)
        flags: dict[str, Any]
        for flags in ({"warmup_steps": warmup}, {"warmup": f"{warmup * 4096}tokens"}):
            section = OptimConfig(learning_rate=base, min_lr_ratio=least, **flags)
            made = Schedule(section, find_milestones(section, run))
            found = made(step, run.tokens_at(step), base)
            assert found == formula(step, base, warmup, steps, least)


@pytest.mark.parametrize(
    ("flags", "at"),
    [
        (dict(lr_schedule="linear"), {60: 1.1, 110: 0.2, 111: 0.2}),
        (dict(lr_schedule="square", min_lr=0.0), {60: 0.5, 85: 2.0 * 0.25**2, 110: 0.0}),
        (dict(lr_schedule="polynomial", lr_power=3.0, min_lr=0.0), {60: 0.25, 110: 0.0}),
        (dict(lr_schedule="constant"), {10: 2.0, 60: 2.0, 110: 2.0, 500: 2.0}),
        (dict(lr_schedule="wsd"), {11: 2.0, 98: 2.0, 99: 2.0, 110: 0.2}),
        (dict(lr_schedule="wsd", lr_decay="20"), {90: 2.0, 100: 1.1, 110: 0.2}),
        (dict(lr_schedule="wsd", lr_decay="0.5"), {55: 2.0, 110: 0.2}),
        (dict(lr_schedule="inverse_sqrt"), {10: 2.0, 40: 1.0, 90: 2 / 3}),
        (dict(lr_schedule="noam"), {10: 2.0, 40: 1.0}),
        (dict(lr_schedule="annealing"), {60: 1.0, 105: 0.2, 110: 0.2}),
        (
            dict(lr_schedule="step", lr_step_size="30", lr_gamma=0.5, min_lr=0.0),
            {39: 2.0, 40: 1.0, 70: 0.5},
        ),
        (
            dict(lr_schedule="exponential", lr_step_size="25", lr_gamma=0.25),
            {35: 0.5, 22: 2 * 0.25**0.48},
        ),
        (dict(constant_steps=50), {35: 1.1, 60: 0.2, 110: 0.2}),
        (dict(lr_decay="60"), {35: 1.1, 60: 0.2, 110: 0.2}),
        (dict(lr_decay="0.5", min_lr=0.5), {55: 0.5}),
        (dict(warmup="0.1"), {10: 2.0 * 10 / 11, 11: 2.0}),
        (dict(warmup="50samples"), {5: 1.0, 10: 2.0}),
        (
            dict(warmup="400tokens", lr_decay="2400tokens"),
            {5: 1.0, 10: 2.0, 35: 1.1, 60: 0.2, 110: 0.2},
        ),
        (dict(warmup="400tokens", lr_decay="60"), {35: 1.1, 60: 0.2}),
        (dict(warmup="110"), {55: 1.0, 109: 2.0 * 109 / 110, 110: 2.0}),
        (dict(warmup="60", constant_steps=50), {60: 2.0, 61: 0.2, 110: 0.2}),
        (dict(warmup="0"), {1: 2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 110)))}),
    ],
)
def test_schedules_at_their_milestones(flags: dict[str, Any], at: dict[int, float]) -> None:
    made = schedule(**flags)
    assert {step: rate(made, step) for step in at} == pytest.approx(at)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "inverse_sqrt", "square", "annealing"])
def test_rate_falls_from_warmup_to_its_minimum(name: str) -> None:
    for steps in (1, 2, 5, 300):
        made = schedule(RunLength(steps, 8, RUN.tokens_at), lr_schedule=name, warmup=None)
        rates = [rate(made, step) for step in range(1, steps + 9)]
        top = rates.index(max(rates))
        assert all(a >= b >= 0.2 * (1 - 1e-12) for a, b in pairwise(rates[top:]))
        assert 0 < min(rates) and max(rates) <= 2.0


def test_default_warmup_is_capped() -> None:
    milestones = [
        schedule(RunLength(steps, 1, lambda step: step), warmup=None).milestones
        for steps in (1000, 10**6, 3)
    ]
    assert [found.warmup for found in milestones] == [50, 2000, 1]


def test_milestones_in_tokens_ignore_steps() -> None:
    """A run of 10 tokens a step reads 40 a step from step 50 on; its milestones are in tokens."""
    made = Schedule(OptimConfig(warmup="1000tokens"), Milestones(True, 1000, 1000, 4000))
    assert made(50, 500, 2.0) == 1.0 and made(51, 540, 2.0) == pytest.approx(1.08)


@pytest.mark.parametrize(
    ("text", "number", "unit"),
    [
        ("2000", 2000, "steps"),
        ("2ksteps", 2000, "steps"),
        ("216320samples", 216_320, "samples"),
        ("10Btokens", 10**10, "tokens"),
        ("5e6 tokens", 5_000_000, "tokens"),
        ("0", 0, "steps"),
        ("0.25", 0.25, "fraction"),
    ],
)
def test_durations_are_parsed(text: str, number: float, unit: str) -> None:
    assert parse_duration("warmup", text) == (number, unit)
