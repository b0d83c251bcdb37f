"""The values of a run: resolved config, state between two steps, metadata of a checkpoint.

RunConfig       config.json: the flags by section, and `resolved`, the values that follow from them
TrainState      the objects that the loop changes, and its progress
TrainMetadata   train_state.json of a checkpoint: the progress, and the RunConfig that wrote it

Works without torch, because `ckpt list` and other tools only read metadata.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fms_fsdp.config import BatchPlan, Precision, TrainConfig, as_dict, flag_table, from_dict
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.errors import ReadFailed, UserError
from fms_fsdp.models.config import TransformerConfig, model_from_dict
from fms_fsdp.models.flops import num_params
from fms_fsdp.optim.schedules import Milestones, Schedule

if TYPE_CHECKING:
    import torch

    from fms_fsdp.data.batch import Batch
    from fms_fsdp.data.stream import Stream
    from fms_fsdp.models.llama import LanguageModel
    from fms_fsdp.optim.loss_scale import LossScale
    from fms_fsdp.optim.optimizers import Optimizers

VERSION = 1  # of both files; files without a version have this layout too
_PATHS = {name for name, row in flag_table(TrainConfig).items() if row.form == "path"}


@dataclass(frozen=True)
class RunConfig:
    """The flags of a launch, and the values that follow from flags, machine, data and checkpoint.

    tokenizer     digest of the data's tokenizer, "" if unknown
    versions      of packages and code that a result depends on
    working_dir   the folder that relative paths start from
    chosen        flags whose value was chosen by memory, and why. A chosen recomputation replaces
                  `auto` in `config`; the chosen batch and strategy are in `batch` and `dims`,
                  because their flags are part of the run's name
    """

    config: TrainConfig
    world_size: int
    device_type: str
    dims: ParallelDims
    batch: BatchPlan
    model: TransformerConfig
    precision: Precision
    num_steps: int
    tokenizer: str
    milestones: Milestones
    versions: Mapping[str, str]
    working_dir: str
    chosen: Mapping[str, str]

    @property
    def seq_length(self) -> int:
        return self.config.data.seq_length

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.config.optim, self.milestones)

    @property
    def resolved(self) -> dict[str, Any]:
        """The settings that do not follow from the flags alone, in JSON types."""
        return {
            "version": VERSION,
            "world_size": self.world_size,
            "device": self.device_type,
            "layout": asdict(self.dims),
            "batch": asdict(self.batch) | {"global_batch_size": self.batch.global_batch_size},
            "model": asdict(self.model) | {"num_params": num_params(self.model)},
            "precision": asdict(self.precision),
            "num_steps": self.num_steps,
            "tokenizer": self.tokenizer,
            "schedule": asdict(self.milestones),
            "versions": dict(self.versions),
            "working_dir": self.working_dir,
            "chosen": dict(self.chosen),
        }

    @property
    def used_flags(self) -> dict[str, Any]:
        """The values of flags that may be derived, by name."""
        return {
            "num_steps": self.num_steps,
            "batch_size": self.batch.batch_size,
            "grad_accum_steps": self.batch.grad_accum_steps,
            "global_batch_size": self.batch.global_batch_size,
            "sharding_strategy": self.dims.strategy,
            "vocab_size": self.model.vocab_size,
        }

    @property
    def content(self) -> dict[str, Any]:
        """The content of config.json, in JSON types; `read_run_config` reads it."""
        return {**as_dict(self.config), "resolved": self.resolved}

    @property
    def saved_with(self) -> dict[str, Any]:
        """The entries of `TrainMetadata` that belong to the launch."""
        return {"config": as_dict(self.config), "resolved": self.resolved}

    @cached_property
    def located(self) -> TrainConfig:
        """The flags, with paths that are valid in any working folder."""
        return from_dict(located_sections(self.content))


def read_run_config(content: Mapping[str, Any], file: object) -> RunConfig:
    """Reads what `RunConfig.content` wrote; `file` names it in errors.

    Raises:
        UserError: a later version wrote it, or an entry is missing or invalid.
    """
    resolved = content.get("resolved", {})
    version = resolved.get("version", VERSION)
    if version != VERSION:
        raise UserError(
            f"{file} has version {version}, this program reads version {VERSION}; update it"
        )
    try:
        shape = {name: v for name, v in resolved["model"].items() if name != "num_params"}
        # Files of older versions lack some entries.
        layout = {"strategy": "none"} | resolved.get("layout", {})
        batch = {"grad_accum_steps": 1, "dp_size": 1} | resolved["batch"]
        return RunConfig(
            config=from_dict(content),
            world_size=resolved["world_size"],
            device_type=resolved["device"],
            dims=_from_fields(ParallelDims, layout),
            batch=_from_fields(BatchPlan, batch),
            model=model_from_dict(shape),
            precision=Precision(**resolved["precision"]),
            num_steps=resolved["num_steps"],
            tokenizer=resolved["tokenizer"],
            milestones=Milestones(**resolved["schedule"]),
            versions=resolved["versions"],
            working_dir=resolved["working_dir"],
            chosen=resolved.get("chosen", {}),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is not the config of a run ({error!r}); name a run directory"
        ) from None


def _from_fields(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Builds a dataclass from the values that it has fields for; lists become tuples."""
    given = dict[str, Any]()
    for each in fields(kind):
        if each.name in values:
            value = values[each.name]
            given[each.name] = tuple(value) if isinstance(value, list) else value
    return kind(**given)


@dataclass(frozen=True)
class TrainMetadata:
    """The progress of a run at a checkpoint, and the launch that wrote it.

    validation_loss   of this step, if it was evaluated
    metrics           of this step by name, if it was reported or evaluated
    data              state of the data stream
    save_s            duration of the save in seconds
    evaluation_pending  whether this step should have been evaluated and was not: the launch ended
    weights_only      only the weights may be used: they were imported
    imported_from     the folder that the weights were imported from
    """

    step: int
    tokens_seen: int = 0
    rows_seen: int = 0  # sequences; train_state.json of earlier versions has this name
    validation_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    loss_scale: Mapping[str, Any] | None = None
    non_finite_steps: int = 0  # consecutive ones at its end
    save_s: float | None = None
    evaluation_pending: bool = False
    weights_only: bool = False
    imported_from: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    resolved: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_healthy(self) -> bool:
        """Whether its weights are worth resuming from or exporting; one skipped step does not matter."""
        return self.non_finite_steps < 2

    def tokens_at(self, step: int, batch: BatchPlan, seq_length: int) -> int:
        """Returns the tokens of the run by the end of a step, if later steps have this batch.

        Up to the checkpoint they are spread evenly.
        """
        if step < self.step:
            return self.tokens_seen * step // self.step
        sequences = batch.sequences_in(step - self.step, self.rows_seen)
        return self.tokens_seen + sequences * seq_length

    def step_at(self, tokens: int, batch: BatchPlan, seq_length: int) -> int:
        """Returns the inverse of `tokens_at`: the first step by whose end that many tokens are read."""
        if tokens < self.tokens_seen:
            return -(-tokens * self.step // self.tokens_seen)
        sequences = -(-(tokens - self.tokens_seen) // seq_length)
        return self.step + batch.steps_for(sequences, self.rows_seen)

    @property
    def content(self) -> dict[str, Any]:
        """The content of train_state.json, in JSON types, without entries that are not set."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        unset = {
            "non_finite_steps": 0,
            "loss_scale": None,
            "save_s": None,
            "evaluation_pending": False,
            "weights_only": False,
            "imported_from": "",
        }
        return {name: value for name, value in content.items() if unset.get(name, ...) != value}

    def metric(self, name: str) -> float | None:
        """Returns the metric that ranks checkpoints; None if this step does not have it."""
        if name == "eval/loss":
            return self.validation_loss
        return self.metrics.get(name)

    @cached_property
    def run(self) -> RunConfig:
        """The launch that wrote the checkpoint.

        Raises:
            UserError: as `read_run_config`.
        """
        content = {**self.config, "resolved": self.resolved}
        return read_run_config(content, f"the checkpoint of step {self.step}")


def read_train_metadata(content: Mapping[str, Any]) -> TrainMetadata:
    """Reads the dictionary that `TrainMetadata.content` returned; ignores unknown entries.

    Raises:
        UserError: it has no step.
    """
    if not isinstance(content, dict) or not isinstance(content.get("step"), int):
        raise UserError("train_state.json has no step")
    metadata: TrainMetadata = _from_fields(TrainMetadata, content)
    return metadata


def located_sections(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the sections of a config.json, with paths that are valid in any working folder.

    Links are not resolved, because the user may move the target of a link.
    """
    folder = content.get("resolved", {}).get("working_dir", "")
    sections = {}
    for name, section in content.items():
        if name != "resolved" and isinstance(section, dict):
            paths = _PATHS & section.keys()
            sections[name] = section | {path: _joined(folder, section[path]) for path in paths}
    return sections


def _joined(folder: str, path: Any) -> Any:
    if not isinstance(path, str) or not path:
        return path
    if "://" in path or path.startswith("~"):
        return path
    return os.path.join(folder, path)


def working_folder() -> str:
    """Returns the working folder as the user's shell names it, including links."""
    shell = os.environ.get("PWD", "")
    is_folder = os.path.isabs(shell) and os.path.isdir(shell)
    if is_folder and os.path.samefile(shell, "."):
        return shell
    return os.getcwd()


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step, still on the device.

    loss_sum        of this rank's labels
    extra_sums      of this rank: z-loss, then the distillation loss, as far as they are on
    num_labels      of all ranks
    grad_norm       before clipping, without the loss scale
    requests        sums over all ranks of what they asked for before the step (`StopControl.requests`)
    loss_scale      of fp16
    """

    loss_sum: torch.Tensor
    num_labels: torch.Tensor
    grad_norm: torch.Tensor
    requests: torch.Tensor
    loss_scale: torch.Tensor | None = None
    extra_sums: tuple[torch.Tensor, ...] = ()


@dataclass
class CurrentStep:
    """Values of the step under way, or of the last step between two of them; no checkpoint has them.

    requests        of this rank to all ranks, see `StopControl.requests`
    batch           of this rank
    sequences, tokens  of the global batch
    metrics         that were reported
    record_error    why this rank cannot write its records; "" if it can
    read_error      why this rank cannot read the data of a coming step
    """

    requests: tuple[int, int, int, int] = (0, 0, 0, 0)
    batch: Batch | None = None
    sequences: int = 0
    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    record_error: str = ""
    read_error: ReadFailed | None = None


@dataclass
class TrainState:
    """The objects that the loop changes and a checkpoint holds, and the progress of the run.

    num_steps, sequences_at_end   of the whole run, as this launch plans it
    step                        optimizer steps done; `start` is the last one before this launch
    sequences_seen, tokens_seen   by the end of `step`, over all launches of the run
    loss_scale                  of fp16
    rounding                    context of the gradient-accumulation steps of a step, within which
                                weights may be rounded copies
    non_finite_steps            consecutive ones up to `step`, over all launches
    evaluation_pending          whether an evaluation of `step` is due and not done
    stop_reason                 why the launch ends before the run does; "" while it trains
    """

    model: LanguageModel
    optimizers: Optimizers
    stream: Stream
    num_steps: int
    step: int = 0
    sequences_seen: int = 0
    tokens_seen: int = 0
    sequences_at_end: int = 0
    loss_scale: LossScale | None = None
    rounding: Callable[[int], AbstractContextManager[object]] = nullcontext
    non_finite_steps: int = 0
    last_finite_step: int = 0  # of this launch
    evaluation_pending: bool = False
    stop_reason: str = ""
    validation: tuple[int, float] | None = None  # the last evaluated step, and its loss
    current: CurrentStep = field(default_factory=CurrentStep)

    def __post_init__(self) -> None:
        self.start = self.step
        self._seen_before = self.sequences_seen, self.tokens_seen

    def count(self, sequences: int, tokens: int) -> None:
        """Counts a step of `sequences` sequences and `tokens` tokens, over all ranks."""
        self.step += 1
        self.evaluation_pending = False
        self.current.sequences = sequences
        self.current.tokens = tokens
        self.current.metrics = {}
        self.sequences_seen += sequences
        self.tokens_seen += tokens

    @property
    def steps_in_launch(self) -> int:
        return self.step - self.start

    @property
    def seen_in_launch(self) -> tuple[int, int]:
        """The sequences and tokens of this launch."""
        sequences, tokens = self._seen_before
        return self.sequences_seen - sequences, self.tokens_seen - tokens

    @property
    def is_done(self) -> bool:
        return self.step >= self.num_steps

    @property
    def val_loss(self) -> float | None:
        """The validation loss after `step`, if it was evaluated."""
        if self.validation is None or self.validation[0] != self.step:
            return None
        return self.validation[1]
