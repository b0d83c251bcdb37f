"""The whole configuration of a run, and what follows from several of its sections."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fms_fsdp.config.flag import check_bare_name, divisors, is_in_name, joined
from fms_fsdp.config.surroundings import CheckpointConfig, EvalConfig, LogConfig, ProfilerConfig
from fms_fsdp.config.training import DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainingConfig


@dataclass(frozen=True)
class TrainConfig:
    """All sections of a run. Only `main_training.py` sees the whole."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = OptimConfig()
    training: TrainingConfig = TrainingConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profiler: ProfilerConfig = ProfilerConfig()

    def __post_init__(self) -> None:
        if self.training.num_steps is not None:
            self.optim.warmup(self.training.num_steps)
        if self.checkpoint.keep_best and not self.eval.eval_interval:
            raise ValueError(
                f"--keep_best ({self.checkpoint.keep_best}) compares validation losses; set --eval_interval"
            )
        if self.checkpoint.load_model_only and not self.checkpoint.ckpt_load_path:
            raise ValueError("--load_model_only (True) needs the weights' place; add --ckpt_load_path=FOLDER")
        check_bare_name("--run_name", self.log.run_name)
        check_bare_name("--model_variant", self.model.model_variant)

    @cached_property
    def run_name(self) -> str:
        """The given name, or `<variant>-<8 hex digits>` of the flags that are in the name and not at their default.

        Where only the folder of the earlier rule is there, that one's name.
        """
        if self.log.run_name:
            return self.log.run_name
        parts = [getattr(self, section.name) for section in dataclasses.fields(self)]
        told = {
            spec.name: value
            for part in parts
            for spec in dataclasses.fields(part)
            if is_in_name(spec, type(part)) and (value := getattr(part, spec.name)) != spec.default
        }
        name, earlier = self._name_of(told), self._name_of(self._told_earlier())
        return earlier if Path("runs", earlier).is_dir() and not Path("runs", name).exists() else name

    @property
    def keep_name(self) -> str:
        """What advice to change a flag that is in the name ends with, so that the run goes on."""
        return f"--run_name={shlex.quote(self.run_name)}"

    def _name_of(self, told: dict[str, Any]) -> str:
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.model.model_variant}-{digest}"

    def _told_earlier(self) -> dict[str, Any]:
        """What went into the name when four sections did as a whole. New flags must stay out of it."""
        content = dataclasses.asdict(self)
        content = {
            section: content[section] for section in ("model", "data", "parallel", "optim", "training")
        }
        del content["data"]["skip_steps"]
        names = ("seed", "batch_size", "grad_accum_steps", "global_batch_size", "deterministic")
        content["training"] = {name: content["training"][name] for name in names}
        return content

    @property
    def output_dir(self) -> str:
        """The run folder."""
        return self.log.output_dir or f"runs/{self.run_name}"

    @property
    def ckpt_save_path(self) -> str:
        """The folder of checkpoints."""
        return self.checkpoint.ckpt_save_path or f"{self.output_dir}/checkpoints"


@dataclass(frozen=True)
class BatchPlan:
    """The batch arithmetic of a run: global_batch_size = batch_size × dp_size × grad_accum_steps rows."""

    batch_size: int
    grad_accum_steps: int
    dp_size: int

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.dp_size * self.grad_accum_steps


def resolve_batch(section: TrainingConfig, dp_size: int) -> BatchPlan:
    """The three batch sizes from any two of them (or fewer: batch_size is then 2, grad_accum_steps 1).

    Raises:
        ValueError: the three contradict one another, or the global batch does not divide over the ranks.
    """
    rows, accum, total = section.batch_size, section.grad_accum_steps, section.global_batch_size
    if total is None:
        return BatchPlan(rows or 2, accum or 1, dp_size)
    if total % dp_size:
        valid = divisors(total, max(4096, 2 * dp_size))
        raise ValueError(
            f"--global_batch_size ({total}) must be divisible by the data-parallel size ({dp_size}); "
            f"valid sizes: {joined(valid)}"
        )
    per_rank = total // dp_size
    if rows is None:
        rows = per_rank // accum if accum else (2 if per_rank % 2 == 0 else 1)
    if accum is None and rows:
        accum = per_rank // rows
    if not rows or not accum or rows * accum * dp_size != total:
        raise ValueError(
            f"--global_batch_size ({total}) must equal batch_size ({section.batch_size or rows}) x data-parallel size ({dp_size}) "
            f"x grad_accum_steps ({section.grad_accum_steps or accum}); give two of the three, e.g. --batch_size=1"
        )
    return BatchPlan(rows, accum, dp_size)


def keep_global_batch(
    section: TrainingConfig, dp_size: int, *, total: int, usual_rows: int, keep_name: str = ""
) -> BatchPlan:
    """The batch of a run that goes on with a global batch of `total` rows, whatever the number of ranks.

    A global batch that is given is the new one. Otherwise `batch_size`, else `usual_rows`, only caps a micro-step.

    Raises:
        ValueError: `total` does not divide over the ranks, or the flags give another product.
    """
    rows, accum = section.batch_size, section.grad_accum_steps
    if section.global_batch_size is not None:
        return resolve_batch(section, dp_size)
    if total % dp_size:
        valid = divisors(total, 65536)
        raise ValueError(
            f"number of data-parallel ranks ({dp_size}) must divide the run's global batch ({total} rows); "
            f"valid numbers: {joined(valid)}; or choose another batch with --global_batch_size=ROWS {keep_name}"
        )
    per_rank = total // dp_size
    if accum is None:
        cap = min(rows or usual_rows, per_rank)
        fitting = next(size for size in range(cap, 0, -1) if per_rank % size == 0)
        return BatchPlan(fitting, per_rank // fitting, dp_size)
    if per_rank % accum or (rows is not None and rows * accum != per_rank):
        product = f"{rows or 'batch_size'} rows x {dp_size} ranks x {accum} micro-steps"
        raise ValueError(
            f"--grad_accum_steps ({accum}) must keep the run's global batch ({total} rows), and {product} does not; "
            f"leave it out, or choose another batch with --global_batch_size=ROWS {keep_name}"
        )
    return BatchPlan(per_rank // accum, accum, dp_size)


def as_dict(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """The configuration by section, in JSON types; `--config=FILE` reads it back."""
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_dict(content: Mapping[str, Any]) -> TrainConfig:
    """The configuration that `as_dict` wrote, by this version or an earlier one: what it lacks has its default, what is unknown is passed over."""
    sections = {}
    for section in dataclasses.fields(TrainConfig):
        given, kind = content.get(section.name, {}), type(getattr(TrainConfig(), section.name))
        values = {spec.name: given[spec.name] for spec in dataclasses.fields(kind) if spec.name in given}
        sections[section.name] = kind(
            **{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        )
    return TrainConfig(**sections)


def non_defaults(config: TrainConfig) -> Mapping[str, Any]:
    """Flat name → value of every field that differs from its default."""
    return {
        spec.name: value
        for section in dataclasses.fields(config)
        for spec in dataclasses.fields(getattr(config, section.name))
        if (value := getattr(getattr(config, section.name), spec.name)) != spec.default
    }
