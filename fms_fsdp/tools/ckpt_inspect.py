"""`python -m fms_fsdp ckpt inspect`: what the tensors of a checkpoint hold, and how far two checkpoints are
apart.

One tensor is in memory at a time, two with `--against`, beside copies in fp64. No model is built.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fms_fsdp.checkpoint.checkpointer import first_failure, load_tensor
from fms_fsdp.checkpoint.folders import Checkpoint
from fms_fsdp.checkpoint.storage import CheckpointReader
from fms_fsdp.config import flag
from fms_fsdp.errors import UserError
from fms_fsdp.tools.table import show_progress, table
from fms_fsdp.tools.trained_run import find_checkpoint

Facts = dict[str, Any]
NUMBERS = ("norm", "mean", "std", "min", "max", "zeros", "non_finite", "distance", "relative")


@dataclass(frozen=True)
class CkptInspectConfig:
    """Shape, norm, mean, spread, zeros and non-finite values of every tensor of a checkpoint."""

    path: str = flag(
        "",
        "a run folder, a folder of checkpoints or one checkpoint (of several, the newest)",
        positional=True,
    )
    step: int | None = flag(None, "the checkpoint of this step", minimum=1)
    against: str = flag("", "another checkpoint, from which the distance of each tensor is told")
    optimizer: bool = flag(False, "tell of the optimizer's tensors too")
    json: bool = flag(False, "print one JSON object")


def main(config: CkptInspectConfig) -> None:
    """The command.

    Raises:
        UserError: there is no such checkpoint, or a file of it cannot be read as tensors.
    """
    checkpoint = find_checkpoint(config.path, config.step, "--path")
    other = find_checkpoint(config.against, None, "--against") if config.against else None
    readers = [CheckpointReader(each.folder) for each in (checkpoint, other) if each is not None]
    sizes = list(map(_sizes, readers))
    names = [name for name in sorted(sizes[0]) if config.optimizer or name.startswith("model.")]
    found = dict[str, Facts]()
    for number, name in enumerate(names, 1):
        show_progress(f"{number} of {len(names)} tensors")
        same = [own for own, known in zip(readers, sizes, strict=True) if known.get(name) == sizes[0][name]]
        found[name] = _describe(checkpoint, same, name)
    show_progress("")
    if config.json:
        whole = {"checkpoint": str(checkpoint.folder), "step": checkpoint.step, "all": _of_all(found)}
        return print(json.dumps(whole | {"tensors": found}))
    shown = NUMBERS if other is not None else NUMBERS[:-2]
    rows = []
    for name, facts in (found | {"all": _of_all(found)}).items():
        size = "x".join(map(str, facts["shape"])) or "1"
        rows.append((name, size, facts["dtype"], *(_cell(facts.get(key)) for key in shown)))
    print(table(("tensor", "shape", "dtype", *shown), rows, text_columns=(0, 1, 2)))


def _sizes(reader: CheckpointReader) -> dict[str, torch.Size]:
    entries = reader.metadata.state_dict_metadata.items()
    return {name: entry.size for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def _describe(checkpoint: Checkpoint, readers: list[CheckpointReader], name: str) -> Facts:
    """What is told of a tensor; `distance` is the norm of the difference, `relative` its share of the norm of
    the other tensor, and both are missing without the `readers` of another one of this name and shape. A
    number that is not finite is None."""
    try:
        tensor, *others = (load_tensor(reader, name) for reader in readers)
    except CheckpointException as error:
        _, inner = first_failure(error)
        raise UserError(f"--path ({checkpoint.folder}): {name} cannot be read: {inner}") from error
    values, dtype = tensor.double(), str(tensor.dtype).removeprefix("torch.")
    numbers = {"norm": values.norm(), "mean": values.mean(), "std": values.std(correction=0)}
    numbers |= {"min": values.min(), "max": values.max(), "zeros": (values == 0).double().mean()}
    numbers |= {"non_finite": (~torch.isfinite(values)).double().mean()}
    for other in map(torch.Tensor.double, others):
        numbers["distance"] = (values - other).norm()
        numbers["relative"] = numbers["distance"] / other.norm()
    finite = {key: number.item() if number.isfinite() else None for key, number in numbers.items()}
    return {"shape": list(tensor.shape), "dtype": dtype, **finite}


def _of_all(found: Mapping[str, Facts]) -> Facts:
    """Norm and distance of all tensors together, of those that have one."""
    whole: Facts = {"shape": [len(found)], "dtype": ""}
    for key in ("norm", "distance"):
        squares = [facts[key] ** 2 for facts in found.values() if facts.get(key) is not None]
        whole |= {key: math.sqrt(sum(squares))} if squares else {}
    return whole


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
