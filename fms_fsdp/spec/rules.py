"""The rules that flags alone do not decide, as tables: of the machine, of the folders, of the checkpoint.

    MACHINE      before the process group is made            Hardware
    FOLDERS      before anything is written                  Folders
    CHECKPOINT   when the launch has chosen its checkpoint   Continued
    LENGTH       when everything is known                    Spec

Rules of the batch, of the shape and of memory stand where these are computed; `listing` shows all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.checkpoint.retention import parse_schedule
from fms_fsdp.config import OptimConfig, TrainConfig, flag_table
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.config.batch import DIVIDES, KEEPS_BATCH, LEADS
from fms_fsdp.config.rule import Rule
from fms_fsdp.config.rules import CONTRADICTIONS, IDLE
from fms_fsdp.models.variants import SHAPES, LlamaConfig
from fms_fsdp.optim.optimizers import state_of_stand_in
from fms_fsdp.parallel.compile import compiles, missing_compiler
from fms_fsdp.parts import load_part
from fms_fsdp.predict.room import FITS
from fms_fsdp.record import Record

if TYPE_CHECKING:
    from fms_fsdp.spec.resolve import Spec

_FILES = ("metrics.jsonl", "status.json", "config.json", "log.txt")  # of a run folder, which a launch writes
_TRACKER_PACKAGES = {"wandb", "mlflow", "aim", "codecarbon"}  # each tracker needs the package of its name

_PREFACE = """# Rules

`python main_training.py --rules > docs/rules.md` writes this page; a test compares the page with the code.

A launch is refused with one line, `--flag (value) rule; remedy`, and exit status 2, where a rule does not
hold. Names in braces stand for values. Rules of *flags* are judged before torch is imported, rules of the
*machine* before the process group is made, rules of the *corpus* before a checkpoint is chosen, rules of the
*checkpoint* before the launch makes a folder. A flag with *no effect* is refused only where the flag and the
other flags of the rule were typed; else the log has a note. The types and ranges of single values are in
[configuration.md](configuration.md).
"""


@dataclass(frozen=True)
class Hardware:
    """The flags, and the device and the axes that this machine gives them."""

    config: TrainConfig
    device: torch.device
    dims: ParallelDims

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


def _are_ranked(known: Hardware) -> bool:
    """Whether some checkpoint before the last has a value of the metric to be ranked by."""
    section, interval = known.config.checkpoint, known.config.eval.eval_interval
    interval = interval if section.ranks_evaluations else known.config.log.report_interval
    schedule = parse_schedule(section.checkpoint_schedule, section.checkpoint_interval)
    if section.ranks_evaluations and known.config.eval.eval_epochs:
        return True  # at steps that the data decide
    return not section.keep_best or schedule.meets_interval(interval)


def _missing_package(known: Hardware) -> str:
    asked = [name for name in known.config.log.trackers if name in _TRACKER_PACKAGES]
    return next((name for name in asked if find_spec(name) is None), "")


def _is_no_file(known: Hardware) -> str:
    """The first name below the run folder that is to be a file and is something else."""
    paths = [Path(known.config.output_dir, name) for name in _FILES]
    return next((path.name for path in paths if path.exists() and not path.is_file()), "")


def _compiles(known: Hardware) -> bool:
    return compiles(known.config.parallel, known.device)


def _computes_bf16(known: Hardware) -> bool:
    """Whether the GPU computes in bf16, where products need it."""
    if not known.is_gpu or known.config.precision.named in ("fp32", "fp16"):
        return True
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


MACHINE: tuple[Rule[Hardware], ...] = (
    Rule("precision", _computes_bf16, "needs bf16, which {device} lacks",
        "add --precision=fp16 or --precision=fp32 {keep_name}", "mixed_precision param_dtype",
        lambda known: {"precision": known.config.precision.named or "bf16",
            "device": torch.cuda.get_device_name(known.device) if known.is_gpu else "cpu",
            "keep_name": known.config.keep_name}),
    Rule("keep_best", _are_ranked,
        "ranks checkpoints whose step has {keep_best_metric}, and none has before the last",
        "let an evaluation (--eval_interval {eval_interval}) or a report (--report_interval "
        "{report_interval}) fall on the step of a checkpoint",
        "eval_interval report_interval checkpoint_interval checkpoint_schedule keep_best_metric"),
    Rule("trackers", lambda known: not _missing_package(known),
        "needs the package {trackers}, which is not installed", "pip install {trackers}",
        facts=lambda known: {"trackers": _missing_package(known)}),
    Rule("recompute", lambda known: known.config.parallel.recomputes != "cheap" or _compiles(known),
        "needs --use_torch_compile=True", "add the flag, or use ops or blocks", "use_torch_compile",
        lambda known: {"recompute": known.config.parallel.recomputes}),
    Rule("use_torch_compile", lambda known: not _compiles(known) or not missing_compiler(known.device),
        "needs a compiler: {missing}, or leave the flag out",
        facts=lambda known: {"use_torch_compile": True, "missing": missing_compiler(known.device)}),
    Rule("attn_impl",
        lambda known: known.is_gpu or known.config.model.attn_impl not in ("cudnn", "efficient"),
        "exists on GPU only", "choose one of: auto, flash, math"),
    Rule("attn_dropout",
        lambda known: not (known.is_gpu and known.config.data.document_mask)
        or not known.config.model.attn_dropout,
        "has no kernel under --document_mask on GPUs", "leave one flag out", "document_mask"),
    Rule("dist_backend", lambda known: known.config.parallel.dist_backend != "nccl" or known.is_gpu,
        "needs a GPU", "leave the flag out, or use gloo"),
    Rule("dist_backend",
        lambda known: known.config.parallel.dist_backend != "gloo"
        or not known.is_gpu or known.dims.strategy == "none",
        "cannot reduce gradients on GPUs", "leave the flag out, or use nccl"),
    Rule("debug_sync_blocks",
        lambda known: not known.config.parallel.debug_sync_blocks or not _compiles(known),
        "waits behind blocks, and compiled blocks cannot wait", "add --use_torch_compile=False",
        "use_torch_compile"),
    Rule("memory_snapshot", lambda known: known.is_gpu or not known.config.profiler.memory_snapshot,
        "needs a GPU, whose allocator it records", "leave the flag out"),
    Rule("async_tp", lambda known: not known.config.parallel.async_tp or known.is_gpu and _compiles(known),
        "needs a GPU, and blocks that are compiled", "leave the flag out", "use_torch_compile"),
    Rule("cpu_offload",
        lambda known: not known.config.parallel.cpu_offload or known.dims.strategy != "none",
        "needs a sharded model", "add --sharding_strategy=fsdp, which one process can use too",
        "sharding_strategy"),
    Rule("output_dir", lambda known: not _is_no_file(known),
        "must hold {name} as a file", "remove what is there",
        facts=lambda known: {"output_dir": known.config.output_dir, "name": _is_no_file(known)}),
)  # fmt: skip


@dataclass(frozen=True)
class Folders:
    """The folders that a launch writes, and the bytes of one checkpoint, 0 where it saves none."""

    config: TrainConfig
    checkpoint_bytes: int

    def folder(self, flag: str) -> Path:
        """The folder of a flag; the run folder, which always is one, where the flag gives none."""
        given = {
            "profiler_dir": self.config.profiler.profiler_dir,
            "tensorboard_dir": self.config.log.tensorboard_dir,
            "ckpt_save_path": self.config.ckpt_save_path,
        }
        return Path(given.get(flag) or self.config.output_dir)

    def nearest(self, flag: str) -> Path:
        """The folder, or its nearest parent that exists."""
        nearest = self.folder(flag).absolute()
        while not os.path.lexists(nearest):
            nearest = nearest.parent
        return nearest

    def free_bytes(self, flag: str) -> int:
        return shutil.disk_usage(self.nearest(flag)).free


def _can_be_written(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK) and os.statvfs(folder).f_blocks > 0  # no block: as in /proc


def _written(flag: str) -> Iterator[Rule[Folders]]:
    """The rules of a flag whose folder a launch writes."""

    def facts(known: Folders) -> Mapping[str, Any]:
        return {flag: known.folder(flag), "nearest": known.nearest(flag)}

    yield Rule(flag, lambda known: known.nearest(flag).is_dir(),
        "must be a folder that can be made: {nearest} is no folder", "choose another", "", facts)  # fmt: skip
    yield Rule(flag, lambda known: _can_be_written(known.nearest(flag)),
        "must be writable", "choose another or change its permissions", "", facts)  # fmt: skip


FOLDERS: tuple[Rule[Folders], ...] = (
    *_written("output_dir"),
    *_written("profiler_dir"),
    *_written("tensorboard_dir"),
    *_written("ckpt_save_path"),
    Rule("ckpt_save_path",
        lambda known: known.checkpoint_bytes <= known.free_bytes("ckpt_save_path"),
        "must have room for one checkpoint: {needed} GiB, and {free} GiB are free",
        "free some or choose another folder",
        facts=lambda known: {"ckpt_save_path": known.folder("ckpt_save_path"),
            "needed": f"{known.checkpoint_bytes / 2**30:.1f}",
            "free": f"{known.free_bytes('ckpt_save_path') / 2**30:.1f}"}),
)  # fmt: skip


@dataclass(frozen=True)
class Continued:
    """A launch, and the checkpoint that it begins with; where it `continues`, the optimizer goes on too."""

    config: TrainConfig
    model: LlamaConfig
    checkpoint: Checkpoint
    continues: bool

    @property
    def before(self) -> Record:
        """The launch that wrote the checkpoint."""
        return self.checkpoint.saved.record

    def state_is_kept(self, name: str) -> bool:
        """Whether a flag of the optimizer leaves the state what it was: another value may name the same."""
        before, now = self.before.config.optim, self.config.optim
        if not self.continues or getattr(before, name) == getattr(now, name):
            return True
        return name != "optimizer" and _state_names(before) == _state_names(now)


def _state_names(section: OptimConfig) -> list[str]:
    return sorted(state_of_stand_in(section))


def _same_shape() -> Iterator[Rule[Continued]]:
    """Rules that what decides the weights is what it was; positions count where each has weights."""
    table = flag_table(TrainConfig)
    for name in [field.name for field in fields(LlamaConfig)]:
        if table[name].resume != "refused" and name != "max_seq_len":
            continue

        def holds(known: Continued, name: str = name) -> bool:
            if name == "max_seq_len" and known.model.pos_emb != "learned":
                return True
            return bool(getattr(known.model, name) == getattr(known.before.model, name))

        def facts(known: Continued, name: str = name) -> Mapping[str, Any]:
            now, before = asdict(known.model)[name], asdict(known.before.model)[name]
            return {name: str(now), "folder": known.checkpoint.folder, "saved": str(before)}

        yield Rule(name, holds, "must be that of the checkpoint {folder} ({saved})",
            "set the flag so, or choose another --run_name", "", facts)  # fmt: skip


def _same_state(name: str) -> Rule[Continued]:
    """The rule that a flag of the optimizer keeps the state of the checkpoint."""

    def facts(known: Continued) -> Mapping[str, Any]:
        before = getattr(known.before.config.optim, name)
        return {name: getattr(known.config.optim, name), "folder": known.checkpoint.folder, "saved": before}

    text, remedy = (
        "must keep the state of the checkpoint {folder} ({saved})",
        "set the flag so, take only the weights",
    )
    remedy = f"{remedy} (--load_model_only), or choose another --run_name"
    return Rule(name, lambda known: known.state_is_kept(name), text, remedy, "", facts)


CHECKPOINT: tuple[Rule[Continued], ...] = (
    *_same_shape(),
    *map(_same_state, ("optimizer", "optimizer_kwargs")),
)


LENGTH: tuple[Rule[Spec], ...] = (
    Rule("num_steps", lambda spec: spec.num_steps >= spec.start,
        "must not lie below the newest checkpoint (step {step} in {root})",
        "raise the value or choose another --run_name", "num_tokens num_samples num_epochs",
        lambda spec: {"num_steps": spec.num_steps, "step": spec.start, "root": spec.origin.root}),
)  # fmt: skip


def listing() -> str:
    """The page docs/rules.md, which `--rules` prints: a table of all rules."""
    axes = load_part("rules", folder="parallel").AXIS_RULES
    tables: dict[str, tuple[Rule[Any], ...]] = {
        "flags": CONTRADICTIONS,
        "machine": (*MACHINE, *DIVIDES, *LEADS),
        "corpus": (*SHAPES, *axes, *load_part("teacher").TEACHER_RULES, *FITS, *FOLDERS),
        "checkpoint": (*CHECKPOINT, *KEEPS_BATCH, *LENGTH),
        "no effect": IDLE,
    }
    lines = [_PREFACE, "| what | judged by | rule | other flags of the rule |", "|---|---|---|---|"]
    for when, rules in tables.items():
        for rule in rules:
            others = ", ".join(f"`--{name}`" for name in rule.beside.split())
            lines.append(f"| `{rule.subject}` | {when} | {rule.template} | {others} |")
    return "\n".join(lines)
