"""`python -m fms_fsdp estimate`: how long a training will take, before the machine is asked for; what a rank
holds and sends; the learning rate over the run. With the name of a device (`--device=h100_80gb`) all of it is
predicted by the planner; with a rate that is known, the days are a range:

    compute = FLOPs per token × tokens / (devices × achieved FLOP/s)
    FLOPs per token: 6·N + 12·L·D·S, up to 4/3 of it where blocks are recomputed

The forward pass multiplies and adds each of N parameters once a token (2·N), the backward pass twice that
(4·N), recomputation the forward pass again (2·N): 6 to 8 FLOPs a parameter and token. Source: Narayanan et
al. 2021, https://arxiv.org/abs/2104.04473, equations 3 and 4.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from fms_fsdp.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    ProfilerConfig,
    TrainConfig,
    TrainingConfig,
    flag,
    resolve_batch,
)
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.config.batch import check_rampup
from fms_fsdp.config.flag import free_flag
from fms_fsdp.config.precision import Precision
from fms_fsdp.config.ramp import BatchIntervals, BatchRamp
from fms_fsdp.errors import UserError
from fms_fsdp.models.flops import flops_per_token, num_params
from fms_fsdp.models.variants import LlamaConfig, resolve_model
from fms_fsdp.planner.days import Estimate, Stops, with_stops
from fms_fsdp.tools.table import table

_USUAL_TOKENS = 10**12  # of a run whose length is not given


@dataclass(frozen=True)
class PlannedEvaluations(EvalConfig):
    """The validations of a run that is planned: there are some, unlike in a training's default."""

    eval_interval: int = free_flag(1000, "steps between validations; 0 is off", minimum=0)


@dataclass(frozen=True)
class EstimateConfig:
    """What to train, on which devices, and what interrupts the run. One of three rates must be given, if not
    the schedule alone is drawn. Beside its own flags it takes every flag of a training.
    """

    parameters: int | None = flag(None, "number, in place of a variant; attention is left out", minimum=1)
    num_devices: tuple[int, ...] = flag(
        (8,), "number of devices, or several: 8,64,512", minimum=1, maximum=2**20
    )
    devices_per_node: int = flag(8, "number of devices of a node", minimum=1, maximum=2**20)
    tflops: float | None = flag(None, "achieved TFLOP/s of a device, recomputation counted", minimum=1e-9)
    device: str | None = flag(
        None, "a device of hardware.toml, whose speed is predicted; cpu: measure this CPU"
    )
    hardware: str = flag(
        "", "FILE.toml with devices of your own (fms_fsdp/predict/hardware.toml)", form="path"
    )
    tokens_per_sec_per_device: float | None = flag(None, "measured tokens/s of a device", minimum=1e-9)
    batch_tokens: int = flag(4_194_304, "tokens of a step, where no flag gives its rows", minimum=1)
    save_s: float = flag(10.0, "seconds for which the loop waits in a save", minimum=0)
    eval_s: float = flag(60.0, "seconds of a validation", minimum=0)
    restarts_a_week: float = flag(2.0, "launches that end early; each loses half a save interval", minimum=0)
    restart_s: float = flag(600.0, "seconds from the end of a launch to the next step", minimum=0)
    search: bool = flag(False, "find the fastest layouts that fit; what other flags say of the layout stays")
    json: bool = flag(False, "print the prediction as one JSON object, for several num_devices a list")
    plot: bool = flag(False, "draw memory and time as bars, one for each num_devices, or layout of a search")
    plot_schedule: bool = flag(False, "draw the learning rate and the batch over the run")
    output: str = flag("", "FILE.html: a page for plot or plot_schedule, in place of the terminal")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optim: OptimConfig = OptimConfig()
    training: TrainingConfig = TrainingConfig()
    eval: PlannedEvaluations = PlannedEvaluations()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profiler: ProfilerConfig = ProfilerConfig()

    def __post_init__(self) -> None:
        if self.output and not (self.plot_schedule or self.plot):
            raise UserError(
                f"--output ({self.output}) has no effect without --plot_schedule=True or --plot=True"
            )
        rates = ("tflops", "tokens_per_sec_per_device", "device")
        given = [f"--{name}" for name in rates if getattr(self, name) is not None]
        if len(given) > 1 or not (given or self.plot_schedule):
            needed = "--tflops, --tokens_per_sec_per_device or --device=NAME"
            raise UserError(f"one of {needed} must be given; given: {' '.join(given) or 'none'}")
        self._check_own_flags()
        if self.training.epochs() is not None:
            raise UserError(f"--num_epochs ({self.training.num_epochs}) needs the data; give --num_tokens")
        assert self.as_training  # its contradictions
        if not self.is_predicted:
            check_rampup(self.training, self.step_tokens // self.row_tokens)

    def _check_own_flags(self) -> None:
        """Raises UserError for own flags that contradict one another or have no effect."""
        if not self.num_devices:
            raise UserError("--num_devices () must be a number of devices; write --num_devices=64")
        sizes = ",".join(map(str, self.num_devices))
        if not self.is_predicted:
            if "auto" in (self.parallel.recompute, self.training.batch_size):
                raise UserError(
                    "auto is chosen by the memory of a device; add --device=NAME, or give a value"
                )
            for name in ("search", "json", "plot", "hardware"):
                if value := getattr(self, name):
                    raise UserError(
                        f"--{name} ({value}) needs a prediction; add --device=NAME, such as h100_80gb"
                    )
            if len(self.num_devices) > 1:
                raise UserError(
                    f"--num_devices ({sizes}) must be one number without a prediction; add --device=NAME"
                )
        elif self.parameters is not None:
            raise UserError(f"--parameters ({self.parameters}) has no shape to predict; give --model_variant")
        if self.search and len(self.num_devices) > 1:
            raise UserError(f"--num_devices ({sizes}) must be one number for --search; leave the others out")
        if drawn := [name for name in ("plot", "json") if getattr(self, name)]:
            other = "plot_schedule" if self.plot_schedule else "json" if len(drawn) == 2 else ""
            if other:
                raise UserError(f"--{drawn[0]} (True) must not be given beside --{other}; leave one flag out")

    @property
    def is_predicted(self) -> bool:
        """Whether the speed is predicted, of a device that need not be there."""
        return self.device not in (None, "cpu")

    @cached_property
    def as_training(self) -> TrainConfig:
        """The flags of a training, with a length.

        Raises:
            UserError: they contradict one another.
        """
        length = self.training
        if length.batch_size == "auto":  # as without the flag: the planner takes the rows that fit
            length = replace(length, batch_size=None)
        if length.num_steps is None and length.num_samples is None and length.num_tokens is None:
            length = replace(length, num_tokens=_USUAL_TOKENS)
        parts = self.model, self.data, self.parallel, self.precision, self.optim, length
        return TrainConfig(*parts, self.eval, self.checkpoint, self.log, self.profiler)

    @property
    def stops(self) -> Stops:
        return Stops(self.save_s, self.eval_s, self.restarts_a_week, self.restart_s)

    @property
    def row_tokens(self) -> int:
        """What a batch is counted in: a ramp in rows, another one in tokens."""
        return self.data.seq_length if self.training.rampup_batch_size else 1

    @cached_property
    def dims(self) -> ParallelDims:
        """The axes of so many devices, in nodes that they fill."""
        from fms_fsdp.mesh import resolve_dims
        from fms_fsdp.runtime import World

        world = self.num_devices[0]
        in_node = math.gcd(world, self.devices_per_node)
        return resolve_dims(self.parallel, self.model.name, World(0, 0, world, in_node))

    @property
    def step_tokens(self) -> int:
        """The tokens of a step, at the end of a ramp."""
        training, rows = self.as_training.training, self.training.global_batch_size
        if rows is None and training.batch_size and training.grad_accum_steps:
            rows = int(training.batch_size) * training.grad_accum_steps * self.dims.size("dp")
        return self.batch_tokens if rows is None else rows * self.data.seq_length

    @cached_property
    def rate_tflops(self) -> float | None:
        """Achieved TFLOP/s of a device, given or measured."""
        return _cpu_flops(self.resolved_precision().compute) / 1e12 if self.device == "cpu" else self.tflops

    def resolved_precision(self) -> Precision:
        """What the flags name; bf16 where they name none."""
        return self.precision.resolve(self.precision.named or "bf16")

    @cached_property
    def batches(self) -> BatchIntervals:
        ramp = BatchRamp.to(self.step_tokens // self.row_tokens, self.training.rampup)
        return BatchIntervals(ramp)

    @property
    def num_tokens(self) -> int:
        """The tokens of the run."""
        length = self.as_training.training
        if length.num_steps is not None:
            return self.row_tokens * self.batches.rows_of(length.num_steps)
        return length.num_tokens or (length.num_samples or 0) * self.data.seq_length

    @property
    def num_steps(self) -> int:
        given = self.training.num_steps
        return given or self.batches.steps_for(-(-self.num_tokens // self.row_tokens))

    @property
    def idle_tokens(self) -> int:
        """What the devices could compute that have no row in the small batches of a ramp."""
        last, idle = self.num_steps, 0
        for interval, following in pairwise(self.batches.intervals):
            steps = min(following.step, last) - min(interval.step, last)
            idle += steps * max(0, self.num_devices[0] - interval.batch)
        return self.row_tokens * idle


def estimate(config: EstimateConfig) -> Estimate:
    """The days of each part. A measured rate holds its recomputation: it gives both ends of the range."""
    if config.tokens_per_sec_per_device is not None:
        rate, most = config.tokens_per_sec_per_device, 1.0
    else:
        assert config.rate_tflops is not None
        rate, most = config.rate_tflops * 1e12 / _flops_per_token(config), 4 / 3
    plain_s = (config.num_tokens + config.idle_tokens) / (config.num_devices[0] * rate)
    return with_stops(config.as_training, config.stops, config.num_steps, plain_s, most * plain_s)


def _flops_per_token(config: EstimateConfig) -> int:
    if config.parameters is not None:
        return 6 * config.parameters
    return flops_per_token(_model(config), config.data.seq_length)


def _model(config: EstimateConfig) -> LlamaConfig:
    return resolve_model(config.model, seq_length=config.data.seq_length)


def _sharding(config: EstimateConfig) -> str:
    """What a launch says of the same flags; without a number of micro-steps there is one."""
    from fms_fsdp.optim.optimizers import state_bytes
    from fms_fsdp.planner.choice import with_global_batch
    from fms_fsdp.predict.memory import estimate_memory
    from fms_fsdp.spec.words import describe_sharding

    model, precision, length = _model(config), config.resolved_precision(), config.data.seq_length
    section, dims, training = config.parallel, config.dims, config.training
    if training.batch_size is None and training.grad_accum_steps is None:
        training = replace(training, grad_accum_steps=1)
    training = with_global_batch(training, dims.size("dp"), config.batch_tokens // length)
    batch = resolve_batch(replace(training, rampup_batch_size=()), dims.size("dp"))
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


def _predict(config: EstimateConfig) -> None:
    """Prints what is predicted, and draws it where that is asked for."""
    from fms_fsdp.planner.answers import Asked, answer, answer_search
    from fms_fsdp.planner.bars import bars_of, in_characters, in_svg
    from fms_fsdp.predict.hardware import find_hardware

    assert config.device is not None
    hardware = find_hardware(config.device, config.hardware)
    rows = max(1, config.batch_tokens // config.data.seq_length)
    question = Asked(config.as_training, hardware, config.devices_per_node, rows, config.stops)
    found = (
        answer_search(question, config.num_devices[0])
        if config.search
        else answer(question, config.num_devices)
    )
    if config.json:
        print(json.dumps(found.as_json()))
        return
    parts = list(found.parts())
    bars = bars_of(found.rows) if config.plot and found.rows else []
    if not config.output:
        for each in bars:
            parts += ["", *in_characters(each)]
    for part in parts:
        print(part if isinstance(part, str) else table(part.head, part.rows, part.text_columns))
    if bars and config.output:
        from fms_fsdp.tools.report.page import fill_page, write_page
        from fms_fsdp.tools.report.svg import text

        title = text(f"{config.model.name} on {hardware.name}")
        charts = "".join(map(in_svg, bars))
        write_page(
            Path(config.output), fill_page(title, f'<h1>{title}</h1><div class="charts">{charts}</div>')
        )


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
        run = Length(config.num_steps, config.data.seq_length, lambda step: batches.rows_of(step) * a_row)
        corners = find_corners(config.optim, run, in_tokens=bool(config.training.rampup_batch_size))
        show_schedule(Schedule(config.optim, corners), run, config.output)
    if config.is_predicted:
        _predict(config)
    elif config.rate_tflops is not None or config.tokens_per_sec_per_device is not None:
        _print_by_rate(config)


def _print_by_rate(config: EstimateConfig) -> None:
    """Prints the range of days at the rate that is given or measured."""
    found = estimate(config)
    sharding = _sharding(config) if config.parameters is None else ""
    model = f"{config.parameters or num_params(_model(config)):,} parameters"
    model = model if config.parameters is not None else f"{config.model.name} ({model})"
    if config.rate_tflops is not None:
        rate = f"{config.rate_tflops:g} TFLOP/s"
        compute = {"nothing recomputed": found.plain_days, "every block recomputed": found.recomputing_days}
    else:
        rate, compute = f"{config.tokens_per_sec_per_device:,g} tokens/s", {"as measured": found.plain_days}
    work = f"{config.num_tokens:,} tokens, {config.num_devices[0]} devices at {rate} each"
    print(f"{model}, {work}: {config.num_steps:,} steps")
    if sharding:
        print(sharding)
    if config.training.rampup_batch_size:
        from fms_fsdp.spec.words import describe_ramp

        print(describe_ramp(config.batches))
    rows = [(f"compute, {what}", f"{days:.2f}") for what, days in compute.items()]
    rows += [("saves", f"{found.save_days:.2f}"), ("validations", f"{found.eval_days:.2f}")]
    rows.append((f"{config.restarts_a_week:g} restarts a week", f"{found.restart_days:.2f}"))
    print(table(("", "days"), rows))
    print(f"between {found.plain_days:.2f} days, if nothing stops the run, and {found.worst_days:.2f} days")
