"""The weights of a Hugging Face folder, one at a time: safetensors read natively, or torch's .bin files.

A .bin file is a pickle: it is read by torch's loader of weights alone, which runs no code.
Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fms_fsdp.errors import UserError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LARGEST_HEADER = 100 << 20  # the format's own limit
Weights = dict[str, Callable[[], torch.Tensor]]


def open_weights(folder: Path) -> Weights:
    """Their name of every weight → what reads it. Nothing but headers is read before (of .bin files, all is
    mapped).

    Raises:
        ValueError: there are none, some file is missing or cut, or it is of another form.
    """
    for name, read in _FORMS.items():
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                where: dict[str, str] = json.loads(index.read_text())["weight_map"]
                files = sorted(set(where.values()))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise UserError(f"{index} is no index of weights: {error}") from None
        elif (folder / name).is_file():
            files = [name]
        else:
            continue
        if absent := [file for file in files if "/" in file or not (folder / file).is_file()]:
            raise UserError(f"{folder / absent[0]} is missing: the folder is not whole; fetch it again")
        found: Weights = {}
        for file in files:
            found |= read(folder / file)
        return found
    raise UserError(f"{folder} holds no {' and no '.join(_FORMS)}; name a folder with weights")


def _read_safetensors(path: Path) -> Weights:
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise UserError(f"its header of {length:,} bytes does not fit")
            header: dict[str, Any] = json.loads(file.read(length))
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header.pop("__metadata__", None)
        return {name: _reader(mapped, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is no whole safetensors file: {error}; fetch it again") from None


def _reader(mapped: mmap.mmap, start: int, entry: dict[str, Any]) -> Callable[[], torch.Tensor]:
    if entry["dtype"] not in _DTYPES:
        raise UserError(f"weights of type {entry['dtype']} cannot be read")
    dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    count = math.prod(shape)
    if end - begin != count * dtype.itemsize or not 0 <= begin <= end <= len(mapped) - start:
        raise UserError("it ends before its tensors do")
    return lambda: torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + begin).view(shape)


def _read_bin(path: Path) -> Weights:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        entries = {str(name): tensor for name, tensor in tensors.items()}
    except Exception as error:  # pickle's and zip's errors are of many kinds
        raise UserError(f"{path} holds more than weights, or is not whole: {_line(error)}") from None
    return {name: partial(entries.__getitem__, name) for name in entries}


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0][:200]


_FORMS = {"model.safetensors": _read_safetensors, "pytorch_model.bin": _read_bin}  # how files are named
