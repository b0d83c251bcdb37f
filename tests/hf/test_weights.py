"""Safetensors files: what the safetensors package rejects is rejected here."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from fms_fsdp.errors import UserError
from fms_fsdp.hf.weights import open_checkpoint, read_safetensors
from tests.hf_folders import weights_of, write_folder

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("offsets", "num_bytes", "problem"),
    [
        ({"a": (0, 4), "b": (4, 8)}, 8, ""),
        ({"empty": (4, 4), "b": (4, 8), "a": (0, 4)}, 8, ""),
        ({"a": (0, 4), "b": (0, 4)}, 8, "invalid offset of tensor b"),
        ({"a": (0, 4), "b": (8, 12)}, 12, "invalid offset of tensor b"),
        ({"a": (4, 8)}, 8, "invalid offset of tensor a"),
        ({"a": (0, 4)}, 8, "not fully covered"),
    ],
)
def test_tensors_must_cover_their_file(
    tmp_path: Path, offsets: dict[str, tuple[int, int]], num_bytes: int, problem: str
) -> None:
    header = {}
    for name, (begin, end) in offsets.items():
        shape = [(end - begin) // 4]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    if problem:
        with pytest.raises(UserError, match=rf"is not a complete .*{problem}.*; download the"):
            read_safetensors(path)
    else:
        assert read_safetensors(path).keys() == offsets.keys()


@pytest.mark.parametrize("is_tied", [True, False])
def test_weight_missing_in_index_is_read(tmp_path: Path, is_tied: bool) -> None:
    """A head of its own in a shard of a tied GPT-2 was ignored; in one file it is an error."""
    from safetensors.torch import save_file

    folder = write_folder(tmp_path, "gpt2")
    weights = {name: weight.clone() for name, weight in weights_of("gpt2").items()}
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, "a.safetensors")}))
    head = weights["transformer.wte.weight"].clone()
    save_file(weights | {"lm_head.weight": head if is_tied else head + 1}, folder / "a.safetensors")
    if is_tied:
        open_checkpoint(folder)
    else:
        with pytest.raises(UserError, match="lm_head.weight differs from the embedding; set tie_"):
            open_checkpoint(folder)
