"""Learning-rate schedules: pure functions of the position in the run; no state.

    lr = base * position / warmup         before the end of the warmup
         base * multiplier                after it, constant from the end of the decay on

With p from 0 at the end of the warmup to 1 at the end of the decay, n the position since the
warmup, and m the minimum (`--min_lr_ratio`), the multiplier of `--lr_schedule` is

    cosine       m + (1 - m) (1 + cos(pi p)) / 2     Loshchilov and Hutter, https://arxiv.org/abs/1608.03983
    linear       m + (1 - m) (1 - p)
    square       m + (1 - m) (1 - p)^2
    polynomial   m + (1 - m) (1 - p)^power
    wsd          1, then linear in the last phase    Hu et al., https://arxiv.org/abs/2404.06395
    constant     1
    annealing    max(m, 1 - p)                       NeMo's WarmupAnnealing
    inverse_sqrt max(m, sqrt(warmup / position))     also noam; Vaswani 2017, https://arxiv.org/abs/1706.03762
    step         max(m, gamma^floor(n / step_size))
    exponential  max(m, gamma^(n / step_size))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fms_fsdp.config import OptimConfig
from fms_fsdp.config.formats import parse_duration
from fms_fsdp.errors import UserError

# schedules whose learning rate reaches its minimum at the end of the decay
DECAY_TO_END = frozenset(["cosine", "linear", "square", "polynomial", "wsd", "annealing"])


@dataclass(frozen=True)
class RunLength:
    """The length of a run. `tokens_at` returns the tokens read in the run by the end of a step."""

    num_steps: int
    seq_length: int
    tokens_at: Callable[[int], int]


@dataclass(frozen=True)
class Milestones:
    """Positions at which the schedule changes, in steps or, with `in_tokens`, in tokens.

    `decay_start` is the end of the warmup, except for wsd.
    """

    in_tokens: bool
    warmup: int
    decay_start: int
    decay_end: int
    step_size: int = 0


def find_milestones(config: OptimConfig, run: RunLength, *, in_tokens: bool = False) -> Milestones:
    """Returns the milestones of a run of this length.

    They are in tokens if a flag is in samples or tokens, or with `in_tokens` (a run with a batch
    size ramp) if no flag is in steps.

    Raises:
        UserError: the decay ends before it begins.
    """
    milestones = compute_milestones(config, run, in_tokens=in_tokens)
    _check_warmup(config, milestones)
    return milestones


def compute_milestones(
    config: OptimConfig, run: RunLength, *, in_tokens: bool = False
) -> Milestones:
    """Returns `find_milestones` without a check."""
    spans = {name: parse_duration(name, text) for name, text in config.durations().items()}
    units = {span.unit for span in spans.values()}
    if units & {"samples", "tokens"}:
        in_tokens = True
    elif "steps" in units:
        in_tokens = False

    def position(step: int) -> int:
        """Returns the end of a step in the unit of the milestones."""
        return run.tokens_at(step) if in_tokens and step > 0 else step

    def steps(name: str) -> int:
        number, unit = spans[name]
        if unit == "fraction":
            number *= run.num_steps
        return math.ceil(number)

    def length(name: str, default: int) -> int:
        """Returns the length of a span that begins with the run."""
        if name not in spans:
            return position(default)
        number, unit = spans[name]
        match unit:
            case "tokens":
                return int(number)
            case "samples":
                return int(number) * run.seq_length
            case _:
                return position(steps(name))

    warmup = length("warmup", min(2000, max(1, run.num_steps // 20)))
    last_step = run.num_steps - config.constant_steps
    end = position(last_step)
    start = warmup
    if config.lr_schedule != "wsd":
        end = length("lr_decay", last_step)
    elif "lr_decay" not in spans:
        start = max(warmup, end - -(-end // 10))
    elif spans["lr_decay"].unit in ("samples", "tokens"):
        start = end - length("lr_decay", 0)
    else:
        start = position(last_step - steps("lr_decay"))
    return Milestones(in_tokens, warmup, start, end, length("lr_step_size", 0))


def _check_warmup(config: OptimConfig, milestones: Milestones) -> None:
    """Raises UserError if the warmup is longer than the run before the decay."""
    warmup = milestones.warmup
    start = milestones.decay_start
    end = milestones.decay_end
    if warmup > min(start, end):
        names = ("warmup", "warmup_steps", "lr_decay", "constant_steps")
        given = [f"--{name}={getattr(config, name)}" for name in names if getattr(config, name)]
        unit = "tokens" if milestones.in_tokens else "steps"
        limit = min(start, end)
        milestone = "begins" if start < end else "ends"
        fix = f"--warmup={limit // 10}{unit if milestones.in_tokens else ''}"
        if config.lr_decay or config.constant_steps:
            fix = "a shorter warmup or decay"
        raise UserError(
            f"{', '.join(given)}: the warmup takes {warmup:,} {unit}, but the decay {milestone} at "
            f"{limit:,}; use {fix}, or a larger --num_steps"
        )


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the position in the run."""

    config: OptimConfig
    milestones: Milestones

    def __call__(self, step: int, tokens: int, base: float) -> float:
        """Returns the learning rate of 1-based `step`, at whose end `tokens` are read.

        Args:
            base: the peak learning rate of the parameter group.
        """
        points = self.milestones
        position = tokens if points.in_tokens else step
        if position < points.warmup:
            return base * position / points.warmup
        return base * self._multiplier(position)

    def _multiplier(self, position: int) -> float:
        config = self.config
        points = self.milestones
        minimum = self.config.min_ratio
        if position <= points.decay_start:  # also if the run ends with the warmup
            p = 0.0
        elif position >= points.decay_end:
            p = 1.0
        else:
            p = (position - points.decay_start) / (points.decay_end - points.decay_start)
        position = min(position, points.decay_end)
        n = (position - points.warmup) / max(1, points.step_size)
        match config.lr_schedule:
            case "constant":
                return 1.0
            case "annealing":
                return max(minimum, 1 - p)
            case "inverse_sqrt" | "noam":
                return max(minimum, math.sqrt(max(1, points.warmup) / max(1, position)))
            case "step":
                return max(minimum, math.pow(config.lr_gamma, int(n)))
            case "exponential":
                return max(minimum, math.pow(config.lr_gamma, n))
            case "cosine":
                return minimum + (1 - minimum) * (0.5 * (1 + math.cos(math.pi * p)))
            case "square":
                power = 2.0
            case "polynomial":
                power = config.lr_power
            case _:  # linear, wsd
                power = 1.0
        return minimum + (1 - minimum) * float((1 - p) ** power)
