"""What is known of a launch before its first step, as later launches and tools read it.

    config.json          the flags by section, and `resolved`: what they came to
    train_state.json     where the run is, `config`: the flags by section, and `resolved`

Paths are recorded as they were typed, with the working folder of the launch beside them, and readers join the
two (`Record.located`). Links are not resolved: the user may move what a link names. URIs, absolute paths and
`~` stay as they are. Works without torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from fms_fsdp.config import BatchPlan, Precision, TrainConfig, as_dict, flag_table, from_dict
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.errors import UserError
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.variants import LlamaConfig, model_from_dict
from fms_fsdp.optim.schedules import Corners

VERSION = 1  # of the form; a record without a version has this form too
_PATHS = {name for name, row in flag_table(TrainConfig).items() if row.form == "path"}


@dataclass(frozen=True)
class Record:
    """A launch: its flags and what they came to on its machine, with its data and its checkpoint.

    `tokenizer`: the digest of the tokenizer of the data, "" if not known. `working_dir`: the folder that
    relative paths begin at, "" if not known. `chosen`: the flags whose value the launch chose by memory, and
    why.
    """

    config: TrainConfig
    world_size: int
    device_type: str
    dims: ParallelDims
    batch: BatchPlan
    model: LlamaConfig
    precision: Precision
    num_steps: int
    tokenizer: str
    corners: Corners
    versions: Mapping[str, str]
    working_dir: str
    chosen: Mapping[str, str]

    @property
    def resolved(self) -> dict[str, Any]:
        """What the record holds beyond the flags, in JSON types."""
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
            "schedule": asdict(self.corners),
            "versions": dict(self.versions),
            "working_dir": self.working_dir,
            "chosen": dict(self.chosen),
        }

    @property
    def content(self) -> dict[str, Any]:
        """The content of config.json, in JSON types; `read_record` undoes it."""
        return {**as_dict(self.config), "resolved": self.resolved}

    @property
    def saved_with(self) -> dict[str, Any]:
        """The entries of a checkpoint's `Saved` that are of the launch."""
        return {"config": as_dict(self.config), "resolved": self.resolved}

    @cached_property
    def located(self) -> TrainConfig:
        """The flags, with paths that hold in any working folder."""
        return from_dict(located_sections(self.content))


def read_record(content: Mapping[str, Any], file: object) -> Record:
    """The record that `Record.content` wrote. `file`: where it lies, for messages.

    Raises:
        UserError: it was written by a later version, an entry is missing, or a value has no meaning.
    """
    resolved = content.get("resolved", {})
    if (version := resolved.get("version", VERSION)) != VERSION:
        raise UserError(
            f"{file} has version {version}, and only version {VERSION} is read; update this program"
        )
    try:
        return Record(
            config=from_dict(content),
            world_size=resolved["world_size"],
            device_type=resolved["device"],
            dims=_known(ParallelDims, {"strategy": "none"} | resolved.get("layout", {})),
            batch=_known(BatchPlan, {"grad_accum_steps": 1, "dp_size": 1} | resolved["batch"]),
            model=model_from_dict(resolved["model"]),
            precision=Precision(**resolved["precision"]),
            num_steps=resolved["num_steps"],
            tokenizer=resolved["tokenizer"],
            corners=Corners(**resolved["schedule"]),
            versions=resolved["versions"],
            working_dir=resolved["working_dir"],
            chosen=resolved.get("chosen", {}),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no record of a launch that can be read: {error!r}") from None


def _known(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A dataclass from those values that it has a field for; lists become tuples."""
    given = {each.name: values[each.name] for each in fields(kind) if each.name in values}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says beside its tensors: where the run is, and the launch that wrote it.

    `validation_loss`: of this step, if it was evaluated. `metrics`: the numbers of the step by name, where it
    was reported or evaluated. `data`: the state of the data stream. `save_s`:
    seconds that the save took. `weights_only`: nothing but weights is to be taken. `imported_from`: the
    folder that the weights came from, if no training wrote them.
    """

    step: int
    tokens_seen: int = 0
    rows_seen: int = 0
    validation_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    loss_scale: Mapping[str, Any] | None = None
    save_s: float | None = None
    weights_only: bool = False
    imported_from: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    resolved: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> dict[str, Any]:
        """The content of train_state.json, in JSON types, without what is not given."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        left_out = {"loss_scale": None, "save_s": None, "weights_only": False, "imported_from": ""}
        return {name: value for name, value in content.items() if left_out.get(name, ...) != value}

    def metric(self, name: str) -> float | None:
        """A metric of the step, by which checkpoints are ranked; None where the step has none."""
        return self.validation_loss if name == "eval/loss" else self.metrics.get(name)

    @cached_property
    def record(self) -> Record:
        """The launch that wrote the checkpoint.

        Raises:
            UserError: as of `read_record`.
        """
        return read_record({**self.config, "resolved": self.resolved}, f"the checkpoint of step {self.step}")


def read_saved(content: Mapping[str, Any]) -> Saved:
    """What `Saved.content` wrote; other entries are passed over.

    Raises:
        UserError: it names no step.
    """
    if not isinstance(content, dict) or not isinstance(content.get("step"), int):
        raise UserError("the state of the checkpoint names no step")
    saved: Saved = _known(Saved, content)
    return saved


def located_sections(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of a config.json, with paths that hold in any working folder."""
    folder = content.get("resolved", {}).get("working_dir", "")
    sections = {}
    for name, section in content.items():
        if name != "resolved" and isinstance(section, dict):
            paths = _PATHS & section.keys()
            sections[name] = section | {path: _joined(folder, section[path]) for path in paths}
    return sections


def _joined(folder: str, path: Any) -> Any:
    stays = not isinstance(path, str) or not path or "://" in path or path.startswith("~")
    return path if stays else os.path.join(folder, path)


def working_folder() -> str:
    """The working folder as the user's shell names it, links and all."""
    shell = os.environ.get("PWD", "")
    is_here = os.path.isabs(shell) and os.path.isdir(shell) and os.path.samefile(shell, ".")
    return shell if is_here else os.getcwd()
