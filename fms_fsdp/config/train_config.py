"""The configuration of a run: frozen sections with one flat namespace of flags."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fms_fsdp.config.checkpoint import CheckpointConfig
from fms_fsdp.config.data import DataConfig
from fms_fsdp.config.evaluation import EvalConfig
from fms_fsdp.config.flag import (
    WithoutEffect,
    build_config,
    coerce,
    flag_table,
    non_defaults,
    only_one,
)
from fms_fsdp.config.log import LogConfig, ProfilerConfig
from fms_fsdp.config.model import ModelConfig
from fms_fsdp.config.optim import OptimConfig
from fms_fsdp.config.parallel import ParallelConfig
from fms_fsdp.config.precision import PrecisionConfig
from fms_fsdp.config.training import TrainingConfig
from fms_fsdp.config.values import shown
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class TrainConfig:
    """All flags. `--seq_length` is `config.data.seq_length`; None means derived at startup.

    Each section checks its own flags; checks over several sections are here. A function receives
    the section that it needs.
    """

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
        only_one(self, "init_from_hf", "ckpt_load_path")
        has_weights = self.checkpoint.ckpt_load_path or self.model.init_from_hf
        if self.checkpoint.load_model_only and not has_weights:
            raise UserError(
                "--load_model_only=True requires --ckpt_load_path; set it to the checkpoint"
            )
        only_one(self, "rampup_batch_size", "dataset_builder")
        for source in ("dataset_builder", "use_dummy_dataset"):  # which have no epochs
            only_one(self, "eval_epochs", source)
            if self.training.epochs() is not None:
                only_one(self, "num_epochs", source)
        segment = self.parallel.recompute_segment
        builder = self.model.model_builder
        if segment > 1 and builder:
            raise UserError(
                f"--recompute_segment={segment} is not supported with --model_builder={builder}: "
                "your own model calls its blocks one by one; remove --recompute_segment"
            )
        keep = self.checkpoint
        is_on = self.eval.eval_interval or self.eval.eval_epochs
        if keep.keep_best and keep.ranks_evaluations and not is_on:
            raise UserError(
                f"--keep_best={keep.keep_best} requires validation losses, but evaluation is off "
                "(--eval_interval=0); set --eval_interval, e.g. 1000"
            )

    def without_effect(self) -> Iterator[WithoutEffect]:
        """Yields the flags that settings of several sections make useless."""
        if not self.eval.eval_data_path:
            yield from self.data.without_effect_in_training()

    @cached_property
    def run_name(self) -> str:
        """`--run_name`, or `<variant>-<hash>` of the changed flags that name a run."""
        if self.log.run_name:
            return self.log.run_name
        table = flag_table(type(self))
        named = {name: value for name, value in non_defaults(self).items() if table[name].in_name}
        digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.model.name}-{digest}"

    @property
    def keep_name(self) -> str:
        """The flag with which another batch size or precision continues the same run."""
        return f"--run_name={shlex.quote(self.run_name)}"

    @property
    def output_dir(self) -> str:
        """The run directory."""
        return self.log.output_dir or f"runs/{self.run_name}"

    @property
    def ckpt_save_path(self) -> str:
        """The folder of checkpoints."""
        return self.checkpoint.ckpt_save_path or f"{self.output_dir}/checkpoints"


def as_dict(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Returns the flags by section in JSON types, as `--config=FILE` reads them."""
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_dict(content: Mapping[str, Any]) -> TrainConfig:
    """Builds the config that `as_dict` returned, also in an earlier version of this program.

    Missing flags have their defaults, and entries that are not flags are ignored.

    Raises:
        UserError: a value does not fit its flag, or a flag that was removed since has an effect.
    """
    table = flag_table(TrainConfig)
    values = dict[str, Any]()
    sections = {row.section for row in table.values()}
    for section in sections & content.keys():
        for name, value in content[section].items():
            if name not in table:
                check_removed(name, value)
            elif table[name].section == section:
                values[name] = coerce(table[name], value)
    return build_config(TrainConfig, values)


def check_removed(name: str, value: Any) -> bool:
    """Returns whether `name` is a removed flag at its default, which has no effect.

    Raises:
        UserError: a removed flag has another value, which this program cannot honor.
    """
    names = other_programs()
    if name not in names["removed_defaults"]:
        return False
    if value not in (None, names["removed_defaults"][name]):
        answer = by_name(names["removed"]["train"])[name]
        raise UserError(f"--{name}={shown(str(value))} is not supported any more; {answer}")
    return True


@cache
def other_programs() -> dict[str, dict[str, Any]]:
    """Returns the tables of other_programs.toml: flags of other programs, and flags that were removed."""
    path = Path(__file__).parent / "other_programs.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def answers_for_others() -> dict[str, str]:
    """Returns name -> answer for the flags of other programs that are not flags here."""
    content = other_programs()
    flags = dict[str, set[str]]()
    for program in content["programs"].values():
        for flag, keys in program.get("flags", {}).items():
            if isinstance(keys, str):
                keys = [keys]
            for key in keys:
                name = key.partition(" ")[0].rpartition(".")[2]
                flags.setdefault(name, set()).add(flag)
    theirs = dict[str, str]()
    for name, meanings in flags.items():
        if len(meanings) == 1:  # programs do not use the name for different things
            (flag,) = meanings
            if not flag.startswith("_"):  # a value in between, of `translate`
                theirs[name] = f"--{flag}"
    theirs |= by_name(content["here"])
    answers = {name: f"write {flag}" for name, flag in theirs.items()}
    answers |= by_name(content["gone"])
    return {name: answer for name, answer in answers.items() if name not in flag_table(TrainConfig)}


def by_name(answers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns name -> answer of a table answer = [names]."""
    return {name: answer for answer, names in answers.items() for name in names}
