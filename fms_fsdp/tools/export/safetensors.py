"""Tensors → safetensors files, one tensor at a time.

    8 bytes: length of the header │ header: JSON of names, dtypes, shapes, places │ the tensors' bytes

Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fms_fsdp.extras.weight_files import check_finite

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
INDEX = "model.safetensors.index.json"
Shapes = Mapping[str, torch.Size]


def split_by_size(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """The names in their order, in groups of at most `most` bytes, or of one name."""
    groups, left = list[list[str]](), 0
    for name, size in sizes.items():
        if not groups or size > left:
            groups.append([])
            left = most
        groups[-1].append(name)
        left -= size
    return groups


def write_tensors(
    folder: Path, shapes: Shapes, dtype: torch.dtype, most: int, read: Callable[[str], torch.Tensor]
) -> Iterable[str]:
    """Writes all tensors into files of at most `most` bytes, with an index if there are several; yields each
    name when it is written. `read` gives a tensor of that shape, of any dtype."""
    sizes = {name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}
    groups, where = split_by_size(sizes, most), dict[str, str]()
    for number, names in enumerate(groups, 1):
        file_name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        file_name = file_name if len(groups) > 1 else "model.safetensors"
        where |= dict.fromkeys(names, file_name)
        with open(folder / file_name, "wb") as file:
            file.write(_header(names, shapes, sizes, dtype))
            for name, content in _read_ahead(lambda name: _as(dtype, name, read(name)), names):
                file.write(content.view(-1).view(torch.uint8).numpy().data)
                yield name
            file.flush()
            os.fsync(file.fileno())
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _as(dtype: torch.dtype, name: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight in that dtype. Raises: UserError where a value is or becomes infinite."""
    check_finite(name, weight, "choose another checkpoint")
    made = weight.to(dtype).contiguous()
    code = next(code for code, known in DTYPES.items() if known == dtype)
    check_finite(name, made, f"in {code} they become infinite; use another --dtype than {code}")
    return made


def _read_ahead(
    read: Callable[[str], torch.Tensor], names: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each name and its tensor; the next one is read while this one is written."""
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(read, names[0])
        for name, following in zip(names, [*names[1:], ""], strict=True):
            content = ahead.result()
            if following:
                ahead = pool.submit(read, following)
            yield name, content


def _header(
    names: Iterable[str], shapes: Shapes, sizes: Mapping[str, int], dtype: torch.dtype
) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in names:
        end = begin + sizes[name]
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shapes[name]),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
