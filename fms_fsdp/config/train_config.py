"""The configuration of a run with all its sections, and what follows from several of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fms_fsdp.config.flag import build_config, flag_table, flag_values, non_defaults
from fms_fsdp.config.model import ModelConfig
from fms_fsdp.config.optim import OptimConfig
from fms_fsdp.config.outputs import CheckpointConfig, EvalConfig, LogConfig, ProfilerConfig
from fms_fsdp.config.precision import PrecisionConfig
from fms_fsdp.config.rule import judge
from fms_fsdp.config.rules import CONTRADICTIONS
from fms_fsdp.config.training import DataConfig, ParallelConfig, TrainingConfig
from fms_fsdp.config.values import coerce


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
        judge(CONTRADICTIONS, self, flag_values(self))

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
        """The flag that lets this run go on where another flag changes the default run name."""
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
    """The configuration by section, in JSON types, as `--config=FILE` reads a configuration."""
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
