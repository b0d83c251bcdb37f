"""The rules that this machine decides, beside the flags. They are judged before the process group is made."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.checkpoint.retention import parse_schedule
from fms_fsdp.config import TrainConfig
from fms_fsdp.config.axes import ParallelDims
from fms_fsdp.config.rule import Rule
from fms_fsdp.config.rules import CONTRADICTIONS, IDLE
from fms_fsdp.parallel.compile import compiles, missing_compiler

_FILES = ("metrics.jsonl", "status.json", "config.json", "log.txt")  # of a run folder, which a launch writes
_TRACKER_PACKAGES = {"wandb", "mlflow", "aim", "codecarbon"}  # each tracker needs the package of its name

_PREFACE = """# Rules

`python main_training.py --rules > docs/rules.md` writes this page; a test compares the page with the code.

A launch is refused with one line, `--flag (value) rule; remedy`, and exit status 2, where a rule does not
hold. Names in braces stand for values. Rules of *flags* are judged before torch is imported, rules of the
*machine* before the process group is made. A flag with *no effect* is refused only where the flag and the
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
    """Whether some checkpoint before the last has a validation loss to be ranked by."""
    section, interval = known.config.checkpoint, known.config.eval.eval_interval
    schedule = parse_schedule(section.checkpoint_schedule, section.checkpoint_interval)
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


MACHINE: tuple[Rule[Hardware], ...] = (
    Rule("keep_best", _are_ranked, "ranks checkpoints whose step is evaluated, and none is before the last",
        "let an evaluation (--eval_interval {eval_interval}) fall on the step of a checkpoint",
        "eval_interval checkpoint_interval checkpoint_schedule"),
    Rule("trackers", lambda known: not _missing_package(known),
        "needs the package {trackers}, which is not installed", "pip install {trackers}",
        facts=lambda known: {"trackers": _missing_package(known)}),
    Rule("recompute", lambda known: known.config.parallel.recomputes != "cheap" or _compiles(known),
        "needs --use_torch_compile=True", "add it, or use ops or blocks", "use_torch_compile",
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
        "has no kernel under --document_mask on GPUs", "leave one of them out", "document_mask"),
    Rule("dist_backend", lambda known: known.config.parallel.dist_backend != "nccl" or known.is_gpu,
        "needs a GPU", "leave it out, or use gloo"),
    Rule("dist_backend",
        lambda known: known.config.parallel.dist_backend != "gloo"
        or not known.is_gpu or known.dims.strategy == "none",
        "cannot reduce gradients on GPUs", "leave it out, or use nccl"),
    Rule("memory_snapshot", lambda known: known.is_gpu or not known.config.profiler.memory_snapshot,
        "needs a GPU, whose allocator it records", "leave it out"),
    Rule("cpu_offload",
        lambda known: not known.config.parallel.cpu_offload or known.dims.strategy != "none",
        "needs a sharded model", "add --sharding_strategy=fsdp, which one process can use too",
        "sharding_strategy"),
    Rule("output_dir", lambda known: not _is_no_file(known),
        "must hold {name} as a file", "remove what is there",
        facts=lambda known: {"output_dir": known.config.output_dir, "name": _is_no_file(known)}),
)  # fmt: skip


def listing() -> str:
    """The page docs/rules.md, which `--rules` prints: a table of all rules."""
    kinds: dict[str, tuple[Rule[Any], ...]]
    kinds = {"flags": CONTRADICTIONS, "machine": MACHINE, "no effect": IDLE}
    lines = [_PREFACE, "| flag | judged by | rule | other flags of the rule |", "|---|---|---|---|"]
    for when, rules in kinds.items():
        for rule in rules:
            others = ", ".join(f"`--{name}`" for name in rule.beside.split())
            lines.append(f"| `--{rule.flag}` | {when} | {rule.template} | {others} |")
    return "\n".join(lines)
