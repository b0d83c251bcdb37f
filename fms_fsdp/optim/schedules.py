"""Learning-rate schedules: pure functions of the place in the run and of a group's base rate; no state.

    rate = base * place / warmup         before the end of the warm-up
           base * multiplier             from there on; flat from the end of the decay on

With p from 0 at the end of the warm-up to 1 at the end of the decay, n the place since the warm-up, and m the
least share (`--min_lr_ratio`), the multiplier of `--lr_schedule` is

    cosine       m + (1 - m) (1 + cos(pi p)) / 2     Loshchilov and Hutter, https://arxiv.org/abs/1608.03983
    linear       m + (1 - m) (1 - p)
    square       m + (1 - m) (1 - p)^2
    polynomial   m + (1 - m) (1 - p)^power
    wsd          1, then linear in the last phase    Hu et al., https://arxiv.org/abs/2404.06395
    constant     1
    annealing    max(m, 1 - p)                       NeMo's WarmupAnnealing
    inverse_sqrt max(m, sqrt(warmup / place))        noam too; Vaswani 2017, https://arxiv.org/abs/1706.03762
    step         max(m, gamma^floor(n / step_size))
    exponential  max(m, gamma^(n / step_size))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fms_fsdp.config import OptimConfig
from fms_fsdp.config.spans import parse_span
from fms_fsdp.errors import UserError

_FALLING: dict[str, Callable[[float, float], float]] = {  # of p and power, from 1 to 0
    "cosine": lambda p, power: 0.5 * (1 + math.cos(math.pi * p)),
    "linear": lambda p, power: 1 - p,
    "square": lambda p, power: (1 - p) ** 2,
    "polynomial": lambda p, power: (1 - p) ** power,
    "wsd": lambda p, power: 1 - p,
}


@dataclass(frozen=True)
class Length:
    """The length of a run: the steps, the tokens of a row, the tokens of the whole run by the end of a
    step."""

    num_steps: int
    seq_length: int
    tokens_at: Callable[[int], int]


@dataclass(frozen=True)
class Corners:
    """Where the schedule of a run bends, counted in steps or, with `in_tokens`, in tokens of the whole run.

    `decay_start` is the end of the warm-up, but for wsd.
    """

    in_tokens: bool
    warmup: int
    decay_start: int
    decay_end: int
    step_size: int = 0


def find_corners(section: OptimConfig, run: Length, *, in_tokens: bool = False) -> Corners:
    """The corners that the flags name in a run of this length. A schedule counts tokens where a flag does,
    and with `in_tokens`, for a run whose batch grows, unless a flag counts steps.

    Raises:
        UserError: the decay ends before it begins.
    """
    spans = {name: parse_span(name, text) for name, text in section.spans().items()}
    units = {span.unit for span in spans.values()}
    in_tokens = bool(units & {"samples", "tokens"}) or (in_tokens and "steps" not in units)

    def place(step: int) -> int:
        return run.tokens_at(step) if in_tokens and step > 0 else step

    def size(name: str, default: int) -> int:
        """The length of a span that begins with the run."""
        number, unit = spans.get(name, (default, "steps"))
        if unit in ("samples", "tokens"):
            return int(number) * (run.seq_length if unit == "samples" else 1)
        return place(math.ceil(number * run.num_steps) if unit == "share" else int(number))

    warmup = size("warmup", min(2000, max(1, run.num_steps // 20)))
    last_step = run.num_steps - section.constant_steps
    end, start = place(last_step), warmup
    if section.lr_schedule == "wsd" and "lr_decay" not in spans:
        start = max(warmup, end - -(-end // 10))
    elif section.lr_schedule == "wsd":
        number, unit = spans["lr_decay"]
        steps = math.ceil(number * (run.num_steps if unit == "share" else 1))
        start = end - size("lr_decay", 0) if unit in ("samples", "tokens") else place(last_step - steps)
    elif "lr_decay" in spans:
        end = size("lr_decay", 0)
    if warmup > min(start, end):
        unit, flags = "tokens" if in_tokens else "steps", "warmup warmup_steps lr_decay constant_steps"
        values = {name: getattr(section, name) for name in flags.split()}
        given = ", ".join(f"--{name} ({value})" for name, value in values.items() if value)
        raise UserError(
            f"{given}: the warm-up must not end (at {warmup:,} {unit}) after the decay begins or ends (at "
            f"{min(start, end):,}); shorten one span, or lengthen the run"
        )
    return Corners(in_tokens, warmup, start, end, size("lr_step_size", 0))


@dataclass(frozen=True)
class Schedule:
    """The learning rate, once the corners are known."""

    section: OptimConfig
    corners: Corners

    def __call__(self, step: int, tokens: int, base: float) -> float:
        """The rate of 1-based `step`, at whose end `tokens` are read, of a group with the rate `base`."""
        corners, place = self.corners, tokens if self.corners.in_tokens else step
        if place < corners.warmup:
            return base * place / corners.warmup
        return base * self._multiplier(min(place, corners.decay_end))

    def _multiplier(self, place: int) -> float:
        section, corners, least = self.section, self.corners, self.section.least_share
        decayed = max(0, place - corners.decay_start) / max(1, corners.decay_end - corners.decay_start)
        decayed = decayed if place < corners.decay_end else 1.0
        since = (place - corners.warmup) / max(1, corners.step_size)
        match section.lr_schedule:
            case "constant":
                return 1.0
            case "annealing":
                return max(least, 1 - decayed)
            case "inverse_sqrt" | "noam":
                return max(least, math.sqrt(max(1, corners.warmup) / max(1, place)))
            case "step":
                return max(least, math.pow(section.lr_gamma, int(since)))
            case "exponential":
                return max(least, math.pow(section.lr_gamma, since))
        return least + (1 - least) * _FALLING[section.lr_schedule](decayed, section.lr_power)
