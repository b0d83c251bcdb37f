"""`python -m fms_fsdp ckpt inspect`: the tensors of a checkpoint, read one at a time, without a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.checkpoint.folders import Checkpoint, read_checkpoint
from fms_fsdp.checkpoint.io import CheckpointReader, load_tensor
from fms_fsdp.checkpoint.run_results import require_checkpoint
from fms_fsdp.console import rewrite_line, table
from fms_fsdp.errors import UserError
from fms_fsdp.hf.trained import check_no_step
from fms_fsdp.hf.weights import is_hf_checkpoint, open_checkpoint, weight_map
from fms_fsdp.tools.tool_flags import CkptInspectConfig

Stats = dict[str, Any]
COLUMNS = ("norm", "mean", "std", "min", "max", "zeros", "non_finite")
_LARGEST_RMS = 1e4  # of a weight; trained ones are below 10


def inspect(config: CkptInspectConfig) -> None:
    """Raises UserError if there is no such checkpoint, or a tensor cannot be read."""

    def read(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Stats]]:
        head = {"checkpoint": str(checkpoint.folder), "step": checkpoint.step}
        return head, read_stats(checkpoint.folder, optimizer=config.optimizer)

    folder = Path(config.path).expanduser()
    if is_hf_checkpoint(folder):
        check_no_step(config.step)
        if config.optimizer:
            raise UserError(
                "--optimizer=True is not supported with a Hugging Face checkpoint; remove it"
            )
        weights = open_checkpoint(folder, "--path")
        names = list(weight_map(weights.config))
        head = {"checkpoint": str(folder), "step": None}
        stats = tensor_stats(names, weights.read)
    else:
        head, stats = read_checkpoint(
            lambda: require_checkpoint(config.path, config.step, "--path"), read
        )
    norms = [found["norm"] for found in stats.values()]
    norm = None if None in norms else math.hypot(*norms)
    total = {"shape": [len(stats)], "dtype": "", "norm": norm}
    if config.json:
        return print(json.dumps(head | {"all": total, "tensors": stats}))
    rows = []
    for name, found in (stats | {"all": total}).items():
        size = "x".join(map(str, found["shape"])) or "1"
        values = [_format(found.get(key)) for key in COLUMNS]
        rows.append((name, size, found["dtype"], *values))
    print(table(("tensor", "shape", "dtype", *COLUMNS), rows, text_columns=(0, 1, 2)))


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def useless_weights(folder: Path) -> list[str]:
    """Returns the weights with non-finite or absurdly large values, each with the reason."""
    found = []
    for name, stats in read_stats(folder).items():
        if stats["non_finite"]:
            found.append(f"{name} has non-finite values")
        elif (stats["norm"] or 0.0) > _LARGEST_RMS * math.sqrt(math.prod(stats["shape"])):
            found.append(f"{name} has a norm of {stats['norm']:.3g}")
    return found


def read_stats(folder: Path, *, optimizer: bool = False) -> dict[str, Stats]:
    """Returns the statistics of each tensor of a checkpoint."""
    reader = CheckpointReader(folder)
    names = sorted(reader.read_metadata().state_dict_metadata)
    names = [name for name in names if optimizer or name.startswith("model.")]
    return tensor_stats(names, partial(load_tensor, reader))


def tensor_stats(names: Sequence[str], read: Callable[[str], torch.Tensor]) -> dict[str, Stats]:
    """Returns the statistics of each tensor; a value that is not finite is None."""
    found: dict[str, Stats] = {}
    for number, name in enumerate(names, 1):
        rewrite_line(f"{number} of {len(names)} tensors")
        tensor = read(name)
        x = tensor.double()
        dtype = str(tensor.dtype).removeprefix("torch.")
        values = {
            "norm": x.norm(),
            "mean": x.mean(),
            "std": x.std(correction=0),
            "min": x.min(),
            "max": x.max(),
            "zeros": (x == 0).double().mean(),
            "non_finite": (~torch.isfinite(x)).double().mean(),
        }
        finite = {key: v.item() if v.isfinite() else None for key, v in values.items()}
        found[name] = {"shape": list(tensor.shape), "dtype": dtype, **finite}
    rewrite_line("")
    return found
