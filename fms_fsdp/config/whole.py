"""The whole configuration of a run, and what follows from several of its sections."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fms_fsdp.config.flag import build_config, flag_table, non_defaults
from fms_fsdp.config.model import ModelConfig
from fms_fsdp.config.optim import OptimConfig
from fms_fsdp.config.precision import PrecisionConfig
from fms_fsdp.config.surroundings import CheckpointConfig, EvalConfig, LogConfig, ProfilerConfig
from fms_fsdp.config.training import DataConfig, ParallelConfig, TrainingConfig
from fms_fsdp.config.values import check_alone, coerce, joined
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class TrainConfig:
    """All sections of a run. A function receives the section that it needs; few receive the whole."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optim: OptimConfig = OptimConfig()
    training: TrainingConfig = TrainingConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profiler: ProfilerConfig = ProfilerConfig()

    def __post_init__(self) -> None:
        num_steps, warmup_steps = self.training.num_steps, self.optim.warmup_steps
        if num_steps is not None and warmup_steps is not None and warmup_steps > num_steps:
            raise UserError(
                f"--warmup_steps ({warmup_steps}) must not exceed --num_steps ({num_steps}); raise that"
            )
        own, no_shards = self.data.dataset_builder, self.data.use_dummy_dataset or self.data.dataset_builder
        for name, is_wrong in (
            ("num_epochs", self.training.epochs() and no_shards),
            ("rampup_batch_size", self.training.rampup_batch_size and own),
        ):
            if is_wrong:
                other = "dataset_builder" if own else "use_dummy_dataset"
                raise UserError(
                    f"--{name} ({joined(getattr(self.training, name))}) cannot be followed with --{other}, "
                    "whose data are not token shards; leave one of them out"
                )
        if self.checkpoint.keep_best and not self.eval.eval_interval:
            raise UserError(
                f"--keep_best ({self.checkpoint.keep_best}) compares validation losses; set --eval_interval"
            )
        section = self.checkpoint
        starts = {"ckpt_load_path": section.ckpt_load_path, "init_from_hf": self.model.init_from_hf}
        check_alone(starts, "; leave one of them out")
        scheduled, interval = section.checkpoint_schedule, section.checkpoint_interval
        if section.export_interval and (scheduled or not interval or section.export_interval % interval):
            raise UserError(
                f"--export_interval ({section.export_interval}) must be a multiple of --checkpoint_interval "
                f"({interval}{', with a --checkpoint_schedule' if scheduled else ''}); change one of them"
            )
        if self.checkpoint.load_model_only and not self.checkpoint.ckpt_load_path:
            raise UserError("--load_model_only (True) needs the weights' place; add --ckpt_load_path=FOLDER")

    @cached_property
    def run_name(self) -> str:
        """The given name, or `<variant>-<hash>` of the flags in the name that are not at their default."""
        if self.log.run_name:
            return self.log.run_name
        table = flag_table(TrainConfig)
        hashed = {name: value for name, value in non_defaults(self).items() if table[name].in_name}
        digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.model.name}-{digest}"

    @property
    def keep_name(self) -> str:
        """The flag that makes the same run go on where a flag changes that is in the default run name."""
        return f"--run_name={shlex.quote(self.run_name)}"

    @property
    def output_dir(self) -> str:
        """The run folder."""
        return self.log.output_dir or f"runs/{self.run_name}"

    @property
    def ckpt_save_path(self) -> str:
        """The folder of checkpoints."""
        return self.checkpoint.ckpt_save_path or f"{self.output_dir}/checkpoints"


def as_dict(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """The configuration by section, in JSON types; `--config=FILE` reads it back."""
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_dict(content: Mapping[str, Any]) -> TrainConfig:
    """The configuration that `as_dict` wrote.

    A flag that is missing has its default; an entry that is no flag is left out.

    Raises:
        UserError: a value does not fit its flag.
    """
    found: dict[str, Any] = {}
    for name, row in flag_table(TrainConfig).items():
        if name in content.get(row.section, {}):
            found[name] = coerce(row, content[row.section][name])
    return build_config(TrainConfig, found)
