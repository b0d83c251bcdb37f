"""`python -m fms_fsdp estimate`: how long a training will take, as a range, before the machine is asked for;
what a rank holds and sends; the learning rate over the run.

    compute = FLOPs per token × tokens / (devices × achieved FLOP/s)
    FLOPs per token: 6·N + 12·L·D·S, up to 4/3 of it where blocks are recomputed

The forward pass multiplies and adds each of N parameters once a token (2·N), the backward pass twice that
(4·N), recomputation the forward pass again (2·N): 6 to 8 FLOPs a parameter and token. Source: Narayanan et
al. 2021, https://arxiv.org/abs/2104.04473, equations 3 and 4.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fms_fsdp.config import BatchPlan, ModelConfig, OptimConfig, ParallelConfig, PrecisionConfig, flag
from fms_fsdp.config.batch import check_rampup
from fms_fsdp.config.precision import Precision
from fms_fsdp.config.ramp import BatchIntervals, BatchRamp
from fms_fsdp.errors import UserError
from fms_fsdp.models.flops import flops_per_token
from fms_fsdp.models.variants import LlamaConfig, resolve_model
from fms_fsdp.tools.table import table

_DAY_S = 86400.0
_NODE = 8  # devices


@dataclass(frozen=True)
class EstimateConfig:
    """What to train, on which devices, and what interrupts the run. One of three rates must be given, if not
    the schedule alone is drawn.

    The flags of parallelism and of the optimizer are those of a training.
    """

    model_variant: str = flag("7b", "the model whose FLOPs count")
    seq_length: int = flag(4096, "tokens of a row, for the FLOPs of attention", minimum=1)
    parameters: int | None = flag(None, "number, in place of a variant; attention is left out", minimum=1)
    num_tokens: int = flag(1_000_000_000_000, "number of tokens to train on", minimum=1)
    num_devices: int = flag(8, "number of devices", minimum=1)
    tflops: float | None = flag(None, "achieved TFLOP/s of a device, recomputation counted", minimum=1e-9)
    device: str | None = flag(None, "cpu: measure the rate of this CPU, in place of tflops", choices=("cpu",))
    tokens_per_sec_per_device: float | None = flag(None, "measured tokens/s of a device", minimum=1e-9)
    batch_tokens: int = flag(4_194_304, "tokens of a step", minimum=1)
    rampup_batch_size: tuple[int, ...] = flag((), "start,increment,samples of a growing batch", minimum=1)
    checkpoint_interval: int = flag(1000, "steps between saves", minimum=1)
    save_s: float = flag(10.0, "seconds for which the loop waits in a save", minimum=0)
    eval_interval: int = flag(1000, "steps between validations", minimum=1)
    eval_s: float = flag(60.0, "seconds of a validation", minimum=0)
    restarts_a_week: float = flag(2.0, "launches that end early; each loses half a save interval", minimum=0)
    restart_s: float = flag(600.0, "seconds from the end of a launch to the next step", minimum=0)
    grad_accum_steps: int = flag(1, "micro-steps of a step, for what a rank holds and sends", minimum=1)
    plot_schedule: bool = flag(False, "draw the learning rate and the batch over the run")
    output: str = flag("", "FILE.html: a page for plot_schedule, in place of the terminal")
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optim: OptimConfig = OptimConfig()

    def __post_init__(self) -> None:
        if self.output and not self.plot_schedule:
            raise UserError(f"--output ({self.output}) has no effect without --plot_schedule=True")
        rates = ("tflops", "tokens_per_sec_per_device", "device")
        given = [f"--{name}" for name in rates if getattr(self, name) is not None]
        if len(given) > 1 or not (given or self.plot_schedule):
            needed = "--tflops, --tokens_per_sec_per_device or --device=cpu"
            raise UserError(f"one of {needed} must be given; given: {' '.join(given) or 'none'}")
        check_rampup(self.rampup_batch_size, self.batch_tokens // self.row_tokens)

    @property
    def row_tokens(self) -> int:
        """What a batch is counted in: a ramp in rows, another one in tokens."""
        return self.seq_length if self.rampup_batch_size else 1

    @cached_property
    def rate_tflops(self) -> float | None:
        """Achieved TFLOP/s of a device, given or measured."""
        return self.tflops if self.device is None else _cpu_flops(self.resolved_precision().compute) / 1e12

    def resolved_precision(self) -> Precision:
        """What the flags name; bf16 where they name none."""
        return self.precision.resolve(self.precision.named or "bf16")

    @cached_property
    def batches(self) -> BatchIntervals:
        return BatchIntervals(BatchRamp.to(self.batch_tokens // self.row_tokens, self.rampup_batch_size))

    @property
    def num_steps(self) -> int:
        return self.batches.steps_for(-(-self.num_tokens // self.row_tokens))

    @property
    def idle_tokens(self) -> int:
        """What the devices could compute that have no row in the small batches of a ramp."""
        last, idle = self.num_steps, 0
        for interval, following in pairwise(self.batches.intervals):
            steps = min(following.step, last) - min(interval.step, last)
            idle += steps * max(0, self.num_devices - interval.batch)
        return self.row_tokens * idle


@dataclass(frozen=True)
class Estimate:
    """Days of a training: computing, without and with recomputation, and what interruptions add."""

    plain_days: float
    recomputing_days: float
    save_days: float
    eval_days: float
    restart_days: float

    @property
    def worst_days(self) -> float:
        return self.recomputing_days + self.save_days + self.eval_days + self.restart_days


def estimate(config: EstimateConfig) -> Estimate:
    """The days of each part. A measured rate holds its recomputation: it gives both ends of the range."""
    if config.tokens_per_sec_per_device is not None:
        rate, most = config.tokens_per_sec_per_device, 1.0
    else:
        assert config.rate_tflops is not None
        rate, most = config.rate_tflops * 1e12 / _flops_per_token(config), 4 / 3
    plain = (config.num_tokens + config.idle_tokens) / (config.num_devices * rate) / _DAY_S
    longest = most * plain
    steps = config.num_steps
    lost_s = config.restart_s + config.checkpoint_interval / 2 * longest * _DAY_S / steps
    return Estimate(
        plain_days=plain,
        recomputing_days=longest,
        save_days=steps // config.checkpoint_interval * config.save_s / _DAY_S,
        eval_days=steps // config.eval_interval * config.eval_s / _DAY_S,
        restart_days=config.restarts_a_week * longest / 7 * lost_s / _DAY_S,
    )


def _flops_per_token(config: EstimateConfig) -> int:
    if config.parameters is not None:
        return 6 * config.parameters
    return flops_per_token(_model(config), config.seq_length)


def _model(config: EstimateConfig) -> LlamaConfig:
    return resolve_model(ModelConfig(model_variant=config.model_variant), seq_length=config.seq_length)


def _sharding(config: EstimateConfig) -> str:
    """What a launch says of the same flags, on nodes of eight devices."""
    from fms_fsdp.mesh import resolve_dims
    from fms_fsdp.optim.optimizers import state_bytes
    from fms_fsdp.predict.memory import estimate_memory
    from fms_fsdp.runtime import World
    from fms_fsdp.spec.words import describe_sharding

    model, precision = _model(config), config.resolved_precision()
    section, length, world = config.parallel, config.seq_length, config.num_devices
    dims = resolve_dims(section, config.model_variant, World(0, 0, world, math.gcd(world, _NODE)))
    ranks = dims.size("dp")
    rows = max(1, config.batch_tokens // (length * ranks * config.grad_accum_steps))
    batch = BatchPlan(rows, config.grad_accum_steps, ranks)
    need = estimate_memory(
        model,
        dims,
        section,
        precision=precision,
        batch=batch,
        seq_length=length,
        optimizer_bytes=state_bytes(config.optim, model, precision),
    )
    return describe_sharding(model, need, precision, batch, section, length)


def _cpu_flops(compute: str, size: int = 1024, seconds: float = 0.15) -> float:
    """The best rate of square matrix products on this process's CPU threads, in FLOP/s. It looks `seconds`,
    and five times at least: a neighbour that holds a core for a moment must not make the rate look low. Where
    one takes longer than `seconds`, as in fp16 on most CPUs, it is all."""
    import torch

    from fms_fsdp.parallel.precision import DTYPES

    a, b = (torch.randn(size, size).to(DTYPES[compute]) for _ in range(2))
    rates, until = list[float](), time.perf_counter() + seconds
    while (begin := time.perf_counter()) < until or len(rates) < 5:
        torch.mm(a, b)
        rates.append(2 * size**3 / (time.perf_counter() - begin))
        if time.perf_counter() - begin > seconds:
            break
    return max(rates)


def main(config: EstimateConfig) -> None:
    """The command `estimate`.

    Raises:
        UserError: the flags contradict one another.
        OSError: the page of `plot_schedule` cannot be written.
    """
    if config.plot_schedule:
        from fms_fsdp.optim.schedules import Length, Schedule, find_corners
        from fms_fsdp.tools.plot_schedule import show_schedule

        batches, a_row = config.batches, config.row_tokens
        run = Length(config.num_steps, config.seq_length, lambda step: batches.rows_of(step) * a_row)
        show_schedule(Schedule(config.optim, find_corners(config.optim, run)), run, config.output)
        if config.rate_tflops is None and config.tokens_per_sec_per_device is None:
            return
    found = estimate(config)
    sharding = _sharding(config) if config.parameters is None else ""
    model = f"{config.parameters:,} parameters" if config.parameters is not None else config.model_variant
    if config.rate_tflops is not None:
        rate = f"{config.rate_tflops:g} TFLOP/s"
        compute = {"nothing recomputed": found.plain_days, "every block recomputed": found.recomputing_days}
    else:
        rate, compute = f"{config.tokens_per_sec_per_device:,g} tokens/s", {"as measured": found.plain_days}
    work = f"{config.num_tokens:,} tokens, {config.num_devices} devices at {rate} each"
    print(f"{model}, {work}: {config.num_steps:,} steps")
    if sharding:
        print(sharding)
    if config.rampup_batch_size:
        from fms_fsdp.spec.words import describe_ramp

        print(describe_ramp(config.batches))
    rows = [(f"compute, {what}", f"{days:.2f}") for what, days in compute.items()]
    rows += [("saves", f"{found.save_days:.2f}"), ("validations", f"{found.eval_days:.2f}")]
    rows.append((f"{config.restarts_a_week:g} restarts a week", f"{found.restart_days:.2f}"))
    print(table(("", "days"), rows))
    print(f"between {found.plain_days:.2f} days, if nothing stops the run, and {found.worst_days:.2f} days")
