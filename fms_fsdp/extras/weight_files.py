"""The weights of a Hugging Face folder, one at a time: safetensors read natively, or torch's .bin files.

A .bin file is a pickle: it is read by torch's loader of weights alone, which runs no code.
Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from fms_fsdp.errors import UserError, note_once
from fms_fsdp.extras.typed_json import TABLE, TEXT, list_of, parse_table, quoted, read_table, whole

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_LARGEST_HEADER = 100 << 20  # the format's own limit
_PLACES = list_of(whole(0, 1 << 60))
Weights = dict[str, Callable[[], torch.Tensor]]


def open_weights(folder: Path) -> Weights:
    """Returns for each weight, by its name in the files, a function that reads the weight. Before that
    nothing but headers is read (of .bin files, all is mapped). Of several forms, the one that transformers
    choose.

    Raises:
        UserError: there are none, some file is missing or cut, or it is of another form.
    """
    for name, read in _FORMS.items():
        index, files = folder / f"{name}.index.json", [name]
        if (folder / name).is_file():
            if index.is_file() and _files_of(index, strict=False) != files:
                note_once(f"{folder} holds {name} beside an index of other files; {name} is read")
        elif index.is_file():
            files = _files_of(index)
        else:
            continue
        if absent := [file for file in files if "/" in file or not (folder / file).is_file()]:
            missing = folder / quoted(absent[0])
            raise UserError(
                f"{missing} is missing: the folder is not whole; fetch the folder again"
            )
        found: Weights = {}
        for file in files:
            found |= read(folder / file)
        return found
    raise UserError(f"{folder} holds no {' and no '.join(_FORMS)}; name a folder with weights")


def check_finite(name: str, weight: torch.Tensor, remedy: str = "fetch the folder again") -> None:
    """Raises UserError where a weight holds inf or nan."""
    if weight.numel() and not all(map(math.isfinite, map(float, weight.aminmax()))):
        raise UserError(f"weight {name} holds values that are not finite; {remedy}")


def _files_of(index: Path, *, strict: bool = True) -> list[str]:
    try:
        where: Mapping[str, Any] = TABLE.check("weight_map", read_table(index).get("weight_map"))
        return sorted(
            {TEXT.check(f"the file of weight {quoted(name)}", file) for name, file in where.items()}
        )
    except UserError as error:
        if strict:
            raise UserError(f"{index} is no index of weights: {error}") from None
        return []


def _read_safetensors(path: Path) -> Weights:
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise UserError(f"a header of {length:,} bytes does not fit")
            header = parse_table(file.read(length), "its header")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header.pop("__metadata__", None)
        return {name: _reader(mapped, 8 + length, name, entry) for name, entry in header.items()}
    except UserError as error:
        raise UserError(
            f"{path} is no whole safetensors file: {error}; fetch the file again"
        ) from None


def _reader(mapped: mmap.mmap, start: int, name: str, entry: Any) -> Callable[[], torch.Tensor]:
    entry = TABLE.check(f"what it says of {quoted(name)}", entry)
    code = TEXT.check("dtype", entry.get("dtype"))
    shape = _PLACES.check("shape", entry.get("shape"))
    places = _PLACES.check("data_offsets", entry.get("data_offsets"))
    begin, end = places if len(places) == 2 else (1, 0)
    if not begin <= end <= len(mapped) - start:
        raise UserError("the file ends before its tensors do")
    if code not in _DTYPES:  # it may be of no use to the model
        return partial(
            _refuse, f"weight {quoted(name)} is of type {quoted(code)}, which cannot be read"
        )
    dtype, count = _DTYPES[code], math.prod(shape)
    if end - begin != count * dtype.itemsize:
        raise UserError("the file ends before its tensors do")
    if not count:
        return partial(torch.empty, shape, dtype=dtype)
    return lambda: torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + begin).view(
        shape
    )


def _refuse(text: str) -> NoReturn:
    raise UserError(text)


def _read_bin(path: Path) -> Weights:
    try:
        with open(path, "rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"  # torch's older format cannot be mapped
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        entries = {str(name): value for name, value in content.items()}
    except Exception as error:  # pickle's and zip's errors are of many kinds
        raise UserError(
            f"{path} holds more than weights, or is not whole: {_line(error)}"
        ) from None
    return {name: partial(_entry, quoted(name), value) for name, value in entries.items()}


def _entry(name: str, value: Any) -> torch.Tensor:
    if (
        not isinstance(value, torch.Tensor)
        or value.layout != torch.strided
        or value.device.type != "cpu"
    ):
        raise UserError(f"weight {name} must be a plain tensor")
    return value


def _line(error: Exception) -> str:
    return quoted(str(error).partition("\n")[0].partition(". ")[0])


_FORMS = {
    "model.safetensors": _read_safetensors,
    "pytorch_model.bin": _read_bin,
}  # how files are named
